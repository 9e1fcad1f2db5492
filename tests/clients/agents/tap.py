"""A relay between a client and a server, which counts the pieces of streamed replies."""

import re
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

BUFFER = 1 << 16  # bytes
CLOSING_SECONDS = 10  # time limit for closing, in case a connection hangs
# the start of a server-sent event, or of a line in Ollama's format
PIECE = re.compile(rb'^(?:data: \{|\{.*"done": ?false)', re.MULTILINE)


class Tap:
    """Relays connections inside its `with` block. Clients use the URL of the tap instead of the server's."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.max_pieces = 0  # largest number of pieces on one connection
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
            except OSError:  # the listener is closed
                return
            server = socket.create_connection(self._server)
            self._connections += [client, server]
            for target, sides in ((self._relay_requests, (client, server)), (self._relay_replies, (server, client))):
                self._relays.append(threading.Thread(target=target, args=sides, daemon=True))
                self._relays[-1].start()

    def _relay_requests(self, client: socket.socket, server: socket.socket) -> None:
        """Copy requests, but put the server's address into the Host header, because the server rejects other hosts."""
        own_address, address = (
            f"{host}:{port}".encode() for host, port in (self._listener.getsockname(), self._server)
        )
        _copy(
            client,
            server,
            lambda piece: re.sub(rb"(?i)(\r\nhost: *)" + re.escape(own_address), rb"\g<1>" + address, piece),
        )

    def _relay_replies(self, server: socket.socket, client: socket.socket) -> None:
        pieces = PIECE.findall(_copy(server, client, bytes))
        self.max_pieces = max(self.max_pieces, len(pieces))


def _copy(source: socket.socket, target: socket.socket, transform: Callable[[bytes], bytes]) -> bytes:
    """Copy bytes until one side closes, and return all of them before the transformation."""
    whole = bytearray()
    try:
        while piece := source.recv(BUFFER):
            whole += piece
            target.sendall(transform(piece))
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the other side has closed
    return bytes(whole)
