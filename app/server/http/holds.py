"""Resources that a request holds until its response has been sent, and streams that start while it waits for one."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server.http.endpoint import Framing, framing_of
from app.server.http.reply import PING_SECONDS, stream_head

# Seconds after which a stream starts although the request still waits for its model. Until then, a failure of the load
# has its own status. Most other errors are found before.
EARLY_SECONDS = 1.0

_HOLDS = "inglenook.holds"  # key in an ASGI scope of the `Holds` of a request
_ERROR = 400

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """Progress of a wait."""

    status: str  # in words
    fraction: float  # share that is done, from 0 to 1


class EarlyEvents:
    """Bytes of a stream while its request waits. Dialects with events for it override the methods."""

    seconds = PING_SECONDS  # seconds between two reports of progress

    def __init__(self, framing: Framing) -> None:
        self._framing = framing

    async def opening(self) -> bytes:
        """Return the first bytes."""
        return b""

    def progress(self, wait: Wait) -> bytes:
        """Return the bytes that are sent repeatedly during the wait."""
        return self._framing.ping(wait.status)

    def closing(self) -> bytes:
        """Return the bytes after the wait."""
        return b""

    def failure(self, error: msgspec.Raw) -> bytes:
        """Return the bytes that end the stream, given the encoded body of an error."""
        return self._framing.failure(error)


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
        self,
        resource: AbstractAsyncContextManager[T],
        wait: Callable[[], Wait],
        *,
        streams: bool = False,
        events: EarlyEvents | None = None,
    ) -> T:
        """Enter a context manager, and leave it after the response has been sent.

        If that takes long and the client `streams`, its stream starts with the `events`, by default with pings. `wait`
        returns the progress.
        """
        entering = asyncio.ensure_future(self._stack.enter_async_context(resource))
        try:
            done, _ = await asyncio.wait((entering,), timeout=EARLY_SECONDS)
            if streams and not done:
                framing = framing_of(self._scope)
                await self._early.follow(entering, framing, events or EarlyEvents(framing), wait)
            else:
                await asyncio.wait((entering,))
        except BaseException:
            entering.cancel()
            await asyncio.wait((entering,))
            raise
        return entering.result()


class _EarlyStream:
    """The response of one request, whose head may be sent before its reply starts."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._events: EarlyEvents | None = None  # set once the head has been sent early
        self._failed = False
        self._error = b""

    async def follow(
        self, entering: "asyncio.Future[T]", framing: Framing, events: EarlyEvents, wait: Callable[[], Wait]
    ) -> None:
        """Start the stream, and report the wait until it ends."""
        opening = await events.opening()
        self._events = events
        await self._send(stream_head(framing))
        await self._put(opening + events.progress(wait()))
        while not (await asyncio.wait((entering,), timeout=events.seconds))[0]:
            await self._put(events.progress(wait()))
        if entering.exception() is None:
            await self._put(events.closing())

    async def _put(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def send(self, message: Message) -> None:
        """Send a message of the reply. After an early head, an error becomes the last chunk of the stream."""
        if self._events is None:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._failed = message["status"] >= _ERROR
        elif not self._failed:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body"):
                await self._send({**message, "body": self._events.failure(msgspec.Raw(self._error))})


def holds_of(request: Request) -> Holds:
    holds: Holds = request.scope[_HOLDS]
    return holds
