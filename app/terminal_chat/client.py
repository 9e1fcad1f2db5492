"""All that the chat in the terminal asks for, as one object."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from app.config import Settings
from app.history.history import History
from app.terminal_chat.context import ChatContext
from app.terminal_chat.engine_slot import EngineSlot
from app.terminal_chat.engine_status import ChatEngine
from app.terminal_chat.kept_chats import KeptChats
from app.terminal_chat.models import ChatModels
from app.terminal_chat.preferences import ChatPreferences
from app.terminal_chat.replies import ChatReplies
from app.terminal_chat.titles import Titles
from app.terminal_chat.told import apart
from quant.errors import InglenookError
from tui.client import ClientError

_FORGET_SECONDS = 3.0


class TerminalClient:
    """Implements `tui.client.Client`. `begin` it on the event loop that uses it, `close` it there."""

    def __init__(
        self,
        settings: Settings,
        history: History,
        flags: Mapping[str, object],
        endpoint: str = "",
        key: str | None = None,
    ) -> None:
        """`flags` are settings given on the command line, and `stay`: what an engine process is started with.
        `endpoint` is another server's base URL, and `key` what it wants."""
        self._slot = EngineSlot(settings, flags, endpoint, key)
        self.chats = KeptChats(history)
        self.chats.give_title = Titles(self.chats, self._slot).make
        self.replies = ChatReplies(self.chats, self._slot)
        self.context = ChatContext(self.chats, self._slot)
        self.engine = ChatEngine(self._slot, self.replies)
        self.models = ChatModels(settings, self._slot)
        self.preferences = ChatPreferences()

    def begin(self) -> None:
        """Load the model, in the background."""
        self._slot.begin()

    async def close(self) -> None:
        """Leave the engine; chats are kept, but for those that were deleted."""
        with suppress(ClientError, InglenookError, TimeoutError):
            await self._forget()
        await self.models.close()
        await self._slot.close()
        self.chats.close()

    async def _forget(self) -> None:
        """Have the engine forget what it computed of deleted chats, where it can be asked at once."""
        conversations = await apart(self.chats.conversations_to_forget)
        if not conversations or not self._slot.address:
            return
        async with asyncio.timeout(_FORGET_SECONDS), self._slot.use() as engine:
            for messages in conversations:
                await engine.endpoint.own("POST", "forget", {"messages": messages})
