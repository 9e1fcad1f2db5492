"""Tap: a relay in front of a server that counts the pieces of its streams."""

import re
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

BUFFER = 1 << 16  # bytes
CLOSING_SECONDS = 10  # a hang guard
PIECE = re.compile(rb'^(?:data: \{|\{.*"done": ?false)', re.MULTILINE)  # a server-sent event, or a line of Ollama's


class Tap:
    """Relays connections while it is entered. Its URL stands for the server's."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.most_pieces = 0  # of one connection
        self._relays: list[threading.Thread] = []
        self._connections: list[socket.socket] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for relay in self._relays:
            relay.join(CLOSING_SECONDS)
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            server = socket.create_connection(self._server)
            self._connections += [client, server]
            for target, sides in ((self._ask, (client, server)), (self._count, (server, client))):
                self._relays.append(threading.Thread(target=target, args=sides, daemon=True))
                self._relays[-1].start()

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        """The server serves requests for its own address only."""
        own, address = (f"{host}:{port}".encode() for host, port in (self._listener.getsockname(), self._server))
        _copy(client, server, lambda piece: re.sub(rb"(?i)(\r\nhost: *)" + re.escape(own), rb"\g<1>" + address, piece))

    def _count(self, server: socket.socket, client: socket.socket) -> None:
        pieces = PIECE.findall(_copy(server, client, bytes))
        self.most_pieces = max(self.most_pieces, len(pieces))


def _copy(source: socket.socket, target: socket.socket, changed: Callable[[bytes], bytes]) -> bytes:
    """Copy until one side closes, and return all bytes."""
    whole = bytearray()
    try:
        while piece := source.recv(BUFFER):
            whole += piece
            target.sendall(changed(piece))
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the other side is gone
    return bytes(whole)
