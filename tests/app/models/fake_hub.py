"""A fake Hugging Face Hub on loopback that serves files as /{repo}/resolve/{revision}/{file} and fails on request."""

import hashlib
import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Barrier, BrokenBarrierError, Event, Thread
from urllib.parse import parse_qs, urlsplit

from tests.support.processes import HANGING_SECONDS

REVISION = "89abcdef" * 5
_PIECE = 1 << 14


@dataclass(frozen=True)
class Mishap:
    """The failures to simulate in one download."""

    status: int = 0  # status to return instead of the file
    headers: dict[str, str] = field(default_factory=dict)  # headers to replace or add; an empty value removes one
    cut_at: int | None = None  # bytes after which the connection is closed
    stall_at: int | None = None  # bytes after which the hub sends nothing more but keeps the connection open
    flip_at: int | None = None  # position of the byte in which to flip a bit
    ignores_range: bool = False
    chunked: bool = False  # send the body as one chunk, and omit the final empty chunk


@dataclass
class FakeHub:
    """The state of the hub, which tests set. `requests` collects (method, path, headers)."""

    address: str = ""
    content: bytes = b""  # content of every file while `repositories` is empty
    # repository -> file name -> content, at commit REVISION
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)  # search tag of a repository; default: gguf
    large: int = 100  # minimum size in bytes of files that are listed with their sha256
    listing: bytes | None = None  # body to send as the file list of every repository
    refusal: tuple[int, str] | None = None  # (status, X-Error-Code) to return for every request
    ranges: bool = True  # whether range requests are supported
    sent_range: str | None = None  # value of Content-Range to send instead of the correct one
    cut_at: int | None = None  # number of bytes after which every download is cut off
    redirect: str | None = None  # URL to which downloads are redirected
    mishaps: deque[Mishap] = field(default_factory=deque)  # failures of the next downloads, one per download
    meeting: Barrier | None = None  # barrier that holds each download until all of its parties have requested one
    pace: float = 0.0  # seconds between two pieces of a file
    sent: int = 0  # total bytes of files that were sent
    requests: list[tuple[str, str, Message]] = field(default_factory=list)
    closing: Event = field(default_factory=Event)

    def answer(self, path: str) -> bytes | None:
        """Return the body to send for a path, or None for a 404."""
        if path.startswith("/api/models?"):
            return self._search(parse_qs(urlsplit(path).query)) if self.listing is None else self.listing
        for repo, files in self.repositories.items():
            if path.startswith(f"/api/models/{repo}/"):
                return self._list(files) if self.listing is None else self.listing
            if path.startswith(f"/{repo}/resolve/{REVISION}/"):
                return files.get(path.partition(f"/{REVISION}/")[2])
        return None if path.startswith("/api/") or self.repositories else self.content

    def _list(self, files: dict[str, bytes]) -> bytes:
        """Return the Hub's response to /api/models/{repo}/revision/main?blobs=true."""
        siblings: list[dict[str, object]] = []
        for name, content in files.items():
            git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324
            entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git}
            if len(content) >= self.large:
                entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            siblings.append(entry)
        return json.dumps({"sha": REVISION, "siblings": siblings, "cardData": {"license": "mit"}}).encode()

    def _search(self, query: dict[str, list[str]]) -> bytes:
        """Return the Hub's response to /api/models?search=WORDS&filter=TAG. The number of downloads increases from the
        first repository to the last.
        """
        ((words,), (tag,), (limit,)) = query["search"], query["filter"], query["limit"]
        found = [
            {"id": repo, "downloads": 100 * number, "tags": [tag]}
            for number, repo in enumerate(self.repositories)
            if all(word in repo.lower() for word in words.lower().split()) and self.tags.get(repo, "gguf") == tag
        ]
        return json.dumps(found[::-1][: int(limit)]).encode()

    def ranges_asked_for(self) -> list[str]:
        return [headers["Range"] for _, headers in self.downloads() if headers["Range"]]

    def downloads(self) -> list[tuple[str, Message]]:
        return [(path, headers) for method, path, headers in self.requests if method == "GET"]


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, *args: object) -> None:
        """Disable the access log."""

    def do_HEAD(self) -> None:
        self.hub.requests.append(("HEAD", self.path, self.headers))
        self._head(200, {"Content-Length": "0"})

    def do_GET(self) -> None:
        hub = self.hub
        hub.requests.append(("GET", self.path, self.headers))
        if hub.refusal:
            status, code = hub.refusal
            self._head(status, {"X-Error-Code": code, "Content-Length": "0"})
        elif hub.redirect and not self.path.startswith("/api/"):
            self._head(302, {"Location": hub.redirect + self.path, "Content-Length": "0"})
        elif (body := hub.answer(self.path)) is None:
            self._head(404, {"X-Error-Code": "RepoNotFound", "Content-Length": "0"})
        else:
            is_file = not self.path.startswith("/api/")
            if is_file and hub.meeting:
                with suppress(BrokenBarrierError):
                    hub.meeting.wait()
            self._send(body, hub.mishaps.popleft() if is_file and hub.mishaps else Mishap())

    def _send(self, body: bytes, mishap: Mishap) -> None:
        """Send the whole file. If a range is requested and the file is unchanged, send only the bytes of the range."""
        hub, asked = self.hub, self.headers["Range"]
        etag = f'"{hashlib.md5(body).hexdigest()}"'  # noqa: S324
        knows = hub.ranges and not mishap.ignores_range and self.headers["If-Range"] in (None, etag)
        first, _, last = asked.removeprefix("bytes=").partition("-") if asked and knows else ("", "", "")
        begin, end = int(first or 0), int(last or len(body) - 1) + 1
        headers = {"Content-Length": str(end - begin), "ETag": etag}
        status = 200
        if mishap.status:
            status, headers, body = mishap.status, {"Content-Length": "0"}, b""
        elif begin >= len(body) > 0:
            status, headers, body = 416, {"Content-Length": "0"}, b""
        elif first:
            truth = f"bytes {begin}-{end - 1}/{len(body)}"
            status, headers["Content-Range"] = 206, truth if hub.sent_range is None else hub.sent_range
        self._head(status, {**headers, **mishap.headers})
        with suppress(ConnectionError):  # the client may have disconnected
            self._write(bytearray(body[begin:end]), mishap)

    def _write(self, body: bytearray, mishap: Mishap) -> None:
        if mishap.flip_at is not None and body:
            body[mishap.flip_at % len(body)] ^= 1
        ends = [end for end in (self.hub.cut_at, mishap.cut_at, mishap.stall_at) if end is not None]
        body = body[: min(ends, default=len(body))]
        if mishap.chunked:
            body = bytearray(b"%x\r\n%s\r\n" % (len(body), body))
        for begin in range(0, len(body), _PIECE):
            piece = body[begin : begin + _PIECE]
            self.wfile.write(piece)
            self.hub.sent += len(piece)
            time.sleep(self.hub.pace)
        if mishap.stall_at is not None:
            self.hub.closing.wait()

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()


@contextmanager
def serve(content: bytes = b"", host: str = "127.0.0.1") -> Iterator[FakeHub]:
    """Run a hub on a free loopback port while the body runs."""
    hub = FakeHub(content=content)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://{host}:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        thread.join(HANGING_SECONDS)
        server.server_close()
