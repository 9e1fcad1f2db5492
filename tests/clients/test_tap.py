"""The tap: what it relays, and what it counts."""

import socket
import threading

from tests.clients.agents.tap import Tap

STREAM = b'HTTP/1.1 200 OK\r\n\r\ndata: {"n": 1}\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'


def answer(listener: socket.socket, heads: list[bytes]) -> None:
    """Serve one connection."""
    connection, _ = listener.accept()
    heads.append(connection.recv(1 << 16))
    connection.sendall(STREAM)
    connection.close()


def test_tap_relays_with_the_servers_host_and_counts_events() -> None:
    heads: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        serving = threading.Thread(target=answer, args=(listener, heads))
        serving.start()
        with Tap(f"http://127.0.0.1:{port}") as tap:
            own = int(tap.url.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", own)) as client:
                client.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{own}\r\n\r\n".encode())
                received = b"".join(iter(lambda: client.recv(1 << 16), b""))
        serving.join()
    assert received == STREAM
    assert heads == [f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()]
    assert tap.most_events == 2
