"""Sending of replies, tested without a server: chunks, pings, errors, and cleanup after a disconnect."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from msgspec import Struct
from starlette.types import Message, Receive, Scope, Send

from app.generation.events import TokenCounts
from app.server.dialects.openai.errors import error_body
from app.server.http.connection import CancelOnDisconnect
from app.server.http.errors import InvalidRequest
from app.server.http.reply import StreamedReply, WholeReply
from tests.support.processes import HANGING_SECONDS

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": []}


class Chunk(Struct):
    number: int


class Client:
    """A client without a connection. It accepts `patience` messages, then blocks the sender. It can disconnect."""

    def __init__(self, patience: int = 1 << 30) -> None:
        self.sent: list[Message] = []
        self.left = asyncio.Event()
        self.stuck = asyncio.Event()
        self._patience = patience
        self._has_asked = False

    async def receive(self) -> Message:
        if not self._has_asked:
            self._has_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if len(self.sent) == self._patience:
            self.stuck.set()
            await asyncio.Event().wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def numbers(closed: list[bool], end: int, at_once: int = 1) -> AsyncGenerator[list[Chunk]]:
    try:
        for first in range(0, end, at_once):
            yield [Chunk(number) for number in range(first, min(first + at_once, end))]
    finally:
        closed.append(True)


async def fold(chunks: AsyncGenerator[Chunk]) -> Chunk:
    return Chunk(sum([chunk.number async for chunk in chunks]))


def test_stream_sends_each_chunk_and_then_done() -> None:
    async def reply() -> bytes:
        client = Client()
        await StreamedReply(numbers([], 2), error_body)(SCOPE, client.receive, client.send)
        return client.body

    assert asyncio.run(reply()) == b'data: {"number":0}\n\ndata: {"number":1}\n\ndata: [DONE]\n\n'


def test_batch_is_sent_at_once_with_one_event_per_chunk() -> None:
    async def reply() -> list[bytes]:
        client = Client()
        await StreamedReply(numbers([], 5, at_once=2), error_body)(SCOPE, client.receive, client.send)
        return [message["body"] for message in client.sent if message["type"] == "http.response.body"]

    assert asyncio.run(reply()) == [
        b'data: {"number":0}\n\ndata: {"number":1}\n\n',
        b'data: {"number":2}\n\ndata: {"number":3}\n\n',
        b'data: {"number":4}\n\n',
        b"data: [DONE]\n\n",
        b"",
    ]


def test_whole_reply_combines_all_chunks() -> None:
    async def reply() -> bytes:
        client = Client()
        await WholeReply(numbers([], 5, at_once=2), fold)(SCOPE, client.receive, client.send)
        return client.body

    assert asyncio.run(reply()) == b'{"number":10}'


def test_disconnect_of_a_stuck_client_closes_the_chunks() -> None:
    async def reply() -> None:
        client, closed = Client(patience=3), list[bool]()
        chunks = numbers(closed, 1 << 30)  # keep a reference, or the garbage collector would close the generator

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            await StreamedReply(chunks, error_body)(scope, receive, send)

        sending = asyncio.create_task(CancelOnDisconnect(answer)(SCOPE, client.receive, client.send))
        await client.stuck.wait()
        client.left.set()
        await sending
        assert closed
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(reply())


def test_waiting_client_receives_comments() -> None:
    async def late(error: Exception | None) -> AsyncGenerator[list[Chunk]]:
        async with asyncio.timeout(HANGING_SECONDS):
            while len(client.sent) < 4:
                await asyncio.sleep(0)
        if error is not None:
            raise error
        yield [Chunk(1)]

    async def reply(error: Exception | None = None) -> list[bytes]:
        reply = StreamedReply(late(error), error_body, first_ping_seconds=0.002, ping_seconds=0.001)
        await reply(SCOPE, client.receive, client.send)
        return client.body.split(b"\n\n")[2:]

    client = Client()
    assert [event for event in asyncio.run(reply()) if event[:1] != b":"] == [
        b'data: {"number":1}',
        b"data: [DONE]",
        b"",
    ]
    assert client.body.startswith(b": queued\n\n")
    client = Client()
    # The head was already sent, so the status cannot report the error.
    reported = asyncio.run(reply(InvalidRequest("It failed", "Try again.")))
    assert [b"It failed" in event for event in reported if event[:5] == b"data:"] == [True]
    assert client.sent[0]["status"] == 200


def test_empty_batch_sends_only_the_head() -> None:
    async def beginning() -> AsyncGenerator[list[Chunk]]:
        yield []
        heads.append([message["type"] for message in client.sent])
        yield [Chunk(1)]

    client, heads = Client(), list[list[str]]()
    asyncio.run(StreamedReply(beginning(), error_body)(SCOPE, client.receive, client.send))
    assert heads == [["http.response.start", "http.response.body"]]
    assert client.body == b'data: {"number":1}\n\ndata: [DONE]\n\n'


def test_error_before_the_head_is_raised() -> None:
    async def failing() -> AsyncGenerator[list[Chunk]]:
        raise InvalidRequest("It failed")
        yield []

    async def reply() -> None:
        await StreamedReply(failing(), error_body)(SCOPE, client.receive, client.send)

    client = Client()
    with pytest.raises(InvalidRequest, match="It failed"):
        asyncio.run(reply())
    assert not client.sent


@pytest.mark.parametrize("status", ["prefill 2,048 of 5,001", "decode"])
def test_pings_report_the_status_once_the_engine_has_started(status: str) -> None:
    """After the engine has started, pings no longer wait for the longer first interval."""

    async def late(client: Client) -> AsyncGenerator[list[Chunk]]:
        async with asyncio.timeout(HANGING_SECONDS):
            while len(client.sent) < 3:
                await asyncio.sleep(0)
        yield [Chunk(1)]

    async def reply() -> bytes:
        client, counts = Client(), TokenCounts()
        counts.status = status
        chunks = late(client)
        answer = StreamedReply(chunks, error_body, counts=counts, first_ping_seconds=1e6, ping_seconds=0.001)
        await answer(SCOPE, client.receive, client.send)
        return client.body

    assert asyncio.run(reply()).startswith(f": {status}\n\n: {status}\n\n".encode())
