"""Tap: a relay in front of a server that counts the events of its streams."""

import socket
import threading
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

BUFFER = 1 << 16  # bytes


class Tap:
    """Relays connections while it is entered. Its URL stands for the server's."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.most_events = 0  # of one connection

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            server = socket.create_connection(self._server)
            threading.Thread(target=_copy, args=(client, server), daemon=True).start()
            threading.Thread(target=self._count, args=(server, client), daemon=True).start()

    def _count(self, server: socket.socket, client: socket.socket) -> None:
        events = _copy(server, client).count(b"data: {")
        self.most_events = max(self.most_events, events)


def _copy(source: socket.socket, target: socket.socket) -> bytes:
    """All bytes until one side closes."""
    whole = bytearray()
    try:
        while piece := source.recv(BUFFER):
            whole += piece
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the other side is gone
    return bytes(whole)
