"""Helpers for tests of the chat's client with the shared server."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from typing import TypeVar, cast

from app.chat_backend.client import TerminalClient
from app.history.history import History
from app.settings.settings import Settings
from tests.app.chat_backend.conftest import Clients
from tests.app.server.live_server import ControlledRunner, LiveServer
from tui.types import ChatId, ChatSettings, MessageId, ReplyEvent, Sampling

T = TypeVar("T")
SHORT = ChatSettings("Be brief.", Sampling(max_tokens=8, seed=5))
LONG = ChatSettings(sampling=Sampling(max_tokens=1500, seed=5))


def run(clients: Clients, work: Callable[[TerminalClient], Awaitable[T]]) -> T:
    async def main() -> T:
        async with clients() as client:
            return await work(client)

    return asyncio.run(main())


def run_unsaved(
    settings: Settings, work: Callable[[TerminalClient], Awaitable[T]], url: str = "", key: str | None = None
) -> T:
    """Run a client that keeps no history. `url` and `key` are those of a server; none: it starts an engine."""

    async def main() -> T:
        client = TerminalClient(settings, History(None), {"stay": False}, url, key)
        client.start()
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(main())


def held(server: LiveServer) -> AbstractContextManager[threading.Semaphore]:
    """Let the engine run only the steps that the test releases, so that no reply ends too early."""
    return cast(ControlledRunner, server.engine._runner).held()


async def asked(client: TerminalClient, settings: ChatSettings = SHORT, text: str = "Hi") -> tuple[ChatId, MessageId]:
    chat = await client.chats.create(settings)
    return chat.summary.id, (await client.chats.add(chat.summary.id, None, text)).id


async def replied(client: TerminalClient, chat: ChatId, to: MessageId) -> list[ReplyEvent]:
    async with aclosing(client.replies.reply(chat, to)) as events:
        return [event async for event in events]
