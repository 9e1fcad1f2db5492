"""The client that the screens use: combines history, models, and engine, and saves preferences in config.toml."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from app.chat_backend.chat_repository import ChatRepository
from app.chat_backend.client_errors import to_thread
from app.chat_backend.context import ChatContext
from app.chat_backend.engine.connection import EngineConnection
from app.chat_backend.engine.server import EngineServer
from app.chat_backend.engine.status import ChatEngine
from app.chat_backend.models import ChatModels
from app.chat_backend.replies import ChatReplies
from app.chat_backend.titles import Titles
from app.chat_backend.tools import ChatTools
from app.history.history import History
from app.settings.settings import Settings
from quant.errors import InglenookError
from tui.client import ClientError


class ChatPreferences:
    """Implements `tui.client.Preferences`."""

    async def save_theme(self, name: str) -> None:
        from app.settings.config_file import write_setting

        await to_thread(write_setting, "theme", name)


_FORGET_SECONDS = 3.0


class TerminalClient:
    """Implements `tui.client.Client`. Call `start` and `close` on the event loop that uses it."""

    def __init__(
        self,
        settings: Settings,
        history: History,
        flags: Mapping[str, object],
        endpoint: str = "",
        key: str | None = None,
        mcp_config: Path | None = None,
    ) -> None:
        """Store the configuration.

        `flags` are the settings from the command line and `stay`; an engine process is started with them. `endpoint` is
        the base URL of another server, and `key` is its API key. `mcp_config` is a file with
        tool servers, in addition to mcp.json.
        """
        self._connection = EngineConnection(settings, EngineServer(settings, flags, endpoint, key))
        self.chats = ChatRepository(history)
        self.chats.make_title = Titles(self.chats, self._connection).make_title
        self.tools = ChatTools(settings.state_dir, mcp_config)
        self.replies = ChatReplies(self.chats, self._connection, self.tools)
        self.context = ChatContext(self.chats, self._connection)
        self.engine = ChatEngine(self._connection, self.replies)
        self.models = ChatModels(settings, self._connection)
        self.preferences = ChatPreferences()

    def start(self) -> None:
        """Start loading the model in the background."""
        self._connection.start()

    async def close(self) -> None:
        """Release the engine and close the history. Deleted chats are erased from disk."""
        with suppress(ClientError, InglenookError, TimeoutError):
            await self._forget()
        await self.tools.close()
        await self.models.close()
        await self._connection.close()
        self.chats.close()

    async def _forget(self) -> None:
        """Delete the KV blocks of deleted chats from the engine, if one is loaded."""
        conversations = await to_thread(self.chats.conversations_to_forget)
        if not conversations or not self._connection.address:
            return
        async with asyncio.timeout(_FORGET_SECONDS), self._connection.use() as engine:
            for messages in conversations:
                await engine.endpoint.call_inglenook("POST", "forget", {"model": engine.model, "messages": messages})
