"""The context of a chat: computes how full it is, and trims it."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from app.chat_backend.chat_repository import ChatRepository
from app.chat_backend.client_errors import to_thread
from app.chat_backend.converters import message_id
from app.chat_backend.engine.connection import EngineConnection
from app.chat_backend.engine.server import ReadyEngine
from app.chat_backend.prompt_messages import prompt_messages, prompt_text
from app.chat_backend.token_counter import TokenCounter, token_counter
from app.history.records import Chat as StoredChat
from app.history.records import Role, StoredMessage, Trim, path_to
from tui.client import ClientError
from tui.types import Chat, ChatId, ContextBudget, FullContext, MessageId, TrimPlan

_RESERVE = 1024  # tokens reserved for the reply if the chat sets no max_tokens
_RESERVED_SHARE = 4  # maximum reserve: 1/4 of the context
_SUMMARY_TOKENS = 300
_SUMMARY_SHARE = 8  # maximum length of a summary: 1/8 of the context
_SUMMARIZE = "Summarize what was said so far in a few sentences: facts, decisions and open questions. Write only that."


class ChatContext:
    """Implements `tui.client.Context`."""

    def __init__(self, chats: ChatRepository, connection: EngineConnection) -> None:
        self._chats = chats
        self._connection = connection

    async def budget(self, chat: ChatId | None, leaf: MessageId | None, typed: str) -> ContextBudget:
        async with self._connection.use() as engine:
            found, branch = await to_thread(self._branch, chat, leaf)
            counter = await token_counter(engine, found, branch)
            return await _budget(engine, counter, found, branch, typed)

    async def plan(self, chat: ChatId, leaf: MessageId | None, how: FullContext, typed: str) -> TrimPlan:
        """Plan which of the oldest turns to leave out: at least one, and enough to free `_tokens_to_free` tokens.

        More turns are left out until `typed` fits. A turn is a question with its answers.
        """
        found, branch = await to_thread(self._branch, chat, leaf)
        async with self._connection.use() as engine:
            counter = await token_counter(engine, found, branch)
            before = await _budget(engine, counter, found, branch, typed)
            of_typed = await counter.text(typed) if typed else 0
            for_summary = _summary_tokens(engine) if how is FullContext.SUMMARIZE else 0
            turns = _turns(found, branch, is_answered=bool(typed))
            num_turns = await _enough(counter, turns, for_summary + _tokens_to_free(before, of_typed))
            while True:
                dropped = [message.id for turn in turns[:num_turns] for message in turn]
                kept = {} if how is FullContext.SUMMARIZE and dropped else found.trim.by_message
                trimmed = replace(found, trim=Trim((*found.trim.left_out, *dropped), summaries=kept))
                freed = before.used - (await _budget(engine, counter, trimmed, branch, typed)).used - for_summary
                if freed >= before.lacking or num_turns == len(turns):
                    break
                num_turns += 1
        return TrimPlan(how, tuple(message_id(message) for message in dropped), freed if dropped else 0)

    async def trim(self, chat: ChatId, plan: TrimPlan) -> Chat:
        dropped = [int(message) for message in plan.messages]
        summarizes = dropped and plan.how is FullContext.SUMMARIZE
        summary = {dropped[-1]: await self._summary(chat, dropped[-1])} if summarizes else {}

        def trim() -> None:
            history, number = self._chats.locate(chat)
            before = history.chats.get(number).trim
            left_out = tuple(dict.fromkeys((*before.left_out, *dropped)))
            history.chats.trim(number, Trim(left_out, summaries={**before.by_message, **summary}))

        await to_thread(trim)
        return await self._chats.open(chat)

    async def _summary(self, chat: ChatId, last: int) -> str:
        """Let the model summarize the messages up to `last`, including messages that were left out before."""
        found, branch = await to_thread(self._branch, chat, message_id(last))
        request = [*prompt_messages(found, branch, with_reasoning=False), {"role": "user", "content": _SUMMARIZE}]
        async with self._connection.use() as engine:
            own: dict[str, object] = {"service_class": "interactive"} if engine.endpoint.is_inglenook else {}
            if self._chats.is_private(chat) and own:
                own["store"] = False
            longest = _summary_tokens(engine)
            limit = engine.context_length
            counter = await token_counter(engine, found, branch)
            readable = request if limit is None else await _shortened(counter, request, limit - longest)
            sampling = {"temperature": 0.2, **engine.default_sampling, "max_tokens": longest}
            body = {"model": engine.model, "messages": readable, **sampling, **own}
            summary = (await engine.endpoint.complete(body)).strip()
        if not summary:
            raise ClientError("the model wrote no summary", "Drop the oldest messages instead.")
        return summary

    def _branch(self, chat: ChatId | None, leaf: MessageId | None) -> tuple[StoredChat, list[StoredMessage]]:
        if chat is None:
            return StoredChat(id=0), []
        history, number = self._chats.locate(chat)
        messages = {message.id: message for message in history.messages.in_chat(number)}
        return history.chats.get(number), path_to(messages, None if leaf is None else int(leaf))


async def _budget(
    engine: ReadyEngine, counter: TokenCounter, chat: StoredChat, branch: Sequence[StoredMessage], typed: str
) -> ContextBudget:
    messages = prompt_messages(chat, branch, with_reasoning=engine.endpoint.is_inglenook)
    system = str(messages[0]["content"]) if messages and messages[0]["role"] == "system" else ""
    if typed or not messages or messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": typed})
    of_system = await counter.text(system) if system else 0
    total = await counter.messages(messages)
    reserve, limit = chat.settings.sampling.max_tokens, engine.context_length
    if limit is None:
        return ContextBudget(None, of_system, total - of_system, reserve or _RESERVE)
    reserve = reserve or min(_RESERVE, limit // _RESERVED_SHARE)
    return ContextBudget(limit, of_system, total - of_system, min(reserve, limit))


def _summary_tokens(engine: ReadyEngine) -> int:
    """Return the maximum length of a summary in tokens."""
    limit = engine.context_length
    return _SUMMARY_TOKENS if limit is None else min(_SUMMARY_TOKENS, limit // _SUMMARY_SHARE)


def _tokens_to_free(budget: ContextBudget, of_typed: int) -> int:
    """Return how many tokens to free, so that `typed` fits, and half of the context is free without `typed`.

    If the context length is unknown, return half of the history's tokens.
    """
    if budget.limit is None or budget.free is None:
        return (budget.history - of_typed) // 2
    return max(budget.limit // 2 - budget.free - of_typed, -budget.free)


def _turns(chat: StoredChat, branch: Sequence[StoredMessage], *, is_answered: bool) -> list[list[StoredMessage]]:
    """Return the turns of a branch that can be left out, each a question with its answers.

    A question at the end is included only if `is_answered`, that is, if a new message follows it.
    """
    sent = [message for message in branch if message.id not in chat.trim.left_out]
    if sent and sent[-1].role is Role.USER and not is_answered:
        sent.pop()
    turns: list[list[StoredMessage]] = []
    for message in sent:
        if message.role is Role.USER or not turns:
            turns.append([])
        turns[-1].append(message)
    return turns


async def _enough(counter: TokenCounter, turns: Sequence[Sequence[StoredMessage]], tokens: int) -> int:
    """Return how many of the oldest turns to leave out to free about `tokens`; all of them if they hold fewer."""
    for num_turns, turn in enumerate(turns, 1):
        tokens -= sum([await counter.text(prompt_text(message)) for message in turn])
        if tokens <= 0:
            return num_turns
    return len(turns)


async def _shortened(
    counter: TokenCounter, messages: Sequence[Mapping[str, object]], limit: int
) -> list[Mapping[str, object]]:
    """Shorten the longest message to half of its length, repeatedly, until all messages fit into `limit` tokens."""
    fitting = list(messages)
    while await counter.messages(fitting) > limit:
        longest = max(range(len(fitting)), key=lambda place: len(str(fitting[place]["content"])))
        content = str(fitting[longest]["content"])
        if len(content) <= len(_SUMMARIZE):
            raise ClientError("the messages are too long to summarize", "Drop the oldest messages instead.")
        fitting[longest] = {**fitting[longest], "content": content[: len(content) // 2]}
    return fitting
