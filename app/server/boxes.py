"""Links to boxes, the user's other machines whose models are used here: one request at a time, and lists of models.

Boxes are not trusted: their replies are limited in size and time, only certain types are accepted, and names of models
must start with the name of the box.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from app.client.pinned_tls import pinned_context, wrong_certificate
from app.server.http.endpoint import LINES, NAMED_EVENTS, TEXT, Framing
from app.settings.boxes import BOX_HEADER, Box, boxes_folder, read_boxes

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS = 3.0
RETRY_SECONDS = 5  # seconds after a failed connection in which requests for the box fail at once
LIST_SECONDS = 0.5  # seconds that a list of models waits for the boxes that answered last
_WRITE_SECONDS = 30.0  # time limit of a box to read a part of the request
_ASK_SECONDS = 5.0  # time limit of a box for a list of its models, which arrives in the background
_MAX_LIST_BYTES = 4 << 20
_MAX_LISTED = 1000  # models of one box in a list

# Lists of models in all APIs: the path, and the member with the models.
LISTS: Final[Mapping[str, str]] = {
    "/v1/models": "data",
    "/models": "data",
    "/api/tags": "models",
    "/api/ps": "models",
    "/api/v0/models": "data",
    "/api/v1/models": "models",
}
STREAMS: Final[Mapping[str, Framing]] = {"text/event-stream": NAMED_EVENTS, LINES.media_type: LINES}
# Other types, such as a page with scripts, would run in a browser with the access of this server.
_TYPES = frozenset(("", "application/json", TEXT, *STREAMS))
_STATUSES = (*range(200, 300), *range(400, 600))  # a redirect would send the client to another server
_REFUSED_KEY = (401, 403)
_PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# A box that loses its power sends nothing: the system then finds out after 15 s of silence and 3 probes of 5 s.
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in _PROBES.items() if hasattr(socket, name)),
]


class ListEntry(Struct):
    """The members in which an entry of a list names a model."""

    id: Any = None
    name: Any = None
    model: Any = None
    key: Any = None

    def has_prefix(self, prefix: str) -> bool:
        names = [name for name in (self.id, self.name, self.model, self.key) if name is not None]
        return bool(names) and all(isinstance(name, str) and name.startswith(prefix) for name in names)


class BoxAway(Exception):
    """A box does not answer, or answers with something that is not passed on.

    `seconds` is the time until a retry can succeed; None: a retry does not help.
    """

    def __init__(self, reason: str, seconds: int | None = RETRY_SECONDS, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.seconds = seconds
        self.remedy = remedy


class ReplyCut(Exception):
    """The connection to a box was lost before its reply was complete."""


class Boxes:
    """The boxes of this user. A change of their files applies to the next request."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._changed: int | None = None
        self._links: dict[str, BoxLink] = {}

    def links(self) -> Mapping[str, "BoxLink"]:
        """Return the links by the names of the boxes. Reads the files only if the folder has changed."""
        try:
            changed = boxes_folder(self._state_dir).stat().st_mtime_ns
        except FileNotFoundError:
            return {}
        if changed != self._changed:
            found = read_boxes(self._state_dir)
            kept = {name: link for name, link in self._links.items() if link.box == found.get(name)}
            self._links = {name: kept.get(name) or BoxLink(box) for name, box in found.items()}
            self._changed = changed
        return self._links


class BoxLink:
    """Exchanges with one box. Each has its own connection, which ends with it."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self._problem = ""  # why the last connection failed; empty: it did not fail
        self._retry_at = 0.0  # until then, no connection is tried
        self._is_prompt = True  # whether the last list arrived in LIST_SECONDS
        self._lists: dict[str, list[msgspec.Raw]] = {}  # entries of the last lists, by their paths
        self._asking: dict[str, asyncio.Task[None]] = {}

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return pinned_context(self.box.fingerprint)

    @asynccontextmanager
    async def exchange(
        self, method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]] = (), body: bytes = b""
    ) -> AsyncIterator["httpx.Response"]:
        """Send a request, and yield the response. `target`: path and query. Raises BoxAway."""
        await asyncio.to_thread(import_module, "httpx")  # takes 0.1 s or more
        import httpx

        if (left := self._retry_at - asyncio.get_running_loop().time()) > 0:
            raise BoxAway(self._problem, 1 + int(left))
        request = httpx.Request(
            method,
            httpx.URL(self.box.url).copy_with(raw_path=target),
            headers=[
                *headers,
                (b"host", b"localhost"),  # accepted by each server, whichever name the box has in this network
                (b"authorization", f"Bearer {self.box.key}".encode()),
                (b"accept-encoding", b"identity"),
                (BOX_HEADER.encode(), self.box.name.encode()),
            ],
            content=body or None,
            extensions={"timeout": {"connect": CONNECT_SECONDS, "write": _WRITE_SECONDS}},
        )
        # the transport itself follows no redirects, stores no cookies, and logs no URLs
        async with httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, socket_options=_KEEP_ALIVE) as transport:
            try:
                response = await transport.handle_async_request(request)
            except httpx.TransportError as error:
                raise self._failed(error) from error
            self._problem, self._retry_at = "", 0.0
            try:
                yield response
            finally:
                await response.aclose()

    def _failed(self, error: "httpx.TransportError") -> BoxAway:
        """Remember a failed connection, and return the error for the request."""
        import httpx

        if (wrong := wrong_certificate(error)) is not None:
            return BoxAway(f"{self.box.name} is refused: {wrong.strerror}", None, self._new_line)
        self._problem = f"{self.box.name} does not respond at {self.box.url}"
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            self._retry_at = asyncio.get_running_loop().time() + RETRY_SECONDS
        return BoxAway(self._problem)

    @property
    def _new_line(self) -> str:
        return f"Run ingle share on it, and ingle box add {self.box.name} LINE here."

    def check(self, response: "httpx.Response") -> None:
        """Raise BoxAway for a response that is not passed on."""
        status, kind = response.status_code, media_type(response)
        if status in _REFUSED_KEY:
            raise BoxAway(f"{self.box.name} refuses the key", None, self._new_line)
        if status not in _STATUSES or kind not in _TYPES:
            said = f"the type {kind!r:.80}" if status in _STATUSES else f"status {status}"
            raise BoxAway(f"{self.box.name} answers with {said}", None, "Update ingle on it.")

    async def entries(self, path: str) -> Sequence[msgspec.Raw]:
        """Return the entries of this box for a list: those of its last answer if it is slow, none if it is away."""
        asking = self._asking.get(path)
        if asking is None or asking.done():
            asking = self._asking[path] = asyncio.create_task(self._ask(path))
        if self._is_prompt and not self._problem:
            await asyncio.wait((asking,), timeout=LIST_SECONDS)
            self._is_prompt = asking.done()
        return () if self._problem else self._lists.get(path, ())

    async def _ask(self, path: str) -> None:
        """Ask for a list, and remember its entries. Entries with names of other machines are left out."""
        try:
            async with asyncio.timeout(_ASK_SECONDS), self.exchange("GET", path.encode()) as response:
                self.check(response)
                self._lists[path] = _entries(await _limited(response), LISTS[path], self.box.prefix)
                self._is_prompt = True
        except BoxAway:
            self._lists.pop(path, None)
        except (TimeoutError, ReplyCut, KeyError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # the entries of the last answer stay


async def _limited(response: "httpx.Response") -> bytes:
    """Return the body of a response. Raises ReplyCut if it is longer than _MAX_LIST_BYTES."""
    content = bytearray()
    async for chunk in chunks_of(response):
        content += chunk
        if len(content) > _MAX_LIST_BYTES:
            raise ReplyCut
    return bytes(content)


def _entries(content: bytes, member: str, prefix: str) -> list[msgspec.Raw]:
    listed = msgspec.json.decode(content, type=dict[str, msgspec.Raw])[member]
    found = msgspec.json.decode(listed, type=list[msgspec.Raw])[:_MAX_LISTED]
    return [entry for entry in found if msgspec.json.decode(entry, type=ListEntry).has_prefix(prefix)]


def media_type(response: "httpx.Response") -> str:
    return str(response.headers.get("content-type", "")).partition(";")[0].strip().lower()


async def chunks_of(response: "httpx.Response") -> AsyncGenerator[bytes]:
    """Yield the bytes of a response as they arrive. Raises ReplyCut."""
    import httpx

    try:
        async for chunk in response.stream:  # type: ignore[union-attr]  # the stream of an asynchronous transport
            yield chunk
    except httpx.TransportError as error:
        raise ReplyCut from error
