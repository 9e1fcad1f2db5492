"""Connections of clients: limits on slow clients, and cancellation of the work for clients that disconnect.

A connection is closed when the client is slow to send the head of a request or to read a reply. `request_body` limits
the time for a body. Disconnecting cancels the work on a request on every path, even while it waits.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, ClassVar

import h11
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from app.server.http.access import PEER, Peer
from app.server.http.endpoint import ErrorFormat
from app.server.http.errors import InvalidRequest
from app.server.http.socket_owner import Address

MAX_CONNECTIONS = 1000
# Bytes to parse before other connections get a turn. The value is small, because a body in small pieces costs far more
# time than one in large pieces.
_MAX_READ_BYTES = 8 << 10


class Connection(H11Protocol):
    """A connection of uvicorn with time limits. Beyond `MAX_CONNECTIONS`, new ones are closed at once.

    Subclasses set `ERRORS`.
    """

    ERRORS: ClassVar[ErrorFormat]  # format of the error for bytes that are not HTTP

    # time limit for the head of a request, counted from when the connection is ready for it
    HEAD_SECONDS: ClassVar[float] = 10.0
    # time limit for a client to read enough of the buffered reply that more can be written
    UNREAD_SECONDS: ClassVar[float] = 60.0
    POLL_SECONDS: ClassVar[float] = 0.5  # time between checks of a client that has closed its half

    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None
    _poll_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # uvicorn declares it so
        super().connection_made(transport)
        transport.max_size = _MAX_READ_BYTES  # type: ignore[attr-defined]  # an attribute of selector loops
        self.access_log = False  # even if a log is configured: paths may contain a key
        self._peer = Peer(self.client, _address(self.server))
        self.app_state = {**self.app_state, PEER: self._peer}
        self._start_head_timer()
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head_timer)
        _cancel(self._read_timer)
        _cancel(self._poll_timer)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override] # asyncio declares it so
        """Keep the connection open for the reply if the client has sent a whole request and still holds it.

        Any other client has disconnected. TLS has no closed halves.
        """
        is_whole = self.is_responding() and self.conn.their_state is not h11.SEND_BODY
        if self.scheme == "https" or not is_whole or not self._is_open():
            return False
        self._schedule_poll()
        return True

    def handle_events(self) -> None:
        super().handle_events()
        if self.is_responding():
            _cancel(self._head_timer)

    def on_response_complete(self) -> None:
        self._start_head_timer()
        super().on_response_complete()
        if self._poll_timer is not None and not self.is_responding():
            self._close_after_sending()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_read_timer()

    def resume_writing(self) -> None:
        _cancel(self._read_timer)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, in the format of all other errors."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = msgspec.json.encode(self.ERRORS.body(InvalidRequest(msg.removesuffix("."))))
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"connection", b"close")]
        head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._close_after_sending()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a request for another protocol is answered like any other request for its path."""

    def is_responding(self) -> bool:
        """Whether a request is being answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _is_open(self) -> bool:
        """Whether the client holds the connection, as far as this machine can tell."""
        try:
            return self._peer.is_open()
        except OSError:  # no file descriptor is left for the lookup
            return True

    def _schedule_poll(self) -> None:
        self._poll_timer = self.loop.call_later(self.POLL_SECONDS, self._poll)

    def _poll(self) -> None:
        """Check whether the client disconnected: no event reports it once its half is closed."""
        if self._is_open():
            self._schedule_poll()
        else:
            self.transport.abort()

    def _start_head_timer(self) -> None:
        _cancel(self._head_timer)
        self._head_timer = self.loop.call_later(self.HEAD_SECONDS, self._close_after_sending)

    def _start_read_timer(self) -> None:
        _cancel(self._read_timer)
        self._read_timer = self.loop.call_later(self.UNREAD_SECONDS, self.transport.abort)

    def _close_after_sending(self) -> None:
        """Close the connection after all data is sent. If the client does not read, the read timer aborts the
        connection.
        """
        self._start_read_timer()
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _address(server: tuple[str, int | None] | None) -> Address | None:
    return (server[0], server[1]) if server and server[1] is not None else None


class CancelOnDisconnect:
    """ASGI middleware that cancels the work on a request when its client disconnects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive)

        async def answer() -> None:
            await self._app(scope, body.receive, send)

        await while_connected(body.wait_for_disconnect(), answer())


class _Body:
    """The ASGI messages of a request. After the body, `receive` waits until the client disconnects."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_read = asyncio.Event()
        self._disconnected = asyncio.Event()

    async def receive(self) -> Message:
        """Return the next message for the application."""
        if self._is_read.is_set():
            await self._disconnected.wait()
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            self._is_read.set()
        return message

    async def wait_for_disconnect(self) -> None:
        """Wait until the client has sent its whole request and has then disconnected."""
        await self._is_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._disconnected.set()


async def while_connected(disconnected: Coroutine[Any, Any, None], work: Coroutine[Any, Any, None]) -> None:
    """Run `work`. If `disconnected` returns first, cancel `work` and wait until it has ended."""
    working, watching = asyncio.create_task(work), asyncio.create_task(disconnected)
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait((working, watching))
    if not working.cancelled():
        working.result()
