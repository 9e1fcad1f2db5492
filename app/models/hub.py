"""Requests to the Hugging Face Hub, or a mirror of it, and the errors for its responses.

The token is sent to the Hub's own host only, and only over a secure connection.
"""

import asyncio
import ipaddress
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from app.errors import AppError, IntegrityError, Offline
from app.models.catalog import HubSource
from app.models.reachability import check_reachable
from app.models.transfer.attempts import SHORT_WAITS, TryAgain, is_busy, retry, retry_after
from app.models.transfer.incoming import Incoming
from app.models.transfer.transfer import AGAIN, WebFile, download_files, host_of, open_response, web_client
from app.progress import Progress
from app.settings.settings import Settings

if TYPE_CHECKING:
    import httpx

_UNKNOWN_LOGIN = "ingle: unknown login"  # code for a rejected token: the Hub sends none

# Value of the header X-Error-Code -> error message.
_REFUSALS: Mapping[str, str] = {
    "GatedRepo": "{repo} is gated: accept its license at {page}, then log in with `hf auth login` or set HF_TOKEN",
    "RepoNotFound": "{repo} does not exist on the Hub, or is private: check the name, or log in with `hf auth login`",
    "RevisionNotFound": "{repo} has no revision {revision}",
    "EntryNotFound": "{repo} has no file {file}",
    _UNKNOWN_LOGIN: "the Hub rejects the access token (HF_TOKEN, or that of `hf auth login`): log in again",
}


def fetch(source: HubSource, incoming: Incoming, progress: Progress, settings: Settings) -> None:
    """Write the file to `incoming`. Raises Offline if the Hub cannot be reached, AppError if the Hub refuses the
    request.
    """
    check_reachable(settings.hub_endpoint)
    file = web_file(source, incoming.digest, lambda: nullcontext(incoming), settings)
    download_files([file], f"Downloading {source.file} from {host(settings)}", incoming.size, progress)


def web_file(
    source: HubSource, digest: str, receiving: Callable[[], AbstractContextManager[Incoming]], settings: Settings
) -> WebFile:
    """Return the file with this digest as a WebFile, which can be downloaded."""

    def check(response: "httpx.Response") -> None:
        check_response(response, settings, repo=source.repo, revision=source.revision, file=source.file)
        _check_identity(response, digest, source.file)

    return WebFile(source.file, settings.hub_endpoint + resolve_path(source), headers_for(settings), receiving, check)


def resolve_path(source: HubSource) -> str:
    """Return the path of a file, relative to the Hub's URL."""
    return f"/{source.repo}/resolve/{source.revision}/{quote(source.file)}"


def get(path: str, repo: str, limit: int, settings: Settings, progress: Progress) -> bytes:
    """Return the Hub's response about a repository, of at most `limit` bytes.

    Raises Offline if the Hub cannot be reached, AppError if it refuses or the response is longer.
    """

    async def attempt() -> bytes:
        raw = bytearray()
        async with (
            web_client() as client,
            open_response(client, settings.hub_endpoint + path, headers_for(settings)) as reply,
        ):
            check_response(reply, settings, repo=repo)
            async for chunk in reply.aiter_bytes():
                raw += chunk
                if len(raw) > limit:
                    raise AppError(f"the Hub's response about {repo} has more than {limit} bytes")
        return bytes(raw)

    return asyncio.run(retry(attempt, progress.say, waits=SHORT_WAITS))


def check_response(
    response: "httpx.Response", settings: Settings, *, repo: str, revision: str = "", file: str = ""
) -> None:
    """Raise TryAgain if the Hub is busy, IntegrityError if the file lacks the requested part, or AppError for other
    errors.
    """
    status = response.status_code
    if response.is_success:
        return
    if is_busy(status):
        wait = retry_after(response.headers)
        asks = f", and asks to wait {wait:.0f} s" if wait else ""
        reason = Offline(f"{host(settings)} is unavailable (it returned status {status}{asks})", AGAIN)
        raise TryAgain(reason, wait)
    if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        raise IntegrityError(f"{file} on the Hub is shorter than expected")
    code = response.headers.get("X-Error-Code", "")
    if status == HTTPStatus.UNAUTHORIZED and not code and settings.hub_token:
        code = _UNKNOWN_LOGIN
    refusal = _REFUSALS.get(code, "the Hub refused access to {repo} (it returned status {status})")
    page = f"https://huggingface.co/{repo}"
    raise AppError(refusal.format(repo=repo, revision=revision, file=file, page=page, status=status))


def _check_identity(response: "httpx.Response", digest: str, file: str) -> None:
    """Raise TryAgain if the digest differs. The Hub names a large file's sha256 before it redirects to the bytes."""
    for step in (*response.history, response):
        named = step.headers.get("X-Linked-Etag", "").removeprefix("W/").strip('"')
        if named and named != digest:
            raise TryAgain(IntegrityError(f"{file} on the Hub has changed: sha256 {named} instead of {digest}"))


def host(settings: Settings) -> str:
    """Return the Hub's host name, for messages."""
    return host_of(settings.hub_endpoint)


def headers_for(settings: Settings) -> dict[str, str]:
    """Return the headers of a request to the Hub."""
    if settings.hub_token and _keeps_secrets(settings.hub_endpoint):
        return {"Authorization": f"Bearer {settings.hub_token}"}
    return {}


def _keeps_secrets(address: str) -> bool:
    """Whether a token can be sent to an address: over an encrypted connection, or within this machine."""
    parts = urlsplit(address)
    if parts.scheme == "https" or parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False
