"""One run of the chat, with screens or in plain lines: opens the history and the engine, and closes both."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import click

from app.chat_backend.client import TerminalClient
from app.chat_backend.shutdown import Shutdown
from app.history.history import History
from app.settings.settings import Settings, child_environment, wants_colors
from app.text.terminal_text import sanitize


@dataclass(frozen=True, slots=True)
class Session:
    """A run with the options of the command line. The run methods return an exit status."""

    settings: Settings
    flags: Mapping[str, object]  # settings for an engine process, and `stay`
    endpoint: str = ""
    key: str | None = None  # API key of the endpoint
    question: str = ""

    def run_plain(self) -> int:
        """Run in plain lines. Raises the errors of opening the history."""
        from app.chat_backend.plain.plain_chat import PlainChat

        history = History(self.settings.history_dir, _say)
        return asyncio.run(self._with_client(history, lambda client: PlainChat(client, self.question).run()))

    def run_screens(self, left: Callable[[], None]) -> int:
        """Run with screens. `left` is called after the terminal was restored.

        Raises the errors of opening the history, before the screens appear.
        """
        history = History(self.settings.history_dir, _say)
        for notice in history.notices:  # also shown on the screens, which disappear when the chat ends
            _say(notice.sentences)
        from tui.app import ChatApp

        async def run(client: TerminalClient) -> int:
            app = ChatApp(
                client,
                self.settings.theme,
                question=self.question,
                colors=wants_colors(),
                environment=child_environment(),
            )
            Shutdown(lambda status: app.exit(return_code=status)).listen("SIGINT", "SIGTERM")
            await app.run_async()
            left()
            return app.return_code or 0

        return asyncio.run(self._with_client(history, run))

    async def _with_client(self, history: History, run: Callable[[TerminalClient], Coroutine[Any, Any, int]]) -> int:
        client = TerminalClient(self.settings, history, self.flags, self.endpoint, self.key)
        client.start()
        try:
            return await run(client)
        finally:
            await client.close()


def _say(sentence: str) -> None:
    click.echo(sanitize(sentence), err=True)
