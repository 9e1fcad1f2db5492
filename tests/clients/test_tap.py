"""The tap between client and server counts the pieces of streamed replies."""

import socket
import threading

import pytest

from tests.clients.agents.tap import Tap

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
EVENTS = HEAD + b'data: {"n": 1}\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'
LINES = HEAD + b'1c\r\n{"model":"m","done":false}\n\r\n' * 2 + b'1b\r\n{"model":"m","done":true}\n\r\n0\r\n\r\n'
WHOLE = HEAD + b'{"model":"m","message":{"content":"a"},"done":true}'


def answer(listener: socket.socket, heads: list[bytes], reply: bytes) -> None:
    """Accept one connection and send a streamed reply."""
    connection, _ = listener.accept()
    heads.append(connection.recv(1 << 16))
    connection.sendall(reply)
    connection.close()


@pytest.mark.parametrize(("reply", "pieces"), [(EVENTS, 2), (LINES, 2), (WHOLE, 0)])
def test_tap_rewrites_host_header_and_counts_pieces(reply: bytes, pieces: int) -> None:
    heads: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        serving = threading.Thread(target=answer, args=(listener, heads, reply))
        serving.start()
        with Tap(f"http://127.0.0.1:{port}") as tap:
            tap_port = int(tap.url.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", tap_port)) as client:
                client.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{tap_port}\r\n\r\n".encode())
                received = b"".join(iter(lambda: client.recv(1 << 16), b""))
        serving.join()
    assert received == reply
    assert heads == [f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()]
    assert tap.max_pieces == pieces
