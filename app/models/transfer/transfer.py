"""Brings the bytes of files from the web: several files at once, each until it is whole.

An attempt is one request, straight into `Incoming`. One that breaks or stalls is followed by another, which asks for
the rest alone (ranges and validators: RFC 9110, sections 13 and 14). A file that arrives damaged is fetched once more,
and no more. Refuses to know what the files are and what a refusal means. httpx takes a tenth of a second to import, and
most runs find their model stored, so it is imported late.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from app.errors import IntegrityError, Offline
from app.models.transfer.attempts import TryAgain, retry
from app.models.transfer.incoming import Incoming
from app.progress import Progress

if TYPE_CHECKING:
    import ssl

    import httpx

AGAIN = "Check the network and try again: what has arrived is kept. Or give the path of a model that you have."
CONNECT = 10.0  # seconds until a connection is there
STALL = 30.0  # seconds without a byte
_WINDOW, _CRAWL = 30.0, 30_000  # seconds, and the bytes that should come in them
MAX_PARALLEL = 4  # files
_RANGE = re.compile(r"bytes (?P<begin>\d{1,20})-\d+/(?P<size>\d+|\*)")


@dataclass(frozen=True, slots=True)
class WebFile:
    """A file that is to be fetched, and where it goes."""

    name: str
    address: str
    headers: Mapping[str, str]  # Authorization goes to the host of the address, and to no other
    receiving: Callable[[], AbstractContextManager[Incoming]]
    check: "Callable[[httpx.Response], None]"  # raises for an answer that does not bring the file


def download_files(files: Sequence[WebFile], label: str, size: int, progress: Progress) -> None:
    """Receive the files, which are `size` bytes together. What has arrived before is not asked for again.

    Raises Offline where a connection cannot be had or kept, IntegrityError for wrong bytes, NoSpace, and what `check`
    raises; the other files are left as they are then.
    """
    with progress.task(label, size) as report:
        asyncio.run(_download_all(files, report, progress))


async def _download_all(files: Sequence[WebFile], report: Callable[[int], None], progress: Progress) -> None:
    slots = asyncio.Semaphore(MAX_PARALLEL)
    on_their_way: list[Incoming] = []

    def tell() -> None:
        report(sum(incoming.received for incoming in on_their_way))

    async def receive(file: WebFile, client: "httpx.AsyncClient") -> None:
        async with slots:
            with file.receiving() as incoming:
                on_their_way.append(incoming)
                # When this is cancelled, the file is closed, which ends the reading of it.
                await asyncio.to_thread(incoming.resume, tell)
                await _Transfer(file, incoming, client, tell, progress.say).complete()

    async with web_client() as client:
        tasks = [asyncio.create_task(receive(file, client)) for file in files]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def web_client() -> "AsyncIterator[httpx.AsyncClient]":
    """A client whose errors become TryAgain or Offline. It drops Authorization when a redirect leaves the host."""
    import httpx

    try:
        async with httpx.AsyncClient(
            headers={"User-Agent": "inglenook", "Accept-Encoding": "identity"},
            timeout=httpx.Timeout(STALL, connect=CONNECT),
            verify=tls(),
            follow_redirects=True,
        ) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL) as problem:  # the broken connections among them were tried again
        raise Offline(f"the answer cannot be followed ({error_text(problem)})", AGAIN) from problem


@cache
def tls() -> "ssl.SSLContext":
    """Whom to believe. Reading all certificates takes a tenth of a second, so it is done once."""
    import httpx

    return httpx.create_ssl_context()


@asynccontextmanager
async def open_response(
    client: "httpx.AsyncClient", address: str, headers: Mapping[str, str]
) -> "AsyncIterator[httpx.Response]":
    """What is answered to a GET, not read yet. Raises TryAgain where the connection breaks or stalls, then too."""
    import httpx

    try:
        async with client.stream("GET", address, headers=headers) as response:
            yield response
    except httpx.UnsupportedProtocol:  # a redirect to no web address: it would be the same another time
        raise
    except httpx.TransportError as problem:
        reason = f"the connection to {host_of(address)} broke ({error_text(problem)})"
        raise TryAgain(Offline(reason, AGAIN)) from problem


class _Transfer:
    """One file on its way."""

    def __init__(
        self,
        file: WebFile,
        incoming: Incoming,
        client: "httpx.AsyncClient",
        tell: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._file, self._incoming, self._client, self._tell, self._say = file, incoming, client, tell, say
        self._validator = ""  # the ETag of what has arrived
        self._ranges_ignored = 0  # in a row

    async def complete(self) -> None:
        """Go on until the right bytes are there. Raises IntegrityError when they were wrong twice."""
        try:
            await self._all_bytes()
        except IntegrityError as problem:
            self._say(f"{self._file.name}: {problem.message}. Fetching it once more.")
            self._incoming.restart()
            await self._all_bytes()

    async def _all_bytes(self) -> None:
        incoming = self._incoming
        while incoming.received < incoming.size:
            await retry(self._attempt, self._say, amount=lambda: incoming.received)
        incoming.check()

    async def _attempt(self) -> None:
        before = self._incoming.received
        if before == self._incoming.size:
            return  # the connection broke behind the last byte
        async with open_response(self._client, self._file.address, self._headers()) as response:
            self._file.check(response)
            self._find_position(response)
            await self._read(response)
        if self._incoming.received == before:
            raise TryAgain(Offline(f"{host_of(self._file.address)} sent nothing of {self._file.name}", AGAIN))

    async def _read(self, response: "httpx.Response") -> None:
        """Raises TryAgain for an answer that crawls: another machine behind the same name may be faster."""
        since, had = time.monotonic(), self._incoming.received
        async for chunk in response.aiter_raw():
            self._incoming.write(chunk)
            self._tell()
            now, has = time.monotonic(), self._incoming.received
            if now - since >= _WINDOW:
                if has - had < _CRAWL and has < self._incoming.size:
                    raise TryAgain(Offline(f"{host_of(self._file.address)} sends next to nothing", AGAIN))
                since, had = now, has

    def _headers(self) -> dict[str, str]:
        """A part is asked for only if it is of the file that the parts before are of."""
        headers = dict(self._file.headers)
        if self._incoming.received:
            headers["Range"] = f"bytes={self._incoming.received}-"
            if self._validator:
                headers["If-Range"] = self._validator
        return headers

    def _find_position(self, response: "httpx.Response") -> None:
        """Where the answer goes on: behind what there is, or at the beginning. Raises IntegrityError for all else."""
        incoming, etag = self._incoming, response.headers.get("ETag", "")
        if response.status_code == HTTPStatus.PARTIAL_CONTENT:
            found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if not found or int(found["begin"]) != incoming.received or found["size"] not in ("*", str(incoming.size)):
                raise IntegrityError("another part of the file arrived than was asked for")
            self._ranges_ignored = 0
        else:
            self._check_whole(response, same=etag == self._validator)
            incoming.restart()
        self._validator = etag if etag.startswith('"') else ""  # a weak one says nothing of bytes

    def _check_whole(self, response: "httpx.Response", *, same: bool) -> None:
        """Raises TryAgain for the first answer that sends the same file anew where a part was asked for: of the
        machines behind one name, another one may know ranges."""
        if response.headers.get("Content-Length", str(self._incoming.size)) != str(self._incoming.size):
            size = response.headers["Content-Length"]
            raise IntegrityError(f"the file has {size} bytes instead of {self._incoming.size}")
        if self._incoming.received and (same or not self._validator):
            self._ranges_ignored += 1
            if self._ranges_ignored == 1:
                raise TryAgain(Offline(f"{host_of(self._file.address)} sends no parts of files", AGAIN))


def host_of(address: str) -> str:
    """The host's name, for people; without the user name and password that an address can carry."""
    return urlsplit(address).hostname or ""


def error_text(problem: Exception) -> str:
    """What went wrong, for people."""
    return re.sub(r"^\[Errno -?\d+\] ", "", str(problem)) or type(problem).__name__
