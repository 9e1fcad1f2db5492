"""Resources that a request holds until its response has been sent, and pings of a stream that cannot start yet."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server.http.endpoint import Framing, framing_of
from app.server.http.reply import FIRST_PING_SECONDS, PING_SECONDS, stream_head

_HOLDS = "inglenook.holds"  # key in an ASGI scope of the `Holds` of a request
_ERROR = 400

T = TypeVar("T")


class RequestHolds:
    """ASGI middleware around the error handling: releases what a request holds after its response has been sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        early = _EarlyStream(send)
        async with AsyncExitStack() as stack:
            scope[_HOLDS] = Holds(scope, stack, early)
            await self._app(scope, receive, early.send)


class Holds:
    """The resources of one request."""

    def __init__(self, scope: Scope, stack: AsyncExitStack, early: "_EarlyStream") -> None:
        self._scope = scope
        self._stack = stack
        self._early = early

    async def enter(
        self, resource: AbstractAsyncContextManager[T], status: Callable[[], str], *, streams: bool = False
    ) -> T:
        """Enter a context manager, and leave it after the response has been sent.

        If that takes long and the client `streams`, it gets the head of the stream, and pings with the `status`.
        """
        entering = asyncio.ensure_future(self._stack.enter_async_context(resource))
        seconds = FIRST_PING_SECONDS
        try:
            while not (await asyncio.wait((entering,), timeout=seconds))[0]:
                if streams:
                    await self._early.ping(framing_of(self._scope), status())
                    seconds = PING_SECONDS
        except BaseException:
            entering.cancel()
            await asyncio.wait((entering,))
            raise
        return entering.result()


class _EarlyStream:
    """The response of one request, whose head may be sent before its reply starts."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._framing: Framing | None = None  # set once the head has been sent early
        self._failed = False
        self._error = b""

    async def ping(self, framing: Framing, status: str) -> None:
        if self._framing is None:
            self._framing = framing
            await self._send(stream_head(framing))
        await self._send({"type": "http.response.body", "body": framing.ping(status), "more_body": True})

    async def send(self, message: Message) -> None:
        """Send a message of the reply. After an early head, an error becomes the last chunk of the stream."""
        if self._framing is None:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._failed = message["status"] >= _ERROR
        elif not self._failed:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body"):
                await self._send({**message, "body": self._framing.failure(msgspec.Raw(self._error))})


def holds_of(request: Request) -> Holds:
    holds: Holds = request.scope[_HOLDS]
    return holds
