"""Read the headers of a model on the Hub: megabytes of files that have gigabytes.

They are written to files in a temporary folder. Each file is as long as the original, with zeros after its header,
except for small tensors that describe how layers are quantized. Code that opens a stored model can therefore open these
files in the same way. The same bounds-checked parsers read them. Their digest cannot be verified, because it covers the
whole file, so they are never kept or loaded.
"""

import asyncio
import tempfile
from collections.abc import Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import IntegrityError
from app.models import hub
from app.models.hub_cache import ListedFile
from app.models.hub_listing import Listing, list_repository
from app.models.reachability import check_reachable
from app.models.repository import CONFIG, ModelFiles, RepositoryName, choose, models_among
from app.models.transfer.attempts import SHORT_WAITS, TryAgain, retry
from app.models.transfer.transfer import MAX_PARALLEL, open_response, web_client
from app.progress import Progress
from app.settings.settings import Settings
from quant.checkpoint_files import MAX_BYTES
from quant.errors import GGUFError, InglenookError, ModelFileError
from quant.gguf import MAX_HEADER_BYTES as MOST_GGUF
from quant.gguf import GGUFFile
from quant.safetensors import LENGTH_BYTES, SafetensorsFile
from quant.safetensors import MAX_HEADER_BYTES as MOST_SAFETENSORS
from quant.safetensors_shards import INDEX, SINGLE_FILE, read_index

if TYPE_CHECKING:
    import httpx

_FIRST_BYTES = 1 << 20  # bytes of the first request; most headers are shorter, except those of large vocabularies
_SMALL_BYTES = 1 << 16  # a tensor of at most this number of bytes is downloaded whole
_GROWTH = 4  # growth factor of the next request if the first bytes are not the whole header


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model of the Hub, according to its headers."""

    name: RepositoryName  # name that includes the chosen quantization
    path: Path  # a GGUF file, the first part of one, or a folder
    size: int  # bytes of its complete files
    license: str
    choices: dict[str, int]  # GGUF models of the repository: quantization -> bytes


@contextmanager
def remote_headers(name: RepositoryName, settings: Settings, progress: Progress) -> Iterator[RemoteModel]:
    """Yield the headers of the model with this name.

    Raises Offline, AppError if the Hub refuses, ModelNotFound, ModelFileError, or IntegrityError if the Hub sends bytes
    other than the requested ones.
    """
    with progress.task(f"Reading the headers of {name.repo} from {hub.host(settings)}", None):
        check_reachable(settings.hub_endpoint)
        listing = list_repository(name.repo, settings, progress)
        model = choose(name, listing.files)
        with tempfile.TemporaryDirectory(prefix="ingle-headers-", ignore_cleanup_errors=True) as folder:
            weights = asyncio.run(_fetch(model, listing, Path(folder), settings, progress))
            yield RemoteModel(
                RepositoryName(name.repo, model.quantization or None),
                Path(folder, model.files[0]) if model.is_gguf else Path(folder),
                sum(listing.files[file].size for file in {*model.files, *weights} - {INDEX}),
                listing.license,
                choices_of(listing),
            )


def choices_of(listing: Listing) -> dict[str, int]:
    """Return the size in bytes of each complete GGUF model of a repository, by quantization, the largest first."""
    models = [model for model in models_among(listing.files) if model.is_gguf and model.is_whole and model.quantization]
    sizes = {model.quantization: sum(listing.files[file].size for file in model.files) for model in models}
    return dict(sorted(sizes.items(), key=lambda choice: -choice[1]))


async def _fetch(
    model: ModelFiles, listing: Listing, folder: Path, settings: Settings, progress: Progress
) -> Sequence[str]:
    """Download the headers of a model's weights, and its configuration. Returns the names of the weight files."""
    async with web_client() as client:

        def parts_of(file: str) -> _GrowingFile:
            return _GrowingFile(client, listing.files[file], folder / file, settings, progress)

        if model.is_gguf:
            await _run_all([parts_of(file).gguf_header() for file in model.files])
            return model.files
        await parts_of(CONFIG).whole()
        if SINGLE_FILE in model.files:
            weights = [SINGLE_FILE]
        else:
            await parts_of(INDEX).whole()
            weights = sorted(read_index(folder / INDEX))
            if missing := [file for file in weights if file not in listing.files]:
                raise IntegrityError(f"{INDEX} names {missing[0]}, which the repository does not have")
        parts = [parts_of(file) for file in weights]
        await _run_all([part.safetensors_header() for part in parts])
        if layers := await asyncio.to_thread(_sampled_layers, folder):
            await _run_all([part.small_tensors(layers) for part in parts])
        return weights


def _sampled_layers(folder: Path) -> set[str]:
    """Return the name of one layer for each kind of quantization; empty if the folder cannot be opened."""
    from engine.checkpoints.weights import smallest_matrices
    from engine.loading import open_checkpoint  # imported late: it imports torch, which a search does not need
    from engine.models import stored_weights

    with suppress(InglenookError), open_checkpoint(folder) as checkpoint:
        return {weight.name for weight in smallest_matrices(stored_weights(checkpoint)).values()}
    return set()


async def _run_all(reads: Sequence[Coroutine[None, None, None]]) -> None:
    """Run the reads, of which only a limited number runs at a time."""
    slots = asyncio.Semaphore(MAX_PARALLEL)

    async def read(one: Coroutine[None, None, None]) -> None:
        async with slots:
            await one

    await asyncio.gather(*map(read, reads))


def _spans(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the byte ranges. Ranges that are close together are merged."""
    spans: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if spans and begin - spans[-1][1] <= _SMALL_BYTES:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        elif begin < end:
            spans.append((begin, end))
    return spans


class _GrowingFile:
    """A file of the Hub whose first bytes are written to `path`."""

    def __init__(
        self, client: "httpx.AsyncClient", file: ListedFile, path: Path, settings: Settings, progress: Progress
    ) -> None:
        self._client, self._file, self._path, self._settings, self._say = client, file, path, settings, progress.say
        self._num_read = 0  # bytes written so far

    async def whole(self) -> None:
        if self._file.size > MAX_BYTES:
            raise ModelFileError(
                f"{self._file.source.file} has {self._file.size} bytes, more than the limit of {MAX_BYTES}"
            )
        await self._grow(self._file.size)

    async def gguf_header(self) -> None:
        """Download the header. Raises GGUFError, also for a header that never ends."""
        most, wanted = min(MOST_GGUF, self._file.size), _FIRST_BYTES
        while True:
            await self._grow(min(wanted, most))
            try:
                with GGUFFile(self._path) as file:
                    data_start = min((tensor.offset for tensor in file.tensors.values()), default=0)
            except GGUFError:
                if self._num_read == most:
                    raise
            else:
                if data_start <= self._num_read or self._num_read == most:
                    return
            wanted *= _GROWTH

    async def safetensors_header(self) -> None:
        """Download the header. Raises SafetensorsError."""
        await self._grow(min(_FIRST_BYTES, self._file.size))
        with self._path.open("rb") as file:
            length = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
        await self._grow(min(length, LENGTH_BYTES + MOST_SAFETENSORS, self._file.size))

    async def small_tensors(self, layers: Collection[str]) -> None:
        """Download the small tensors of these layers that describe the quantization, such as shapes."""
        with SafetensorsFile(self._path) as file:
            small = [tensor for tensor in file.tensors.values() if tensor.nbytes <= _SMALL_BYTES]
        wanted = [tensor for tensor in small if any(tensor.name.startswith(f"{layer}.") for layer in layers)]
        for begin, end in _spans((it.offset, it.offset + it.nbytes) for it in wanted):
            content = await retry(partial(self._read, begin, end), self._say, waits=SHORT_WAITS)
            with self._path.open("r+b") as opened:
                opened.seek(begin)
                opened.write(content)

    async def _grow(self, end: int) -> None:
        """Download the first `end` bytes, into a file of the full length."""
        if self._num_read >= end:
            return
        more = await retry(lambda: self._read(self._num_read, end), self._say, waits=SHORT_WAITS)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("r+b" if self._num_read else "wb") as file:
            file.seek(self._num_read)
            file.write(more)
            file.truncate(self._file.size)
        self._num_read = end

    async def _read(self, begin: int, end: int) -> bytes:
        """Return a range of bytes of the file.

        If the server does not support ranges, read from the start, up to `end`.
        """
        source = self._file.source
        address = f"{self._settings.hub_endpoint}{hub.resolve_path(source)}"
        headers = {**hub.headers_for(self._settings), "Range": f"bytes={begin}-{end - 1}"}
        async with open_response(self._client, address, headers) as reply:
            hub.check_response(reply, self._settings, repo=source.repo, revision=source.revision, file=source.file)
            skipped = 0
            if reply.status_code == HTTPStatus.PARTIAL_CONTENT:
                if not reply.headers.get("Content-Range", "").startswith(f"bytes {begin}-"):
                    raise IntegrityError(f"the Hub sent a different part of {source.file} than requested")
                skipped = begin
            content = bytearray()
            async for chunk in reply.aiter_raw():
                content += chunk
                if len(content) >= end - skipped:
                    break
        part = bytes(content[begin - skipped : end - skipped])
        if len(part) != end - begin:
            raise TryAgain(IntegrityError(f"{source.file} on the Hub ends too early"))
        return part
