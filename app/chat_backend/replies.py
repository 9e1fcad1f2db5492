"""The replies of the port: requested from the engine, streamed to the screens, and saved while they grow."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from app.chat_backend.chat_repository import ChatRepository
from app.chat_backend.client_errors import client_errors, to_thread
from app.chat_backend.converters import message_id, usage_of
from app.chat_backend.engine.connection import EngineConnection, ReadyEngine
from app.chat_backend.prompt_messages import prompt_messages, sampling_fields
from app.chat_backend.reply_parts import Accepted, Ended, ReplyPart
from app.generation.events import PromptProgress, ReasoningDelta, TextDelta
from app.history.history import History
from app.history.records import State, StoredMessage, StoredUsage, path_to
from quant.errors import InglenookError
from tui import types
from tui.client import ClientError

SAVE_SECONDS = 0.5  # at most this much of a reply is lost if the program is killed

_FINISH = {
    State.WHOLE: types.Finish.COMPLETE,
    State.CUT: types.Finish.LENGTH,
    State.STOPPED: types.Finish.STOPPED,
    State.FAILED: types.Finish.FAILED,
}


@dataclass(slots=True)
class _ReplyInProgress:
    """A reply that is being generated."""

    message: int
    chat: int
    history: History
    engine: ReadyEngine
    reply: str = ""  # its id at the server
    text: str = ""
    reasoning: str = ""
    reasoning_started: float | None = None
    reasoning_seconds: float = 0.0
    saved_at: float = field(default_factory=time.monotonic)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)  # set when the stream is no longer read
    is_stopping: bool = False  # whether the engine was asked to stop it
    has_ended: bool = False  # whether its final state is saved

    def add(self, part: ReasoningDelta | TextDelta) -> None:
        now = time.monotonic()
        if isinstance(part, ReasoningDelta):
            self.reasoning += part.text
            self.reasoning_started = self.reasoning_started or now
            self.reasoning_seconds = now - self.reasoning_started
        else:
            self.text += part.text

    def save(self, state: State = State.COMING, usage: StoredUsage | None = None) -> None:
        """Save the reply in its current state."""
        self.saved_at = time.monotonic()
        self.has_ended = state is not State.COMING
        self.history.messages.write_reply(
            self.message,
            self.text,
            self.reasoning,
            reasoning_seconds=self.reasoning_seconds,
            state=state,
            usage=usage,
        )

    @property
    def is_save_due(self) -> bool:
        return time.monotonic() - self.saved_at >= SAVE_SECONDS


class ChatReplies:
    """Implements `tui.client.Replies`."""

    def __init__(self, chats: ChatRepository, connection: EngineConnection) -> None:
        self._chats = chats
        self._connection = connection
        self._in_progress: dict[int, _ReplyInProgress] = {}

    async def reply(self, chat: types.ChatId, to: types.MessageId) -> AsyncGenerator[types.ReplyEvent, None]:
        async with self._connection.use(retry=True) as engine, aclosing(self._reply(chat, int(to), engine)) as events:
            async for event in events:
                yield event

    async def _reply(self, chat: types.ChatId, to: int, engine: ReadyEngine) -> AsyncGenerator[types.ReplyEvent, None]:
        body = await to_thread(self._body, chat, to, engine)
        async with aclosing(engine.endpoint.stream(body)) as parts:
            first = await anext(parts)
            current = await self._begin(chat, to, engine)
            try:
                yield types.ReplyStarted(message_id(current.message), engine.model)
                async with aclosing(self._reply_events(current, first, parts)) as events:
                    async for event in events:
                        yield event
            finally:
                if not current.has_ended:  # the caller closed the generator
                    current.save(State.STOPPED)
                self._chats.in_progress.discard((chat, current.message))
                self._in_progress.pop(current.message, None)

    def _body(self, chat: types.ChatId, to: int, engine: ReadyEngine) -> dict[str, object]:
        history, number = self._chats.locate(chat)
        found = history.chats.get(number)
        messages = {message.id: message for message in history.messages.in_chat(number)}
        branch = path_to(messages, to)
        retry = any(message.parent == to and message.text for message in messages.values())
        ours = engine.endpoint.is_inglenook
        own = {"service_class": "interactive", "return_progress": True} if ours else {}
        if ours and self._chats.is_private(chat):
            own["store"] = False
        return {
            "model": engine.model,
            "messages": prompt_messages(found, branch, with_reasoning=ours),
            **sampling_fields(found.settings.sampling, engine.default_sampling, retry=retry),
            **own,
        }

    async def _begin(self, chat: types.ChatId, to: int, engine: ReadyEngine) -> _ReplyInProgress:
        def begin() -> tuple[StoredMessage, History, int]:
            history, number = self._chats.locate(chat)
            return history.messages.start_reply(number, to, engine.model), history, number

        message, history, number = await to_thread(begin)
        current = _ReplyInProgress(message.id, number, history, engine)
        self._in_progress[message.id] = current
        self._chats.in_progress.add((chat, message.id))
        return current

    async def _reply_events(
        self, current: _ReplyInProgress, first: ReplyPart, parts: AsyncGenerator[ReplyPart]
    ) -> AsyncGenerator[types.ReplyEvent, None]:
        """Yield the events of a reply and save it as it grows. Always ends with a ReplyEnd."""
        part: ReplyPart | None = first
        try:
            while part is not None and not isinstance(part, Ended):
                if isinstance(part, Accepted):
                    current.reply = part.reply
                elif isinstance(part, PromptProgress):
                    yield types.PromptProgress(part.done, part.total, part.cached)
                else:
                    current.add(part)
                    yield _delta(part)
                if current.is_save_due:
                    await to_thread(current.save)
                with client_errors():
                    part = await _next(parts, current.stopped)
        except ClientError as problem:
            await to_thread(current.save, State.FAILED, StoredUsage(error=problem.sentences))
            yield types.ReplyEnd(types.Finish.FAILED, error=problem.sentences)
            return
        ended = part or Ended(State.STOPPED, None)
        if current.is_stopping:
            ended = Ended(State.STOPPED, ended.usage)
        await to_thread(current.save, ended.state, ended.usage)
        yield types.ReplyEnd(_FINISH[ended.state], usage_of(ended.usage))

    async def stop(self, message: types.MessageId) -> None:
        """Stop a reply. Inglenook then reports its usage; the connection to another server is closed."""
        if (current := self._in_progress.get(int(message))) is not None:
            await self._stop(current)

    async def stop_by_id(self, reply: str) -> bool:
        """Stop a reply by its id at the server. Returns whether it belongs to this chat."""
        current = next((one for one in self._in_progress.values() if reply and one.reply == reply), None)
        if current is not None:
            await self._stop(current)
        return current is not None

    async def _stop(self, current: _ReplyInProgress) -> None:
        current.is_stopping = True
        try:
            await current.engine.endpoint.stop(current.reply)
        except InglenookError:  # another server, or one that has exited
            current.stopped.set()

    async def count_tokens(self, text: str) -> int:
        async with self._connection.use() as engine:
            return await engine.endpoint.count(text=text)


def _delta(part: ReasoningDelta | TextDelta) -> types.ReplyEvent:
    return types.ReasoningDelta(part.text) if isinstance(part, ReasoningDelta) else types.TextDelta(part.text)


async def _next(parts: AsyncGenerator[ReplyPart], stopped: asyncio.Event) -> ReplyPart | None:
    """Return the next part, or None if the reply is stopped first."""
    next_part = asyncio.ensure_future(anext(parts))
    stopping = asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait((next_part, stopping), return_when=asyncio.FIRST_COMPLETED)
        return next_part.result() if next_part.done() else None
    finally:
        for task in (next_part, stopping):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
