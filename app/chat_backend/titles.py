"""Titles for chats, written by the model at low priority after the first reply."""

import re
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
_LONGEST = 60  # maximum length of a title in characters
_CUT = "…"
_SMALL_MODEL = 1_000_000_000  # parameters; the titles of models with fewer say less than the user's question
_SMALL = re.compile(r"(?<![\w.])(?:\d+m|0?\.\d+b)(?![a-z])", re.IGNORECASE)  # matches model sizes such as 135m and 0.5b
_EMPHASIS = re.compile(r"(?<!\w)(\*{1,3}|`+)(?=\S)(.+?)(?<=\S)\1(?!\w)")  # Markdown's
_STOP = re.compile(r"[.,;]+(?=…?$)")
_QUOTES = "\"'“”„«»`*# "


class Titles:
    """Writes titles for stored chats."""

    def __init__(self, chats: ChatRepository, connection: EngineConnection) -> None:
        self._chats = chats
        self._connection = connection

    async def make_title(self, chat: ChatId) -> str:
        """Return the chat's title. If it has none, let the model write one, and store it.

        Returns "" if the model's answer is unusable, or if the model is small.
        """
        title, messages = await to_thread(self._read, chat)
        if title:
            return title
        async with self._connection.use() as engine:
            if is_small(engine.model, engine.parameters):
                return ""
            own = {"service_class": "background", "store": False} if engine.endpoint.is_inglenook else {}
            sampling = {"temperature": 0, **engine.default_sampling, "max_tokens": _TOKENS}
            body = {"model": engine.model, "messages": messages, **sampling, **own}
            title = extract_title(await engine.endpoint.complete(body))
        if title:
            await to_thread(self._keep, chat, title)
        return title

    def _read(self, chat: ChatId) -> tuple[str, list[object]]:
        """Return the chat's title; if it has none, "" and the messages of a request that generates one.

        The messages start with those of the chat, to reuse its cached prefix.
        """
        history, number = self._chats.locate(chat)
        found = history.chats.get(number)
        if found.title:
            return found.title, []
        branch: list[StoredMessage] = path_to({one.id: one for one in history.messages.in_chat(number)}, found.shown)
        asked = {"role": "user", "content": _ASKED}
        return "", [*prompt_messages(found, branch, with_reasoning=False), asked]

    def _keep(self, chat: ChatId, title: str) -> None:
        history, number = self._chats.locate(chat)
        history.chats.give_title(number, title)


def is_small(model: str, parameters: int | None) -> bool:
    """Whether a model has fewer than a billion parameters. If their number is unknown, the name decides."""
    return bool(_SMALL.search(model)) if parameters is None else parameters < _SMALL_MODEL


def extract_title(text: str) -> str:
    """Return the first line that can serve as a title, without quotation marks and emphasis and cut at a word; "" if
    there is none.

    A line that ends with a colon is skipped, because it only announces the title.
    """
    lines = [line for line in text.splitlines() if line.strip(_QUOTES) and not line.rstrip(_QUOTES).endswith(":")]
    line = _EMPHASIS.sub(r"\2", single_line(lines[0])) if lines else ""
    title = line.removeprefix("Title:").strip(_QUOTES)
    return _STOP.sub("", shorten(title, _LONGEST, placeholder=_CUT)).removeprefix(_CUT)
