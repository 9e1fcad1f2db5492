"""Runs the chat, with screens or in plain lines: opens the history and the engine, and closes both."""

import asyncio
import enum
import shlex
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from app.chat_backend.client import TerminalClient
from app.chat_backend.converters import chat_id
from app.chat_backend.shutdown import Shutdown
from app.history.history import History
from app.history.records import Chat
from app.process.terminal_background import is_background_dark
from app.settings.boxes import find_box
from app.settings.settings import (
    AUTO_THEME,
    Settings,
    child_environment,
    chosen_editor,
    stated_background,
    wants_colors,
)
from app.text.terminal_text import sanitize
from tui.types import ChatId


class Opening(enum.Enum):
    """The view that the chat opens with."""

    NEW = "new"
    LAST = "last"  # the chat that was changed most recently
    CHOICE = "choice"  # a list of chats
    PRIVATE = "private"  # a new private chat


@dataclass(frozen=True, slots=True)
class Session:
    """One run of the chat with its command-line options. The run methods return an exit status."""

    settings: Settings
    flags: Mapping[str, object]  # settings from the command line and `stay`, for an engine process
    endpoint: str = ""
    key: str | None = None  # API key of the endpoint
    question: str = ""
    opening: Opening = Opening.NEW
    mcp_config: Path | None = None  # file with tool servers, in addition to mcp.json

    def run_plain(self) -> int:
        """Run the plain chat. Raises an error if the history cannot be opened."""
        from app.chat_backend.plain.plain_chat import PlainChat
        from tui.clipboard import Clipboard

        history = History(self.settings.history_dir, _say)
        chat, clipboard = self._first_chat(history), Clipboard(child_environment())

        async def run(client: TerminalClient) -> int:
            lists, is_private = self.opening is Opening.CHOICE, self.opening is Opening.PRIVATE
            return await PlainChat(client, clipboard, self.question, _id(chat), lists, is_private).run()

        return asyncio.run(self._with_client(history, chat, run))

    def run_screens(self, left: Callable[[], None]) -> int:
        """Run the screens. `left` is called after the terminal was restored.

        Raises an error if the history cannot be opened, before the screens appear.
        """
        history = History(self.settings.history_dir, _say)
        for notice in history.notices:  # the screens show them as well, but disappear when the chat ends
            _say(notice.sentences)
        from tui.app import ChatApp

        is_dark = has_dark_theme(self.settings.theme)
        chat, resumes = self._first_chat(history), self.opening is Opening.CHOICE

        async def run(client: TerminalClient) -> int:
            app = ChatApp(
                client,
                self.settings.theme,
                _id(chat),
                self.question,
                resumes=resumes,
                private=self.opening is Opening.PRIVATE,
                colors=wants_colors(),
                is_dark=is_dark,
                environment=child_environment(),
                editor=chosen_editor(),
                bell=self.settings.bell,
            )
            Shutdown(lambda status: app.exit(return_code=status)).listen("SIGINT", "SIGTERM")
            await app.run_async()
            left()
            if app.is_resumable:
                click.echo(self.farewell)
            return app.return_code or 0

        return asyncio.run(self._with_client(history, chat, run))

    @property
    def farewell(self) -> str:
        """The commands that open this chat again, or any other, with the same model or endpoint."""
        return f"Resume: ingle -c{self._options}    All chats: ingle --resume{self._options}"

    @property
    def _options(self) -> str:
        """The model or the endpoint that the user chose, as options that a shell can read."""
        if self.endpoint:
            return f" --endpoint {shlex.quote(self.endpoint)}"
        if not self._names_model:
            return ""
        from app.models.store import ModelStore

        return f" --model {shlex.quote(ModelStore(self.settings).lasting_name(self.settings.model))}"

    @property
    def _names_model(self) -> bool:
        """Whether the user named the model on the command line."""
        return self.settings.origins.get("model") == "--model"

    def _first_chat(self, history: History) -> Chat | None:
        """Return the chat to open, or None for a new one."""
        if self.opening is not Opening.LAST:
            return None
        chats = [chat for chat in history.chats.listed() if chat.num_messages]
        return max(chats, key=lambda chat: chat.changed, default=None)

    def _settings_for(self, history: History, chat: Chat | None) -> Settings:
        """Return the settings, with the chat's own model if it is on this machine and the user chose no other."""
        if chat is None or self.endpoint or self._names_model:
            return self.settings
        from app.models.store import ModelStore

        model = history.model_of(chat.id)
        if not model or not (ModelStore(self.settings).has(model) or find_box(model, self.settings.state_dir)):
            return self.settings
        return replace(self.settings, model=model, origins={**self.settings.origins, "model": "--continue"})

    async def _with_client(
        self, history: History, chat: Chat | None, run: Callable[[TerminalClient], Coroutine[Any, Any, int]]
    ) -> int:
        settings = self._settings_for(history, chat)
        client = TerminalClient(settings, history, self.flags, self.endpoint, self.key, self.mcp_config)
        client.start()
        try:
            return await run(client)
        finally:
            await client.close()


def _id(chat: Chat | None) -> ChatId | None:
    return None if chat is None else chat_id(chat.id, private=False)


def has_dark_theme(theme: str) -> bool:
    """Whether the chat starts with dark colors.

    The terminal is asked for its background only if `theme` is auto. Returns True for any other theme.
    """
    return theme != AUTO_THEME or is_background_dark(stated_background())


def _say(sentence: str) -> None:
    click.echo(sanitize(sentence), err=True)
