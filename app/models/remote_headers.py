"""The headers of a model that is not on this machine, fetched by parts: some megabytes of a file of many gigabytes.

They come into files of a folder that is removed again, each as long as the one it stands for and empty behind its
header, but for what says how layers are quantized: so whoever opens a stored model opens these in the same way. What
arrives is checked by the same bounded readers; its digest cannot be, since a digest is of a whole file: nothing here is
ever kept or loaded.
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

_FIRST = 1 << 20  # bytes that are asked for first; most headers but those of large vocabularies are shorter
_SMALL = 1 << 16  # bytes of a tensor that is read whole
_MORE = 4  # times as many in all, where they were too few


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model of the Hub, as far as its headers tell."""

    name: RepositoryName  # with the quantization that was chosen
    path: Path  # of a GGUF file, the first part of one, or a folder
    size: int  # bytes of its files, whole
    license: str
    choices: dict[str, int]  # the GGUF models of the repository: bytes of each, by quantization


@contextmanager
def remote_headers(name: RepositoryName, settings: Settings, progress: Progress) -> Iterator[RemoteModel]:
    """The headers of the model that a name means, while the body runs.

    Raises Offline, AppError where the Hub refuses, ModelNotFound, ModelFileError, or IntegrityError for other parts
    than were asked for.
    """
    with progress.task(f"Asking {hub.host(settings)} for {name.repo}", None):
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
    """Bytes of each whole GGUF model of a repository, by its quantization, the largest first."""
    models = [model for model in models_among(listing.files) if model.is_gguf and model.is_whole and model.quantization]
    sizes = {model.quantization: sum(listing.files[file].size for file in model.files) for model in models}
    return dict(sorted(sizes.items(), key=lambda choice: -choice[1]))


async def _fetch(
    model: ModelFiles, listing: Listing, folder: Path, settings: Settings, progress: Progress
) -> Sequence[str]:
    """The headers of a model's weights, and its configuration. Returns the names of the files of weights."""
    async with web_client() as client:

        def parts_of(file: str) -> _GrowingFile:
            return _GrowingFile(client, listing.files[file], folder / file, settings, progress)

        if model.is_gguf:
            await _together([parts_of(file).gguf_header() for file in model.files])
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
        await _together([part.safetensors_header() for part in parts])
        if layers := await asyncio.to_thread(_sampled_layers, folder):
            await _together([part.small_tensors(layers) for part in parts])
        return weights


def _sampled_layers(folder: Path) -> set[str]:
    """The layers of which samples are taken, one of each kind of quantization; of what cannot be opened, none."""
    from engine.checkpoints.weights import smallest_matrices
    from engine.loading import open_checkpoint  # and torch with it, which a search has no use for
    from engine.models import stored_weights

    with suppress(InglenookError), open_checkpoint(folder) as checkpoint:
        return {weight.name for weight in smallest_matrices(stored_weights(checkpoint)).values()}
    return set()


async def _together(reads: Sequence[Coroutine[None, None, None]]) -> None:
    """A few at a time."""
    slots = asyncio.Semaphore(MAX_PARALLEL)

    async def read(one: Coroutine[None, None, None]) -> None:
        async with slots:
            await one

    await asyncio.gather(*map(read, reads))


def _spans(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of bytes, those near each other as one."""
    spans: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if spans and begin - spans[-1][1] <= _SMALL:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        elif begin < end:
            spans.append((begin, end))
    return spans


class _GrowingFile:
    """One file of the Hub, of which the beginning comes to `path`."""

    def __init__(
        self, client: "httpx.AsyncClient", file: ListedFile, path: Path, settings: Settings, progress: Progress
    ) -> None:
        self._client, self._file, self._path, self._settings, self._say = client, file, path, settings, progress.say
        self._there = 0  # bytes

    async def whole(self) -> None:
        if self._file.size > MAX_BYTES:
            raise ModelFileError(f"{self._file.source.file} has {self._file.size} bytes, over the bound of {MAX_BYTES}")
        await self._grow(self._file.size)

    async def gguf_header(self) -> None:
        """Raises GGUFError, for a header that does not end, too."""
        most, wanted = min(MOST_GGUF, self._file.size), _FIRST
        while True:
            await self._grow(min(wanted, most))
            try:
                with GGUFFile(self._path) as file:
                    data_start = min((tensor.offset for tensor in file.tensors.values()), default=0)
            except GGUFError:
                if self._there == most:
                    raise
            else:
                if data_start <= self._there or self._there == most:
                    return
            wanted *= _MORE

    async def safetensors_header(self) -> None:
        """Raises SafetensorsError."""
        await self._grow(min(_FIRST, self._file.size))
        with self._path.open("rb") as file:
            length = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
        await self._grow(min(length, LENGTH_BYTES + MOST_SAFETENSORS, self._file.size))

    async def small_tensors(self, layers: Collection[str]) -> None:
        """What beside the weights of these layers says of their form, such as a shape or an order of columns."""
        with SafetensorsFile(self._path) as file:
            small = [tensor for tensor in file.tensors.values() if tensor.nbytes <= _SMALL]
        wanted = [tensor for tensor in small if any(tensor.name.startswith(f"{layer}.") for layer in layers)]
        for begin, end in _spans((it.offset, it.offset + it.nbytes) for it in wanted):
            content = await retry(partial(self._read, begin, end), self._say, waits=SHORT_WAITS)
            with self._path.open("r+b") as opened:
                opened.seek(begin)
                opened.write(content)

    async def _grow(self, end: int) -> None:
        """Have the first `end` bytes, in a file as long as the whole."""
        if self._there >= end:
            return
        more = await retry(lambda: self._read(self._there, end), self._say, waits=SHORT_WAITS)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("r+b" if self._there else "wb") as file:
            file.seek(self._there)
            file.write(more)
            file.truncate(self._file.size)
        self._there = end

    async def _read(self, begin: int, end: int) -> bytes:
        """Some bytes of the file. One that sends no parts is read from its beginning, and no further than `end`."""
        source = self._file.source
        address = f"{self._settings.hub_endpoint}{hub.resolve_path(source)}"
        headers = {**hub.headers_for(self._settings), "Range": f"bytes={begin}-{end - 1}"}
        async with open_response(self._client, address, headers) as reply:
            hub.check_response(reply, self._settings, repo=source.repo, revision=source.revision, file=source.file)
            skipped = 0
            if reply.status_code == HTTPStatus.PARTIAL_CONTENT:
                if not reply.headers.get("Content-Range", "").startswith(f"bytes {begin}-"):
                    raise IntegrityError(f"another part of {source.file} arrived than was asked for")
                skipped = begin
            content = bytearray()
            async for chunk in reply.aiter_raw():
                content += chunk
                if len(content) >= end - skipped:
                    break
        part = bytes(content[begin - skipped : end - skipped])
        if len(part) != end - begin:
            raise TryAgain(IntegrityError(f"the Hub's {source.file} ends before it should"))
        return part
