"""A Hugging Face Hub on loopback: serves files as /{repo}/resolve/{revision}/{file}, and misbehaves on request."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass
class FakeHub:
    """What the hub does; tests set it. `requests` collects (method, path, headers)."""

    address: str = ""
    content: bytes = b""
    refusal: tuple[int, str] | None = None  # status and X-Error-Code
    cut_at: int | None = None  # close the connection after so many bytes
    redirect: str | None = None  # send downloads to this address instead
    requests: list[tuple[str, str, Message]] = field(default_factory=list)

    def downloads(self) -> list[tuple[str, Message]]:
        return [(path, headers) for method, path, headers in self.requests if method == "GET"]


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, *args: object) -> None:
        """Tests have no use for an access log."""

    def do_HEAD(self) -> None:
        self.hub.requests.append(("HEAD", self.path, self.headers))
        self._head(200, {"Content-Length": "0"})

    def do_GET(self) -> None:
        hub = self.hub
        hub.requests.append(("GET", self.path, self.headers))
        if hub.refusal:
            status, code = hub.refusal
            self._head(status, {"X-Error-Code": code, "Content-Length": "0"})
        elif hub.redirect:
            self._head(302, {"Location": hub.redirect + self.path, "Content-Length": "0"})
        else:
            self._head(200, {"Content-Length": str(len(hub.content))})
            self.wfile.write(hub.content[: hub.cut_at])

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def serve(content: bytes = b"", host: str = "127.0.0.1") -> Iterator[FakeHub]:
    """A hub on a free port of loopback, as long as the body runs."""
    hub = FakeHub(content=content)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://{host}:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
