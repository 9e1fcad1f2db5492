"""Slow clients and excess connections are closed, and other connections are not affected."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from app.generation.template import ChatTemplateRenderer
from app.server.http import connection, request_body
from app.server.http.connection import Connection
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import ControlledRunner, LiveServer, controlled_engine
from tests.app.server.test_slow_clients import slow_client, tasks_and_work_end
from tests.support.processes import until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SHORT = 0.2  # seconds


@pytest.fixture
def stack(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[tuple[LiveServer, ControlledRunner]]:
    engine, runner = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, tokenizer, renderer) as server:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield server, runner
    engine.assert_empty()


@pytest.fixture
def server(stack: tuple[LiveServer, ControlledRunner]) -> LiveServer:
    return stack[0]


def connected(server: LiveServer, sent: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    client.sendall(sent)
    return client


def receive_all(client: socket.socket) -> bytes:
    """Return everything that the server sends until it closes the connection."""
    try:
        return b"".join(iter(lambda: client.recv(1 << 16), b""))
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: local", id="a head without an end"),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET", id="a second head"),
        pytest.param(HEAD.replace(b"POST", b"GET") + b"Content-Length: 9\r\n\r\n{", id="a body that nobody reads"),
    ],
)
def test_unfinished_head_closes_the_connection(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(Connection, "HEAD_SECONDS", SHORT)
    with connected(server, sent) as client:
        receive_all(client)


@pytest.mark.parametrize("sent", [b"", b"{"])
def test_unfinished_body_gets_408_and_closes_the_connection(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(request_body, "BODY_SECONDS", SHORT)
    monkeypatch.setattr(Connection, "HEAD_SECONDS", 2.0)  # the head must arrive in this time
    with connected(server, HEAD + b"Content-Length: 1000\r\n\r\n" + sent) as client:
        head, _, body = receive_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_time_limits_do_not_apply_to_the_engine(
    stack: tuple[LiveServer, ControlledRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow engine step does not close the connection, because the limits apply only to the client."""
    seconds = 0.5  # the request must arrive in this time
    monkeypatch.setattr(Connection, "HEAD_SECONDS", seconds)
    monkeypatch.setattr(Connection, "UNREAD_SECONDS", seconds)
    server, runner = stack
    body = json.dumps({"model": "hash", "prompt": "Hi", "max_tokens": 3, "ignore_eos": True}).encode()
    asked = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with runner.held() as steps, connected(server, asked) as client:
        client.settimeout(3 * seconds)
        with pytest.raises(TimeoutError):
            client.recv(1)
        steps.release(1000)
        client.settimeout(60)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_client_that_does_not_read_is_disconnected(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "UNREAD_SECONDS", SHORT)
    idle = server.tasks()
    with slow_client(server, "Never"):
        until(lambda: server.engine.has_work)
        tasks_and_work_end(server, idle)


def request_of(body: dict[str, object]) -> bytes:
    encoded = json.dumps({"model": "hash", "prompt": "Hi", "ignore_eos": True, **body}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(encoded) + encoded


@pytest.mark.parametrize("stream", [False, True])
def test_half_closed_client_gets_its_reply(
    stack: tuple[LiveServer, ControlledRunner], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(Connection, "POLL_SECONDS", 0.01)
    server, runner = stack
    with runner.held() as steps, connected(server, request_of({"max_tokens": 3, "stream": stream})) as client:
        client.shutdown(socket.SHUT_WR)
        until(lambda: server.engine.has_work)
        until(lambda: any(one._poll_timer for one in server._server.server_state.connections))  # type: ignore[union-attr]
        steps.release(1000)
        answer = receive_all(client)
    assert answer.startswith(b"HTTP/1.1 200")
    assert (b"[DONE]" if stream else b'"finish_reason":"length"') in answer


def test_disconnect_after_half_close_aborts_the_request(
    stack: tuple[LiveServer, ControlledRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "POLL_SECONDS", 0.01)
    server, runner = stack
    idle = server.tasks()
    with runner.held() as steps:
        with connected(server, request_of({"max_tokens": 1500})) as client:
            client.shutdown(socket.SHUT_WR)
            until(lambda: any(one._poll_timer for one in server._server.server_state.connections))  # type: ignore[union-attr]
        until(lambda: server.tasks() <= idle)
        steps.release(1000)
    until(lambda: not server.engine.has_work)


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"Content-Length: 1000\r\n\r\n{"])
def test_half_close_before_the_request_is_complete_disconnects(server: LiveServer, sent: bytes) -> None:
    idle = server.tasks()
    with connected(server, sent) as client:
        client.shutdown(socket.SHUT_WR)
        assert receive_all(client) == b""
    until(lambda: server.tasks() <= idle)


def test_bytes_that_are_not_http_get_an_error_in_openai_format(server: LiveServer) -> None:
    with connected(server, b"\x16\x03\x01\x00\xf4 hello\r\n\r\n") as client:
        head, _, body = receive_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}


def test_connections_over_the_limit_are_closed(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(Connection, "HEAD_SECONDS", 1000.0)  # otherwise this limit closes the idle connection
    asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with ExitStack() as opened:
        clients = [opened.enter_context(connected(server, asked)) for _ in range(3)]
        assert all(client.recv(1 << 16).startswith(b"HTTP/1.1 200") for client in clients)
        assert receive_all(opened.enter_context(connected(server, b""))) == b""
        clients[0].close()
        until(lambda: len(server._server.server_state.connections) < 3)
        assert opened.enter_context(connected(server, asked)).recv(1 << 16).startswith(b"HTTP/1.1 200")
