"""Download a GGUF file from the address in its name."""

import asyncio
import re
from http import HTTPStatus
from typing import TYPE_CHECKING

from app.errors import AppError, IntegrityError, Offline
from app.models.reachability import check_reachable
from app.models.transfer.attempts import SHORT_WAITS, TryAgain, is_busy, retry, retry_after
from app.models.transfer.transfer import AGAIN, WebFile, download_files, host_of, open_response, web_client
from app.models.web_models import WebModels, WebName
from app.progress import Progress

if TYPE_CHECKING:
    import httpx


def download_from_web(name: WebName, models: WebModels, progress: Progress) -> None:
    """Download the file that a name refers to, or resume its partial download. The caller must hold the download turn.

    Raises Offline, NoSpace, IntegrityError, or AppError if the host refuses.
    """
    with progress.task(f"Reading the size of {name.file} from {host_of(name.address)}", None):
        check_reachable(name.address)
        size = asyncio.run(retry(lambda: _size(name), progress.say, waits=SHORT_WAITS))

    def check(response: "httpx.Response") -> None:
        _check_answer(response, name)

    file = WebFile(name.file, name.address, {}, lambda: models.receiving(name, size), check)
    download_files([file], f"Downloading {name.file} from {host_of(name.address)}", size, progress)


async def _size(name: WebName) -> int:
    """Return the size of the file in bytes, from the response to a request for its first byte."""
    async with web_client() as client, open_response(client, name.address, {"Range": "bytes=0-0"}) as response:
        _check_answer(response, name)
        whole = response.headers.get("Content-Range", "").rpartition("/")[2]
        text = (
            whole if response.status_code == HTTPStatus.PARTIAL_CONTENT else response.headers.get("Content-Length", "")
        )
    if not re.fullmatch(r"[1-9]\d{0,17}", text):
        raise AppError(
            f"{host_of(name.address)} does not state the size of {name.file}", "Download it with another program."
        )
    return int(text)


def _check_answer(response: "httpx.Response", name: WebName) -> None:
    """Raise TryAgain if the host is busy, IntegrityError if the file lacks the requested part, or AppError for other
    errors.
    """
    status, host = response.status_code, host_of(name.address)
    if response.is_success:
        return
    if is_busy(status):
        raise TryAgain(
            Offline(f"{host} is unavailable (it returned status {status})", AGAIN), retry_after(response.headers)
        )
    if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        raise IntegrityError(f"{name.file} is shorter than before")
    raise AppError(f"{host} refused {name.file} (it returned status {status})", "Check the address.")
