"""Slow readers: the server bounds their unsent data, does not delay other clients, and loses no data."""

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from app.generation.conversation import Message
from app.generation.template import ChatTemplateRenderer
from app.generation.token_streams import MAX_BATCH
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.app.server.test_disconnects import message, read_all
from tests.support.hash_model import expected_output
from tests.support.processes import until

Seen = TypeVar("Seen")
TOKENS = 1500
WRITE_LIMIT = 64 << 10  # bytes; asyncio pauses a writer that has more unsent data
LARGEST_EVENT = 512  # bytes


@pytest.fixture
def server(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[LiveServer]:
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, tokenizer, renderer) as server:
        # Accepted connections inherit the small buffer, so that the system stores little of the unread data.
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield server
        until(lambda: not engine.has_work)
    engine.assert_empty()


def slow_client(server: LiveServer, content: str) -> socket.socket:
    """A client that asks for a long stream and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    client.sendall(message(content, max_tokens=TOKENS, stream=True))
    return client


def on_connections(server: LiveServer, look: Callable[[Any], Seen]) -> list[Seen]:
    """Return the result of `look` for each connection, run on the server's event loop."""

    async def looked() -> list[Seen]:
        return [look(connection) for connection in server._server.server_state.connections]

    return server.call(looked())


def bytes_unsent(server: LiveServer) -> int:
    """Return the largest number of unsent bytes of any connection."""
    return max(on_connections(server, lambda one: one.transport.get_write_buffer_size()), default=0)


def waits_for_reader(server: LiveServer) -> bool:
    """Whether the server has paused writing to a client. It stays paused even if the system accepts more data."""
    return any(on_connections(server, lambda one: one.flow.write_paused))


def texts(reply: bytes) -> str:
    """Return the text of a streamed reply. Fails if the reply is not complete."""
    # keep the line after the size of each HTTP chunk
    body = b"".join(reply.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2])
    *events, done, nothing = body.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def expected(server: LiveServer, content: str, tokens: int) -> str:
    prompt = server.call(server.service.encode([Message("user", content)]))
    return server.service.tokenizer.decode(expected_output(prompt, tokens))


def test_unread_reply_is_bounded_and_delays_no_other_client(server: LiveServer) -> None:
    with slow_client(server, "Slowly") as slow:
        until(lambda: waits_for_reader(server))
        quick = asyncio.run(read_all(server, message("Quickly", max_tokens=100, stream=True)))
        until(lambda: not server.engine.has_work)  # wait until the reply is complete and its blocks are free
        assert bytes_unsent(server) <= WRITE_LIMIT + MAX_BATCH * LARGEST_EVENT
        assert texts(quick) == expected(server, "Quickly", 100)
        late = b"".join(iter(lambda: slow.recv(1 << 16), b""))
    assert len(late) > 2 * (WRITE_LIMIT + MAX_BATCH * LARGEST_EVENT)
    assert texts(late) == expected(server, "Slowly", TOKENS)


def test_disconnect_without_reading_leaves_no_tasks(server: LiveServer) -> None:
    idle = server.tasks()
    with slow_client(server, "Never"):
        until(lambda: waits_for_reader(server))
    tasks_and_work_end(server, idle)


def tasks_and_work_end(server: LiveServer, idle: int) -> None:
    """Wait until the server has only its idle tasks and the engine has no work."""
    until(lambda: server.tasks() <= idle and not server.engine.has_work)
    server.engine.assert_empty()
