"""Gives the memory of large requests back to the system when they have ended."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.freed_memory import return_freed_memory

LARGE_BYTES = 1 << 20  # of a request's body and its answer together
DELAY_SECONDS = 1.0  # in which further requests end, and so does the work on those whose clients are gone


class MemoryTrim:
    """ASGI middleware, around all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._is_due = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def counted_receive() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            return message

        async def counted_send(message: Message) -> None:
            nonlocal size
            size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, counted_receive, counted_send)
        finally:
            if size >= LARGE_BYTES and not self._is_due:
                self._is_due = True
                asyncio.get_running_loop().call_later(DELAY_SECONDS, self._trim)

    def _trim(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, return_freed_memory)
