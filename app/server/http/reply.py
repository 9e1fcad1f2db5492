"""Responses that send the reply to one request, whole or as a stream of chunks."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.generation.events import QUEUED, TokenCounts
from app.process.work_pool import Check, WorkPool
from app.server.http.endpoint import EVENTS, Framing
from app.server.http.errors import traceback_without_message
from quant.errors import InglenookError

log = logging.getLogger(__name__)

ChunkT = TypeVar("ChunkT", bound=msgspec.Struct)


def json_reply(body: Any) -> Response:
    """Return a response with `body` as JSON."""
    return Response(msgspec.json.encode(body), media_type="application/json")


async def json_reply_on_thread(pool: WorkPool, write: Callable[[Check], bytes]) -> Response:
    """Return a response whose JSON is encoded on a thread: thousands of numbers would delay other replies."""
    return Response(await pool.run(write), media_type="application/json")


_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # makes a proxy forward events at once
]
PING_SECONDS = 5.0  # seconds after the last bytes
# A request can be refused with its own status until the engine starts. A ping would send the head with status 200, so
# the first ping waits longer.
FIRST_PING_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class WholeReply(Generic[ChunkT]):
    """ASGI response: all chunks folded into one JSON body."""

    chunks: AsyncGenerator[list[ChunkT]]
    fold: Callable[[AsyncGenerator[ChunkT]], Awaitable[Any]]  # returns anything that can be encoded as JSON

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.chunks) as batches, aclosing(_flatten(batches)) as chunks:
            body = msgspec.json.encode(await self.fold(chunks))
        await Response(body, media_type="application/json")(scope, receive, send)


@dataclass(frozen=True, slots=True)
class StreamedReply(Generic[ChunkT]):
    """ASGI response: each chunk is sent in its frame when it is ready. A ping is sent after a silence.

    A batch is sent at once. An empty batch sends only the head. An error before the head was sent is raised, and can
    still have its own status; a later error is sent as the last chunk, the `error_body`.
    """

    chunks: AsyncGenerator[list[ChunkT]]
    error_body: Callable[[Exception], msgspec.Struct]
    framing: Framing = EVENTS
    counts: TokenCounts = field(default_factory=TokenCounts)  # counts of the request; pings report its status
    first_ping_seconds: float = FIRST_PING_SECONDS
    ping_seconds: float = PING_SECONDS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = _StreamedBody(send, self)
        pinging = asyncio.create_task(stream.ping())
        try:
            await self._send_chunks(stream)
        finally:
            pinging.cancel()
            await asyncio.wait((pinging,))
        await stream.end()

    async def _send_chunks(self, stream: "_StreamedBody") -> None:
        try:
            async with aclosing(self.chunks) as chunks:
                async for batch in chunks:
                    await stream.put(b"".join(map(self.framing.frame, batch)))
        except Exception as error:
            if not stream.started:
                raise
            # For an expected error the class is enough. For a bug only the traceback is logged, without the message.
            kind = type(error).__name__ if isinstance(error, InglenookError) else traceback_without_message(error)
            log.warning("a stream ended early: %s", kind)
            await stream.put(self.framing.frame(self.error_body(error)))
        else:
            await stream.put(self.framing.end)


def stream_head(framing: Framing) -> Message:
    """Return the ASGI message that starts a stream."""
    headers = [(b"content-type", framing.media_type.encode()), *_STREAM_HEADERS]
    return {"type": "http.response.start", "status": 200, "headers": headers}


class _StreamedBody:
    """The body of a streamed reply. The head is sent with its first bytes."""

    def __init__(self, send: Send, reply: StreamedReply[Any]) -> None:
        self.started = False
        self._reply = reply
        self._send = send
        self._sending = asyncio.Lock()  # chunks and pings are sent by two tasks
        self._sent_at = asyncio.get_running_loop().time()

    async def put(self, data: bytes) -> None:
        async with self._sending:
            if not self.started:
                self.started = True
                await self._send(stream_head(self._reply.framing))
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._sent_at = asyncio.get_running_loop().time()

    async def ping(self) -> None:
        """Send a ping after each silence. A client that does not read causes no further pings."""
        interval, counts = self._reply.ping_seconds, self._reply.counts
        while True:
            may_be_refused = not self.started and counts.status == QUEUED
            silence = self._reply.first_ping_seconds if may_be_refused else interval
            left = self._sent_at + silence - asyncio.get_running_loop().time()
            if left > 0:
                await asyncio.sleep(min(left, interval))
            else:
                await self.put(self._reply.framing.ping(counts.status))

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})


async def _flatten(batches: AsyncGenerator[list[ChunkT]]) -> AsyncGenerator[ChunkT]:
    async for batch in batches:
        for chunk in batch:
            yield chunk
