"""Endless request heads, chunk sizes, and trailers are refused before they fill the memory."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from app.server.http.access_middleware import MAX_HEADERS, MAX_TARGET_BYTES
from tests.app.server.live_server import LiveServer

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
FAR_TOO_MUCH = 64 << 20


def endless(begin: bytes, again: bytes) -> Iterator[bytes]:
    yield begin
    for _ in range(FAR_TOO_MUCH // len(again)):
        yield again


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param((b"GET /", b"a" * 4096), id="path"),
        pytest.param((b"G", b"E" * 4096), id="method"),
        pytest.param((HEAD + b"X: ", b"a" * 4096), id="header"),
        pytest.param((HEAD + b"X", b"a" * 4096), id="name"),
        pytest.param((HEAD, b"X: a\r\n" * 700), id="headers"),
        pytest.param((CHUNKED + b"5", b"0" * 4096), id="size of a chunk"),
        pytest.param((CHUNKED + b"5;a=", b"a" * 4096), id="extension of a chunk"),
        pytest.param((CHUNKED + b"0\r\nX: ", b"a" * 4096), id="trailer"),
        pytest.param((CHUNKED + b"0\r\n", b"X: a\r\n" * 700), id="trailers"),
    ],
)
def test_endless_request_is_refused(hash_server: LiveServer, sent: tuple[bytes, bytes]) -> None:
    taken = 0
    with socket.create_connection(("127.0.0.1", hash_server.port)) as client, contextlib.suppress(ConnectionError):
        for piece in endless(*sent):
            client.sendall(piece)
            taken += len(piece)
    assert taken < FAR_TOO_MUCH // 4  # most of these bytes are in the system's socket buffers


def test_head_of_common_length_is_accepted(hash_server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", hash_server.port)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
        for number in range(100):
            client.sendall(b"X-%d: %s\r\n" % (number, b"a" * 300))
        client.sendall(b"\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("target", "headers", "status"),
    [
        (MAX_TARGET_BYTES, MAX_HEADERS, 200),
        (MAX_TARGET_BYTES + 1, MAX_HEADERS, 414),
        (MAX_TARGET_BYTES, MAX_HEADERS + 1, 431),
    ],
)
def test_size_of_the_head_is_limited(hash_server: LiveServer, target: int, headers: int, status: int) -> None:
    """`target`: bytes of path and query together."""
    query = b"a" * (target - len("/health"))
    names = [b"Host: localhost", b"Connection: close", *(b"X-%d: a" % number for number in range(headers - 2))]
    with socket.create_connection(("127.0.0.1", hash_server.port)) as client:
        client.sendall(b"\r\n".join((b"GET /health?" + query + b" HTTP/1.1", *names, b"\r\n")))
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 %d" % status)
