"""The context of the port: how much of it a chat takes, and how room is made where it is full."""

from collections.abc import Mapping, Sequence

from app.history.records import Chat as KeptChat
from app.history.records import Message, Role, Trim, path_to
from app.terminal_chat.engine_slot import Engine, EngineSlot
from app.terminal_chat.kept_chats import KeptChats
from app.terminal_chat.prompt_messages import prompt_messages, prompt_text
from app.terminal_chat.told import apart
from tui.client import ClientError
from tui.nouns import Chat, ChatId, ContextBudget, FullContext, MessageId, Room

UNKNOWN_LIMIT = 8192  # tokens, where a server does not say how long its context is
_RESERVE = 1024  # tokens for a reply, unless the chat says how long one may be
_RESERVED_SHARE = 4  # of the context: a quarter is kept for a reply at most
_SUMMARY_TOKENS = 300
_SUMMARIZE = "Summarize what was said so far in a few sentences: facts, decisions and open questions. Write only that."


class ChatContext:
    """Implements `tui.client.Context`."""

    def __init__(self, chats: KeptChats, slot: EngineSlot) -> None:
        self._chats = chats
        self._slot = slot

    async def budget(self, chat: ChatId | None, leaf: MessageId | None, typed: str) -> ContextBudget:
        async with self._slot.use() as engine:
            found, branch = await apart(self._branch, chat, leaf)
            return await self._budget(engine, found, branch, typed)

    async def plan(self, chat: ChatId, leaf: MessageId, how: FullContext) -> Room:
        """Leaves out the oldest messages, question and answer together, until half of the context is free; one of
        these in any case."""
        found, branch = await apart(self._branch, chat, leaf)
        async with self._slot.use() as engine:
            budget = await self._budget(engine, found, branch, "")
            told_of = [message for message in branch if message.id not in found.trim.left_out]
            wanted = budget.limit // 2 - budget.free
            leaving: list[Message] = []
            freed = 0
            while (freed < wanted or not leaving) and len(told_of) - len(leaving) > 1:
                leaving.append(told_of[len(leaving)])
                freed += await engine.endpoint.count(text=prompt_text(leaving[-1]))
                if leaving[-1].role is Role.USER and len(told_of) - len(leaving) > 1:
                    leaving.append(told_of[len(leaving)])
                    freed += await engine.endpoint.count(text=prompt_text(leaving[-1]))
        if how is FullContext.SUMMARIZE:
            freed -= _SUMMARY_TOKENS
        return Room(how, tuple(MessageId(str(message.id)) for message in leaving), freed)

    async def make(self, chat: ChatId, room: Room) -> Chat:
        leaving = [int(message) for message in room.messages]
        summary = await self._summary(chat, leaving) if room.how is FullContext.SUMMARIZE else None

        def trim() -> None:
            history, number = self._chats.place(chat)
            before = history.chats.get(number).trim
            left_out = tuple(dict.fromkeys((*before.left_out, *leaving)))
            history.chats.trim(number, Trim(left_out, before.summary if summary is None else summary))

        await apart(trim)
        return await self._chats.open(chat)

    async def _summary(self, chat: ChatId, leaving: Sequence[int]) -> str:
        """What is to stand for these messages, and for what was left out before."""
        found, branch = await apart(self._branch, chat, MessageId(str(leaving[-1])) if leaving else None)
        asked: list[Mapping[str, object]] = [
            *prompt_messages(found, branch, with_thoughts=False),
            {"role": "user", "content": _SUMMARIZE},
        ]
        async with self._slot.use() as engine:
            own: dict[str, object] = {"service_class": "interactive"} if engine.endpoint.is_ours else {}
            if self._chats.is_private(chat) and own:
                own["store"] = False
            sampling = {"temperature": 0.2, **engine.suitable, "max_tokens": _SUMMARY_TOKENS}
            body = {"model": engine.model, "messages": asked, **sampling, **own}
            summary = (await engine.endpoint.complete(body)).strip()
        if not summary:
            raise ClientError("the model wrote no summary", "Leave the oldest messages out instead.")
        return summary

    def _branch(self, chat: ChatId | None, leaf: MessageId | None) -> tuple[KeptChat, list[Message]]:
        if chat is None:
            return KeptChat(id=0), []
        history, number = self._chats.place(chat)
        messages = {message.id: message for message in history.messages.of(number)}
        return history.chats.get(number), path_to(messages, None if leaf is None else int(leaf))

    async def _budget(self, engine: Engine, chat: KeptChat, branch: Sequence[Message], typed: str) -> ContextBudget:
        messages = prompt_messages(chat, branch, with_thoughts=engine.endpoint.is_ours)
        system = str(messages[0]["content"]) if messages and messages[0]["role"] == "system" else ""
        if typed or not messages or messages[-1]["role"] != "user":
            messages.append({"role": "user", "content": typed})
        of_system = await engine.endpoint.count(text=system) if system else 0
        total = await engine.endpoint.count(messages=messages)
        limit = engine.context_length or UNKNOWN_LIMIT
        reserve = chat.settings.sampling.max_tokens or min(_RESERVE, limit // _RESERVED_SHARE)
        return ContextBudget(limit, of_system, total - of_system, min(reserve, limit))
