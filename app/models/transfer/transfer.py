"""Download files from the web, several at once, until each is complete.

An attempt is one request, which writes directly to `Incoming`. If it breaks or stalls, another attempt requests the
rest (ranges and validators: RFC 9110, sections 13 and 14). A file that arrives damaged is downloaded once more, and
then fails. httpx takes 0.1 s to import, and usually the model is already stored, so it is imported late.
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

USE_FILE = "use a model file: --model PATH, or /load PATH in the chat"
CHECK_NETWORK = f"Check the network and try again, or {USE_FILE}."
AGAIN = f"Check the network and try again; the part that has arrived is kept. Or {USE_FILE}."
CONNECT = 10.0  # seconds until a connection is established
STALL = 30.0  # seconds without a byte
_WINDOW, _LEAST_BYTES = 30.0, 30_000  # a download counts as too slow if fewer bytes arrive in this many seconds
MAX_PARALLEL = 4  # files at the same time
_RANGE = re.compile(r"bytes (?P<begin>\d{1,20})-\d+/(?P<size>\d+|\*)")


@dataclass(frozen=True, slots=True)
class WebFile:
    """A file to download, and the Incoming that receives it."""

    name: str
    address: str
    headers: Mapping[str, str]  # Authorization is sent to the host of the address only
    receiving: Callable[[], AbstractContextManager[Incoming]]
    check: "Callable[[httpx.Response], None]"  # raises for a response that does not contain the file


def download_files(files: Sequence[WebFile], label: str, size: int, progress: Progress) -> None:
    """Download the files, which have `size` bytes together. Partial downloads are resumed.

    Raises Offline if a connection cannot be established or kept, IntegrityError for wrong bytes, NoSpace, and the
    errors of `check`. The other files then stay as they are.
    """
    with progress.task(label, size) as report:
        asyncio.run(_download_all(files, report, progress))


async def _download_all(files: Sequence[WebFile], report: Callable[[int], None], progress: Progress) -> None:
    slots = asyncio.Semaphore(MAX_PARALLEL)
    incomings: list[Incoming] = []

    def report_all() -> None:
        report(sum(incoming.received for incoming in incomings))

    async def receive(file: WebFile, client: "httpx.AsyncClient") -> None:
        async with slots:
            with file.receiving() as incoming:
                incomings.append(incoming)
                # If this is cancelled, the file is closed, which ends the thread's reading.
                await asyncio.to_thread(incoming.resume, report_all)
                await _Transfer(file, incoming, client, report_all, progress.say).complete()

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
    """Yield a client whose errors become TryAgain or Offline. It drops Authorization if a redirect leaves the host."""
    import httpx

    try:
        async with httpx.AsyncClient(
            headers={"User-Agent": "inglenook", "Accept-Encoding": "identity"},
            timeout=httpx.Timeout(STALL, connect=CONNECT),
            verify=tls(),
            follow_redirects=True,
        ) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL) as problem:  # broken connections have already been retried
        raise Offline(f"the response is invalid ({error_text(problem)})", AGAIN) from problem


@cache
def tls() -> "ssl.SSLContext":
    """Return the trusted certificates. Reading them takes 0.1 s, so it is done once."""
    import httpx

    return httpx.create_ssl_context()


@asynccontextmanager
async def open_response(
    client: "httpx.AsyncClient", address: str, headers: Mapping[str, str]
) -> "AsyncIterator[httpx.Response]":
    """Yield the unread response to a GET. Raises TryAgain if the connection breaks or stalls, also while the body
    reads.
    """
    import httpx

    try:
        async with client.stream("GET", address, headers=headers) as response:
            yield response
    except httpx.UnsupportedProtocol:  # a redirect to something other than a web address: a retry would not help
        raise
    except httpx.TransportError as problem:
        reason = f"the connection to {host_of(address)} was lost ({error_text(problem)})"
        raise TryAgain(Offline(reason, AGAIN)) from problem


class _Transfer:
    """The download of one file."""

    def __init__(
        self,
        file: WebFile,
        incoming: Incoming,
        client: "httpx.AsyncClient",
        report: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._file, self._incoming, self._client, self._report, self._say = file, incoming, client, report, say
        self._validator = ""  # ETag of the bytes that have arrived
        self._ranges_ignored = 0  # number of consecutive responses that ignored the range

    async def complete(self) -> None:
        """Repeat attempts until all bytes have arrived. Raises IntegrityError if they were wrong twice."""
        try:
            await self._all_bytes()
        except IntegrityError as problem:
            self._say(f"{self._file.name}: {problem.message}. Downloading it once more.")
            self._incoming.restart()
            await self._all_bytes()

    async def _all_bytes(self) -> None:
        incoming = self._incoming
        while incoming.received < incoming.size:
            await retry(self._attempt, self._say, amount=lambda: incoming.received)
        incoming.verify()

    async def _attempt(self) -> None:
        before = self._incoming.received
        if before == self._incoming.size:
            return  # the connection broke after the last byte
        async with open_response(self._client, self._file.address, self._headers()) as response:
            self._file.check(response)
            self._find_position(response)
            await self._read(response)
        if self._incoming.received == before:
            raise TryAgain(Offline(f"{host_of(self._file.address)} sent no data for {self._file.name}", AGAIN))

    async def _read(self, response: "httpx.Response") -> None:
        """Read the response. Raises TryAgain if it is too slow: another machine of the same host may be faster."""
        since, had = time.monotonic(), self._incoming.received
        async for chunk in response.aiter_raw():
            self._incoming.write(chunk)
            self._report()
            now, has = time.monotonic(), self._incoming.received
            if now - since >= _WINDOW:
                if has - had < _LEAST_BYTES and has < self._incoming.size:
                    raise TryAgain(Offline(f"{host_of(self._file.address)} is too slow", AGAIN))
                since, had = now, has

    def _headers(self) -> dict[str, str]:
        """Return the request headers. A range is requested only of the same version of the file."""
        headers = dict(self._file.headers)
        if self._incoming.received:
            headers["Range"] = f"bytes={self._incoming.received}-"
            if self._validator:
                headers["If-Range"] = self._validator
        return headers

    def _find_position(self, response: "httpx.Response") -> None:
        """Continue after the received bytes, or restart if the response has the whole file. Raises IntegrityError
        otherwise.
        """
        incoming, etag = self._incoming, response.headers.get("ETag", "")
        if response.status_code == HTTPStatus.PARTIAL_CONTENT:
            found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if not found or int(found["begin"]) != incoming.received or found["size"] not in ("*", str(incoming.size)):
                raise IntegrityError("the server sent a different part of the file than requested")
            self._ranges_ignored = 0
        else:
            self._check_whole(response, same=etag == self._validator)
            incoming.restart()
        self._validator = etag if etag.startswith('"') else ""  # a weak ETag does not identify the bytes

    def _check_whole(self, response: "httpx.Response", *, same: bool) -> None:
        """Raise TryAgain for the first response that sends the whole file instead of a part: another machine of the
        same host may support ranges.
        """
        if response.headers.get("Content-Length", str(self._incoming.size)) != str(self._incoming.size):
            size = response.headers["Content-Length"]
            raise IntegrityError(f"the file has {size} bytes instead of {self._incoming.size}")
        if self._incoming.received and (same or not self._validator):
            self._ranges_ignored += 1
            if self._ranges_ignored == 1:
                raise TryAgain(Offline(f"{host_of(self._file.address)} does not support ranges", AGAIN))


def host_of(address: str) -> str:
    """Return the host name of an address, without a user name and password."""
    return urlsplit(address).hostname or ""


def error_text(problem: Exception) -> str:
    """Return the message of an error, without its number."""
    return re.sub(r"^\[Errno -?\d+\] ", "", str(problem)) or type(problem).__name__
