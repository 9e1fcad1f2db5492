"""Write the safetensors files of a checkpoint, tensor by tensor.

The header precedes the data and lists the offset of each tensor, which is known only at the end. So space is reserved
for it, and padded with blanks, as the format allows. A file ends when the next tensor would exceed the requested size
of the file or the reserved size of its header. Files have temporary names until all are written. Then they get the
names that the Hugging Face Hub expects: one file, or numbered shards and, last, an index.

Tensors whose size is not a multiple of eight bytes are written at the end of their file, larger elements first. So
every tensor is aligned to the size of its elements, which readers that map files rely on.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from quant.safetensors import LENGTH_BYTES, METADATA, SAFETENSORS_TYPES
from quant.safetensors_shards import INDEX, SINGLE_FILE, WEIGHT_MAP

HEADER_BYTES = 1 << 18  # enough for about 1,700 tensors
ALIGNMENT = 8
SHARD_BYTES = 5_000_000_000  # size that the Hub recommends
FORMAT = {"format": "pt"}  # transformers rejects files without it


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write, as bytes. `type_name` is a type of the format."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    @property
    def nbytes(self) -> int:
        return memoryview(self.data).nbytes


class SafetensorsWriter:
    """Writes safetensors files to `folder`, which must exist.

    Tensors are added in the body of a `with`; if it raises, all files are removed. Raises OSError if the disk cannot be
    written, ValueError for a second tensor of the same name.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.written: list[Path] = []  # the files under their final names; complete after the body of the `with`
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._shards: list[_Shard] = []
        self._names: set[str] = set()

    def add(self, entry: Entry) -> None:
        if entry.name in self._names or entry.name == METADATA:
            raise ValueError(f"a second tensor {entry.name}")
        if not self._shards or not self._shards[-1].has_room(entry, self._shard_bytes):
            if self._shards:
                self._shards[-1].finish()
            self._shards.append(_Shard(self._folder / f"{len(self._shards) + 1:05}.safetensors.partial"))
        self._shards[-1].add(entry)
        self._names.add(entry.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except BaseException:
            for path in self.written:
                path.unlink(missing_ok=True)
            raise
        finally:
            for shard in self._shards:
                shard.clear()

    def _finish(self) -> None:
        if self._shards:
            self._shards[-1].finish()
        count = len(self._shards)
        for number, shard in enumerate(self._shards, 1):
            name = SINGLE_FILE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            self.written.append(shard.path.replace(self._folder / name))
        if count > 1:
            self._write_index()

    def _write_index(self) -> None:
        shards = zip(self.written, self._shards, strict=True)
        names = {name: path.name for path, shard in shards for name in shard.header}
        index = {"metadata": {"total_size": sum(shard.size for shard in self._shards)}, WEIGHT_MAP: names}
        partial = self._folder / f"{INDEX}.partial"
        try:
            with partial.open("w", encoding="utf-8") as file:
                json.dump(index, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            self.written.append(partial.replace(self._folder / INDEX))
        finally:
            partial.unlink(missing_ok=True)


@dataclass(slots=True)
class _Shard:
    """One file under its temporary name."""

    path: Path
    header: dict[str, dict[str, object]] = field(default_factory=dict)
    size: int = 0  # bytes of data, including tensors that are not written yet
    _at: int = 0  # bytes of data already written to the file
    _text_size: int = len(json.dumps({METADATA: FORMAT}))
    _waiting: list[Entry] = field(default_factory=list)
    _file: BinaryIO | None = None

    def has_room(self, entry: Entry, most: int) -> bool:
        return self.size + entry.nbytes <= most and self._text_size + _text_size(entry) <= HEADER_BYTES

    def add(self, entry: Entry) -> None:
        self.size += entry.nbytes
        self._text_size += _text_size(entry)
        if entry.nbytes % ALIGNMENT:
            self._waiting.append(entry)
        else:
            self._write(entry)

    def finish(self) -> None:
        """Write the remaining tensors and the header, and sync the file to disk."""
        for entry in sorted(self._waiting, key=lambda entry: -SAFETENSORS_TYPES[entry.type_name].bits):
            self._write(entry)
        self._waiting.clear()
        file = self._open()
        text = json.dumps({METADATA: FORMAT} | self.header, separators=(",", ":")).encode()
        file.seek(0)
        file.write(HEADER_BYTES.to_bytes(LENGTH_BYTES, "little") + text.ljust(HEADER_BYTES))
        file.flush()
        os.fsync(file.fileno())
        file.close()

    def clear(self) -> None:
        """Remove the file, unless it has its final name."""
        if self._file is not None:
            with suppress(OSError):  # a full disk can refuse buffered data; `finish` has closed a complete file
                self._file.close()
        self.path.unlink(missing_ok=True)

    def _write(self, entry: Entry) -> None:
        self._open().write(entry.data)
        self.header[entry.name] = _described(entry, self._at)
        self._at += entry.nbytes

    def _open(self) -> BinaryIO:
        if self._file is None:
            self._file = self.path.open("wb")
            self._file.seek(LENGTH_BYTES + HEADER_BYTES)
        return self._file


def _described(entry: Entry, begin: int) -> dict[str, object]:
    return {"dtype": entry.type_name, "shape": entry.shape, "data_offsets": (begin, begin + entry.nbytes)}


def _text_size(entry: Entry) -> int:
    """Return an upper limit for the bytes that a tensor takes in the header."""
    return len(json.dumps({entry.name: _described(entry, 1 << 62)}))
