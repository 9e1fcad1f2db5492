"""Fetch a file from the Hugging Face Hub, or from a mirror of it.

One request over httpx, straight into `Incoming`, which verifies it; what an interrupted download has left is not asked
for again (ranges: RFC 9110, section 14). Where the file ends up is no concern of this module. httpx takes a tenth of a
second to import, and most runs find their model stored, so it is imported late.
"""

import ipaddress
import queue
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from app.config import Settings
from app.errors import AppError, IntegrityError, Offline
from app.models.catalog import HubSource
from app.models.incoming import Incoming
from app.progress import Progress

if TYPE_CHECKING:
    import httpx

AGAIN = "Check the network and try again: what has arrived is kept. Or give the path of a model that you have."
PATIENCE = 3.0  # seconds until a Hub that says nothing counts as unreachable
STALL = 30.0  # seconds without a byte in the middle of a download
_RANGE = re.compile(r"bytes (?P<begin>\d{1,20})-\d+/(?P<size>\d+|\*)")

# What the Hub says in X-Error-Code, in words for people.
_REFUSALS: Mapping[str, str] = {
    "GatedRepo": "{repo} is gated: accept its licence at {page}, then log in with `hf auth login` or set HF_TOKEN",
    "RepoNotFound": "{repo} does not exist on the Hub, or is private: check the name, or log in with `hf auth login`",
    "RevisionNotFound": "{repo} has no revision {revision}",
    "EntryNotFound": "{repo} has no file {file}",
}


def fetch(source: HubSource, incoming: Incoming, progress: Progress, settings: Settings) -> None:
    """Write the file to `incoming`. Raises Offline if the Hub cannot be reached, AppError if it refuses."""
    check_reachable(settings)
    download(source, incoming, progress, settings)


def download(source: HubSource, incoming: Incoming, progress: Progress, settings: Settings) -> None:
    """The same, from a Hub that has just answered."""
    incoming.resume(f"Checking what is there of {source.file}", progress)
    if incoming.received == incoming.size:
        return
    path = f"/{source.repo}/resolve/{source.revision}/{quote(source.file)}"
    words = {"revision": source.revision, "file": source.file}
    with asking(path, source.repo, settings, begin=incoming.received, **words) as response:
        _find_place(response, incoming)
        with progress.task(f"Downloading {source.file} from {host(settings)}", incoming.size) as report:
            for chunk in response.iter_raw():
                incoming.write(chunk)
                report(incoming.received)


def _find_place(response: "httpx.Response", incoming: Incoming) -> None:
    """Where the answer goes on: behind what there is, or at the beginning. Raises IntegrityError for anything else."""
    if response.status_code != HTTPStatus.PARTIAL_CONTENT:
        incoming.restart()  # it knows no ranges, and sends the whole file
        return
    found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if not found or int(found["begin"]) != incoming.received or found["size"] not in ("*", str(incoming.size)):
        raise IntegrityError("another part of the file arrived than was asked for")


@contextmanager
def asking(
    path: str, repo: str, settings: Settings, *, begin: int = 0, revision: str = "", file: str = ""
) -> Iterator["httpx.Response"]:
    """The Hub's answer to one question, from byte `begin` on if the Hub can do that, not read yet.

    `repo`, `revision` and `file` are for the words of a refusal. Raises Offline if the Hub cannot be reached, or the
    connection breaks in the body; IntegrityError where `begin` is behind the end; AppError if it refuses.
    """
    import httpx

    timeout = httpx.Timeout(STALL, connect=PATIENCE)
    wanted = {"Range": f"bytes={begin}-"} if begin else {}
    try:
        # httpx drops the Authorization header when a redirect leaves the host.
        with (
            httpx.Client(headers=_headers(settings), timeout=timeout, follow_redirects=True) as client,
            client.stream("GET", settings.hub_endpoint + path, headers=wanted) as response,
        ):
            _check_answer(response, repo, revision, file, settings)
            yield response
    except httpx.HTTPError as problem:
        raise Offline(f"the connection to {host(settings)} broke ({_words(problem)})", AGAIN) from problem


def check_reachable(settings: Settings) -> None:
    """Raise Offline unless the Hub answers anything at all within PATIENCE seconds.

    The limit holds for everything together. A connect timeout alone would not do: it counts anew for each address of
    the host, and not at all while the name is looked up. Hence the thread, which is left to itself when time is up.
    """
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_knock(settings)), daemon=True).start()
    try:
        problem = answers.get(timeout=PATIENCE)
    except queue.Empty:
        problem = f"no answer within {PATIENCE:.0f} s"
    if problem:
        raise Offline(f"{host(settings)} cannot be reached ({problem})", AGAIN)


def _knock(settings: Settings) -> str:
    """Ask the Hub for anything. Returns what went wrong, or nothing."""
    import httpx

    try:
        httpx.head(settings.hub_endpoint, timeout=PATIENCE)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ImportError, ValueError) as problem:  # incl. proxy settings
        return _words(problem)
    return ""


def host(settings: Settings) -> str:
    """The Hub's host name, for people; without the user name and password that an address can carry."""
    return urlsplit(settings.hub_endpoint).hostname or ""


def _headers(settings: Settings) -> dict[str, str]:
    headers = {"User-Agent": "inglenook", "Accept-Encoding": "identity"}
    if settings.hub_token and _keeps_secrets(settings.hub_endpoint):
        headers["Authorization"] = f"Bearer {settings.hub_token}"
    return headers


def _keeps_secrets(address: str) -> bool:
    """Whether a token may travel there: encrypted, or without leaving this machine."""
    parts = urlsplit(address)
    if parts.scheme == "https" or parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False


def _check_answer(response: "httpx.Response", repo: str, revision: str, file: str, settings: Settings) -> None:
    """Raises Offline for a Hub in trouble, IntegrityError for a file without the part asked for, AppError otherwise."""
    if response.is_success:
        return
    if response.status_code == 429 or response.is_server_error:
        raise Offline(f"{host(settings)} is busy or in trouble (it answered {response.status_code})", AGAIN)
    if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        raise IntegrityError(f"the Hub's {file} is shorter than promised")
    code = response.headers.get("X-Error-Code", "")
    fallback = "the Hub refused {repo} (it answered {status})"
    raise AppError(
        _REFUSALS.get(code, fallback).format(
            repo=repo,
            revision=revision,
            file=file,
            page=f"https://huggingface.co/{repo}",
            status=response.status_code,
        )
    )


def _words(problem: Exception) -> str:
    return re.sub(r"^\[Errno -?\d+\] ", "", str(problem)) or type(problem).__name__
