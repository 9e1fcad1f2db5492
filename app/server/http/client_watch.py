"""Ends the work on a request when its client goes away, on every path and whatever that work waits for."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ClientWatch:
    """ASGI middleware around the answer to a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive)

        async def answer() -> None:
            await self._app(scope, body.receive, send)

        await while_connected(body.gone(), answer())


class _Body:
    """The messages of a request. What is received after its body is the end of the connection."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_read = asyncio.Event()
        self._is_gone = asyncio.Event()

    async def receive(self) -> Message:
        """The next message, for the application."""
        if self._is_read.is_set():
            await self._is_gone.wait()
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            self._is_read.set()
        return message

    async def gone(self) -> None:
        """Return when the client has gone away after it sent everything."""
        await self._is_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone.set()


async def while_connected(gone: Coroutine[Any, Any, None], work: Coroutine[Any, Any, None]) -> None:
    """Run `work`. When `gone` returns before it, it is cancelled, and has ended when this returns."""
    working, watching = asyncio.create_task(work), asyncio.create_task(gone)
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait((working, watching))
    if not working.cancelled():
        working.result()
