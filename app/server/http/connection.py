"""Connections of clients: limits on slow clients, and the end of the work for clients that disconnect.

A connection is closed when the client is slow to send the head of a request or to read a reply. `request_body` limits
the time for a body. Work on a request is canceled on every path, whatever it waits for.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, ClassVar

import h11
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from app.server.http.access import PEER, Address, Peer
from app.server.http.endpoint import ErrorShape
from app.server.http.errors import InvalidRequest

MOST_CONNECTIONS = 1000
# Bytes that are parsed before it is another connection's turn: small pieces of a body cost far more than large ones.
_SLICE = 8 << 10


class Connection(H11Protocol):
    """Accepts `MOST_CONNECTIONS`; more are closed at once. Subclasses set `ERRORS`."""

    ERRORS: ClassVar[ErrorShape]  # the format of the error for bytes that are not HTTP

    HEAD_SECONDS: ClassVar[float] = 10.0  # for the head of a request, from when it may be sent
    UNREAD_SECONDS: ClassVar[float] = 60.0  # for reading what waits, so that there is room for more
    GLANCE_SECONDS: ClassVar[float] = 0.5  # between two looks at a client that has closed its half

    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _half_closed: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        transport.max_size = _SLICE  # type: ignore[attr-defined]  # of selector loops
        self.access_log = False  # whoever listens: paths may have a key behind them
        self._peer = Peer(self.client, _address(self.server))
        self.app_state = {**self.app_state, PEER: self._peer}
        self._wait_for_head()
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head)
        _cancel(self._unread)
        _cancel(self._half_closed)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # as asyncio has it
        """Nothing more comes. A client that has sent a whole request and holds the connection still gets its answer;
        any other is gone."""
        if not self._answers() or self.conn.their_state is h11.SEND_BODY or not self._is_held():
            return False
        self._look_soon()
        return True

    def handle_events(self) -> None:
        super().handle_events()
        if self._answers():
            _cancel(self._head)

    def on_response_complete(self) -> None:
        self._wait_for_head()
        super().on_response_complete()
        if self._half_closed is not None and not self._answers():
            self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        _cancel(self._unread)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused in the shape of all other errors."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = msgspec.json.encode(self.ERRORS.body(InvalidRequest(msg.removesuffix("."))))
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"connection", b"close")]
        head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._close()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a request for another protocol is answered like any other request of its path."""

    def _answers(self) -> bool:
        """Whether a request is being answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _is_held(self) -> bool:
        """Whether the client holds the connection, as far as this machine can tell."""
        try:
            return self._peer.is_open()
        except OSError:  # no file descriptor is left to look
            return True

    def _look_soon(self) -> None:
        self._half_closed = self.loop.call_later(self.GLANCE_SECONDS, self._look)

    def _look(self) -> None:
        """No event tells when a client goes away that has closed its half before."""
        if self._is_held():
            self._look_soon()
        else:
            self.transport.abort()

    def _wait_for_head(self) -> None:
        _cancel(self._head)
        self._head = self.loop.call_later(self.HEAD_SECONDS, self._close)

    def _wait_for_reader(self) -> None:
        _cancel(self._unread)
        self._unread = self.loop.call_later(self.UNREAD_SECONDS, self.transport.abort)

    def _close(self) -> None:
        """At once where everything is sent, else when it is read, if it ever is."""
        self._wait_for_reader()
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _address(server: tuple[str, int | None] | None) -> Address | None:
    return (server[0], server[1]) if server and server[1] is not None else None


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
