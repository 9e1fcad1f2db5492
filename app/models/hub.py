"""Requests to the Hugging Face Hub, or a mirror of it, and the errors that its answers stand for.

The token is sent to the Hub's own host alone, and only over a connection that keeps it secret.
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

_UNKNOWN_LOGIN = "ingle: unknown login"  # a code of ours: the Hub says nothing then

# What the Hub says in X-Error-Code, in words for people.
_REFUSALS: Mapping[str, str] = {
    "GatedRepo": "{repo} is gated: accept its licence at {page}, then log in with `hf auth login` or set HF_TOKEN",
    "RepoNotFound": "{repo} does not exist on the Hub, or is private: check the name, or log in with `hf auth login`",
    "RevisionNotFound": "{repo} has no revision {revision}",
    "EntryNotFound": "{repo} has no file {file}",
    _UNKNOWN_LOGIN: "the Hub does not know the access token (HF_TOKEN, or that of `hf auth login`): log in again",
}


def fetch(source: HubSource, incoming: Incoming, progress: Progress, settings: Settings) -> None:
    """Write the file to `incoming`. Raises Offline if the Hub cannot be reached, AppError if it refuses."""
    check_reachable(settings.hub_endpoint)
    file = web_file(source, incoming.digest, lambda: nullcontext(incoming), settings)
    download_files([file], f"Downloading {source.file} from {host(settings)}", incoming.size, progress)


def web_file(
    source: HubSource, digest: str, receiving: Callable[[], AbstractContextManager[Incoming]], settings: Settings
) -> WebFile:
    """The file with this digest, as something that can be fetched."""

    def check(response: "httpx.Response") -> None:
        check_response(response, settings, repo=source.repo, revision=source.revision, file=source.file)
        _check_identity(response, digest, source.file)

    return WebFile(source.file, settings.hub_endpoint + resolve_path(source), headers_for(settings), receiving, check)


def resolve_path(source: HubSource) -> str:
    """Where a file is, below the Hub's address."""
    return f"/{source.repo}/resolve/{source.revision}/{quote(source.file)}"


def get(path: str, repo: str, limit: int, settings: Settings, progress: Progress) -> bytes:
    """The Hub's answer to a question about a repository, of at most `limit` bytes.

    Raises Offline if the Hub cannot be reached, AppError if it refuses or says more than that.
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
                    raise AppError(f"the Hub's answer about {repo} has more than {limit} bytes")
        return bytes(raw)

    return asyncio.run(retry(attempt, progress.say, waits=SHORT_WAITS))


def check_response(
    response: "httpx.Response", settings: Settings, *, repo: str, revision: str = "", file: str = ""
) -> None:
    """Raises TryAgain for a Hub in trouble, IntegrityError for a file without the part asked for, else AppError."""
    status = response.status_code
    if response.is_success:
        return
    if is_busy(status):
        wait = retry_after(response.headers)
        asks = f", and asks to be left alone for {wait:.0f} s" if wait else ""
        trouble = Offline(f"{host(settings)} is busy or in trouble (it answered {status}{asks})", AGAIN)
        raise TryAgain(trouble, wait)
    if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        raise IntegrityError(f"the Hub's {file} is shorter than promised")
    code = response.headers.get("X-Error-Code", "")
    if status == HTTPStatus.UNAUTHORIZED and not code and settings.hub_token:
        code = _UNKNOWN_LOGIN
    refusal = _REFUSALS.get(code, "the Hub refused {repo} (it answered {status})")
    page = f"https://huggingface.co/{repo}"
    raise AppError(refusal.format(repo=repo, revision=revision, file=file, page=page, status=status))


def _check_identity(response: "httpx.Response", digest: str, file: str) -> None:
    """The Hub names a large file's sha256 before it sends on to where the bytes are. Raises TryAgain for another."""
    for step in (*response.history, response):
        named = step.headers.get("X-Linked-Etag", "").removeprefix("W/").strip('"')
        if named and named != digest:
            raise TryAgain(IntegrityError(f"the Hub's {file} is another file now: sha256 {named} instead of {digest}"))


def host(settings: Settings) -> str:
    """The Hub's host name, for people."""
    return host_of(settings.hub_endpoint)


def headers_for(settings: Settings) -> dict[str, str]:
    """What a request to the Hub carries besides its address."""
    if settings.hub_token and _keeps_secrets(settings.hub_endpoint):
        return {"Authorization": f"Bearer {settings.hub_token}"}
    return {}


def _keeps_secrets(address: str) -> bool:
    """Whether a token may travel there: encrypted, or without leaving this machine."""
    parts = urlsplit(address)
    if parts.scheme == "https" or parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False
