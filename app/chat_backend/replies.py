"""Requests replies from the engine, streams them to the screens, and saves them while they grow."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from app.chat_backend.chat_repository import ChatRepository
from app.chat_backend.client_errors import client_errors, to_thread
from app.chat_backend.converters import finish_of, message_id, title_of, usage_of
from app.chat_backend.engine.connection import EngineConnection
from app.chat_backend.engine.server import ReadyEngine
from app.chat_backend.prompt_messages import prompt_messages, retry_temperature, sampling_fields, step_messages
from app.chat_backend.reply_parts import ENGINE_STOPPED, Accepted, Call, Ended, ReasoningDelta, ReplyPart, TextDelta
from app.chat_backend.tools import CallEnded, ChatTools, OfferedTools
from app.generation.events import PromptProgress
from app.history.history import History
from app.history.records import Chat, State, StoredMessage, StoredUsage, ToolStep, path_to
from quant.errors import InglenookError
from tui import types
from tui.client import ClientError

T = TypeVar("T")

MAX_TURNS = 50  # maximum number of turns with tool calls in one reply
SAVE_SECONDS = 0.5  # interval between two saves: a killed program loses at most this much of a reply

_GLANCES, _GLANCE = 10, 0.1  # number of checks whether the engine has exited, and seconds between them
_STOPPED = Ended(State.STOPPED, None)


@dataclass(slots=True)
class _ReplyInProgress:
    """A reply that is being generated."""

    message: int
    chat: types.ChatId
    history: History
    engine: ReadyEngine
    reply: str = ""  # the server's id of the reply
    retry_temperature: float | None = None  # set if a retry is sampled, although the settings are greedy
    num_left_out: int = 0  # number of messages of the chat that are left out of the prompt
    text: str = ""
    reasoning: str = ""
    reasoning_started: float | None = None
    reasoning_seconds: float = 0.0
    steps: list[ToolStep] = field(default_factory=list)
    ended: Ended = _STOPPED  # how the last turn of the model ended
    saved_at: float = field(default_factory=time.monotonic)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)  # set when the stream is no longer read
    is_lost: bool = False  # whether the engine exited while tool calls ran
    is_stopping: bool = False  # whether the engine was asked to stop the reply
    has_ended: bool = False  # whether the final state of the reply is saved

    def add(self, part: ReasoningDelta | TextDelta) -> None:
        now = time.monotonic()
        if isinstance(part, ReasoningDelta):
            self.reasoning += part.text
            self.reasoning_started = self.reasoning_started or now
            self.reasoning_seconds = now - self.reasoning_started
        else:
            self.text += part.text

    def add_step(self, call: Call, ended: CallEnded, *, joins_previous: bool) -> None:
        """Add a tool call with its result, and move the text and the reasoning that precede it into this step."""
        step = ToolStep(
            call.name, call.arguments, ended.result, ended.is_error, self.text, self.reasoning, joins_previous
        )
        self.steps.append(step)
        self.text, self.reasoning = "", ""

    def continued(self, body: Mapping[str, object]) -> Mapping[str, object]:
        """Return the request for the next turn: `body`, extended with the steps so far."""
        with_reasoning = self.engine.endpoint.is_inglenook
        steps = step_messages(self.steps, self.message, with_reasoning=with_reasoning)
        messages = body["messages"]
        return {**body, "messages": [*messages, *steps] if isinstance(messages, list) else steps}

    @property
    def usage(self) -> StoredUsage | None:
        """The usage of the last turn, with what only the chat knows: retry, length of the context, and trimming."""
        usage, limit = self.ended.usage, self.engine.context_length
        if usage is None:
            return None
        is_full = self.ended.state is State.CUT and limit is not None and usage.total_tokens >= limit
        return replace(
            usage,
            retry_temperature=self.retry_temperature,
            is_context_full=is_full,
            num_left_out=self.num_left_out,
        )

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
            steps=self.steps,
        )

    @property
    def is_save_due(self) -> bool:
        return time.monotonic() - self.saved_at >= SAVE_SECONDS


class ChatReplies:
    """Implements `tui.client.Replies`."""

    def __init__(self, chats: ChatRepository, connection: EngineConnection, tools: ChatTools) -> None:
        self._chats = chats
        self._connection = connection
        self._tools = tools
        self._in_progress: dict[int, _ReplyInProgress] = {}

    async def reply(self, chat: types.ChatId, to: types.MessageId) -> AsyncGenerator[types.ReplyEvent, None]:
        question, (history, number) = int(to), await to_thread(self._chats.locate, chat)
        await to_thread(history.mark_reply, number, question)  # until the reply starts, which can take minutes
        self._chats.in_progress.add((chat, question))
        try:
            async with aclosing(self._attempts(chat, question)) as events:
                async for event in events:
                    yield event
        finally:
            self._chats.in_progress.discard((chat, question))
            history.unmark_reply(question)

    async def _attempts(self, chat: types.ChatId, to: int) -> AsyncGenerator[types.ReplyEvent, None]:
        """Yield the events of a reply. If the engine exits before the reply starts, try again."""
        title, has_started = await to_thread(self._title, chat), False
        for has_retried in (False, True):
            if await self._connection.is_lost() or self._connection.is_restarting:
                yield types.EngineRestarting()
            try:
                async with (
                    self._connection.use(retry=True, reply_in=title) as engine,
                    aclosing(self._reply(chat, to, engine)) as events,
                ):
                    async for event in events:
                        has_started = True
                        yield event
                return
            except ClientError as problem:
                if has_started or has_retried or not await self._is_exit(problem):
                    raise

    async def _is_exit(self, problem: ClientError) -> bool:
        """Whether a request failed because the engine has exited, which may take a moment to show."""
        from app.client.http import ServerUnreachable

        for _ in range(_GLANCES if isinstance(problem.__cause__, ServerUnreachable) else 0):
            if await self._connection.is_lost():
                return True
            await asyncio.sleep(_GLANCE)
        return False

    def _title(self, chat: types.ChatId) -> str:
        history, number = self._chats.locate(chat)
        return title_of(history.chats.get(number))

    async def _reply(self, chat: types.ChatId, to: int, engine: ReadyEngine) -> AsyncGenerator[types.ReplyEvent, None]:
        found, branch, is_retry = await to_thread(self._branch, chat, to)
        offered = await self._tools.offered(found.settings.disabled_tools)
        body = {**self._body(chat, found, branch, engine, is_retry=is_retry), **offered.field()}
        async with aclosing(engine.endpoint.stream(body)) as parts:
            first = await anext(parts)
            growing = await self._begin(chat, to, engine)
            growing.num_left_out = len(found.trim.left_out)
            if is_retry:
                growing.retry_temperature = retry_temperature(found.settings.sampling, engine.default_sampling)
            try:
                yield types.ReplyStarted(message_id(growing.message), engine.model)
                turns = self._turns(growing, _prepend(first, parts), body, offered)
                async with aclosing(turns) as events:
                    async for event in events:
                        yield event
            finally:
                if not growing.has_ended:  # the caller closed the generator
                    growing.save(State.STOPPED)
                growing.history.unmark_reply(growing.message)
                self._chats.in_progress.discard((chat, growing.message))
                self._in_progress.pop(growing.message, None)

    def _branch(self, chat: types.ChatId, to: int) -> tuple[Chat, Sequence[StoredMessage], bool]:
        """Return the chat, the messages up to `to`, and whether `to` already has a reply."""
        history, number = self._chats.locate(chat)
        messages = {message.id: message for message in history.messages.in_chat(number)}
        is_retry = any(message.parent == to and message.text for message in messages.values())
        return history.chats.get(number), path_to(messages, to), is_retry

    def _body(
        self, chat: types.ChatId, found: Chat, branch: Sequence[StoredMessage], engine: ReadyEngine, *, is_retry: bool
    ) -> Mapping[str, object]:
        ours = engine.endpoint.is_inglenook
        own = {"service_class": "interactive", "return_progress": True} if ours else {}
        if ours and self._chats.is_private(chat):
            own["store"] = False
        return {
            "model": engine.model,
            "messages": prompt_messages(found, branch, with_reasoning=ours),
            **sampling_fields(found.settings.sampling, engine.default_sampling, retry=is_retry),
            **own,
        }

    async def _begin(self, chat: types.ChatId, to: int, engine: ReadyEngine) -> _ReplyInProgress:
        def begin() -> tuple[StoredMessage, History]:
            history, number = self._chats.locate(chat)
            message = history.messages.start_reply(number, to, engine.model)
            history.mark_reply(number, message.id)
            return message, history

        message, history = await to_thread(begin)
        growing = _ReplyInProgress(message.id, chat, history, engine)
        self._in_progress[message.id] = growing
        self._chats.in_progress.add((chat, message.id))
        return growing

    async def _turns(
        self,
        growing: _ReplyInProgress,
        parts: AsyncGenerator[ReplyPart],
        body: Mapping[str, object],
        offered: OfferedTools,
    ) -> AsyncGenerator[types.ReplyEvent, None]:
        """Yield the events of a reply, and save it as it grows. Turns of the model and tool calls alternate.

        The last event is always a ReplyEnd.
        """
        try:
            for _ in range(MAX_TURNS):
                async with aclosing(parts), aclosing(self._turn(growing, parts)) as events:
                    async for event in events:
                        yield event
                if not growing.ended.calls or growing.is_stopping:
                    break
                async with aclosing(self._run_calls(growing, growing.ended.calls, offered)) as results:
                    async for result in results:
                        yield result
                if growing.is_stopping:
                    break
                parts = growing.engine.endpoint.stream(growing.continued(body))
        except ClientError as problem:
            await to_thread(growing.save, State.FAILED, StoredUsage(error=problem.report))
            yield types.ReplyEnd(types.Finish.FAILED, error=problem.report)
            return
        state = State.STOPPED if growing.is_stopping else growing.ended.state
        usage = growing.usage
        await to_thread(growing.save, state, usage)
        yield types.ReplyEnd(finish_of(state, usage), usage_of(usage))

    async def _turn(
        self, growing: _ReplyInProgress, parts: AsyncGenerator[ReplyPart]
    ) -> AsyncGenerator[types.ReplyEvent, None]:
        """Yield the events of one turn of the model, and set `growing.ended`."""
        growing.ended = _STOPPED
        while True:
            if growing.is_save_due:
                await to_thread(growing.save)
            with client_errors():
                part = await _next(parts, growing.stopped)
            if part is None or isinstance(part, Ended):
                growing.ended = part or _STOPPED
                return
            if isinstance(part, Accepted):
                growing.reply = part.reply
            elif isinstance(part, PromptProgress):
                yield types.PromptProgress(part.done, part.total, part.cached)
            else:
                growing.add(part)
                yield _delta(part)

    async def _run_calls(
        self, growing: _ReplyInProgress, calls: Sequence[Call], offered: OfferedTools
    ) -> AsyncGenerator[types.ReplyEvent, None]:
        """Run the tool calls one after another, and add each to the steps of the reply. Stopping the reply ends the
        calls.

        Raises ClientError if the engine exits. A call may wait for the user, and the reply keeps the engine meanwhile,
        so the engine could not restart.
        """
        watching = asyncio.create_task(self._stop_when_lost(growing))
        try:
            for index, call in enumerate(calls):
                async with aclosing(self._tools.run(growing.chat, call, offered)) as events:
                    while (event := await _next(events, growing.stopped)) is not None:
                        if isinstance(event, CallEnded):
                            growing.add_step(call, event, joins_previous=index > 0)
                            break
                        yield event
                if growing.is_lost:
                    raise ClientError(*ENGINE_STOPPED)
                if growing.stopped.is_set():
                    growing.is_stopping = True
                    return
                await to_thread(growing.save)
        finally:
            watching.cancel()

    async def _stop_when_lost(self, growing: _ReplyInProgress) -> None:
        await self._connection.wait_until_lost()
        growing.is_lost = True
        growing.stopped.set()

    async def stop(self, message: types.MessageId) -> None:
        """Stop a reply. Inglenook still reports its usage; the connection to any other server is closed."""
        if (current := self._in_progress.get(int(message))) is not None:
            await self._stop(current)

    async def stop_by_id(self, reply: str) -> bool:
        """Stop the reply with this server id. Returns whether it belongs to this chat."""
        current = next((one for one in self._in_progress.values() if reply and one.reply == reply), None)
        if current is not None:
            await self._stop(current)
        return current is not None

    async def _stop(self, current: _ReplyInProgress) -> None:
        current.is_stopping = True
        try:
            await current.engine.endpoint.stop(current.reply)
        except InglenookError:  # not an Inglenook server, or it has exited
            current.stopped.set()

    async def count_tokens(self, text: str) -> int:
        async with self._connection.use() as engine:
            return await engine.endpoint.count(engine.model, text=text)

    def estimates_counts(self) -> bool:
        return self._connection.is_remote


def _delta(part: ReasoningDelta | TextDelta) -> types.ReplyEvent:
    kind = types.ReasoningDelta if isinstance(part, ReasoningDelta) else types.TextDelta
    return kind(part.text, part.tokens)


async def _prepend(first: ReplyPart, parts: AsyncGenerator[ReplyPart]) -> AsyncGenerator[ReplyPart]:
    yield first
    async for part in parts:
        yield part


async def _next(parts: AsyncGenerator[T], stopped: asyncio.Event) -> T | None:
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
