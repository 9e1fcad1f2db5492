"""Titles that chats get after their first reply, written by the model while it has nothing better to do."""

from textwrap import shorten

from app.chat_backend.chat_repository import ChatRepository
from app.chat_backend.client_errors import to_thread
from app.chat_backend.engine.connection import EngineConnection
from app.chat_backend.prompt_messages import prompt_messages
from app.history.records import StoredMessage, path_to
from tui.plain_text import single_line
from tui.types import ChatId

_ASKED = "Write a title for this conversation, of at most six words, and nothing else."
_TOKENS = 24
_LONGEST = 60  # characters
_CUT = "…"
_QUOTES = "\"'“”„«»`*# "


class Titles:
    """Over the chats that are kept. `make` one for a chat."""

    def __init__(self, chats: ChatRepository, connection: EngineConnection) -> None:
        self._chats = chats
        self._connection = connection

    async def make_title(self, chat: ChatId) -> str:
        """The title that a chat has from now on: one that it has stays. Empty where the model wrote nothing that could
        be one."""
        if found := await to_thread(self._title, chat):
            return found
        async with self._connection.use() as engine:
            messages = await to_thread(self._messages, chat)
            own = {"service_class": "background", "store": False} if engine.endpoint.is_inglenook else {}
            sampling = {"temperature": 0, **engine.default_sampling, "max_tokens": _TOKENS}
            body = {"model": engine.model, "messages": messages, **sampling, **own}
            title = extract_title(await engine.endpoint.complete(body))
        if title:
            await to_thread(self._keep, chat, title)
        return title

    def _title(self, chat: ChatId) -> str:
        history, number = self._chats.locate(chat)
        return history.chats.get(number).title

    def _messages(self, chat: ChatId) -> list[object]:
        """The chat as it was sent, so that nothing of it is computed again, and the question behind it."""
        history, number = self._chats.locate(chat)
        found = history.chats.get(number)
        branch: list[StoredMessage] = path_to({one.id: one for one in history.messages.in_chat(number)}, found.shown)
        return [*prompt_messages(found, branch, with_reasoning=False), {"role": "user", "content": _ASKED}]

    def _keep(self, chat: ChatId, title: str) -> None:
        history, number = self._chats.locate(chat)
        history.chats.give_title(number, title)


def extract_title(text: str) -> str:
    """What a model wrote, as a title: its first line that announces nothing, without quotation marks, cut at a word;
    empty where that is none."""
    lines = [line for line in text.splitlines() if line.strip(_QUOTES) and not line.rstrip(_QUOTES).endswith(":")]
    title = single_line(lines[0]).removeprefix("Title:").strip(_QUOTES).rstrip(".") if lines else ""
    return shorten(title, _LONGEST, placeholder=_CUT).removeprefix(_CUT)
