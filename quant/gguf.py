"""A bounds-checked reader for GGUF files, versions 2 and 3, little endian.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file is untrusted: every length, count,
dimension, alignment, and offset is checked as a Python int, which cannot overflow, before anything is allocated or
viewed. A malformed file raises `GGUFError`, and nothing else; the error names the field and its offset.
"""

import array
import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quant.errors import GGUFError, printable
from quant.ggml_types import GGMLType, ggml_types
from quant.string_array import LENGTH_BYTES, StringArray
from quant.tensor_file import TensorFile

MetadataValue = int | float | bool | str | tuple[int, ...] | tuple[float, ...] | tuple[bool, ...] | StringArray

MAGIC = b"GGUF"
VERSIONS = (2, 3)

# The largest real headers (a 262k vocabulary with merges) take about 15 MB. A parsed header takes at most eight times
# its bytes, for an array of small numbers, so that a forged one stays under 600 MB.
MAX_HEADER_BYTES = 64 << 20
USUAL_HEADER_BYTES = 16 << 20  # of which a file is read at first
MAX_STRING_BYTES = 16 << 20
MAX_KEY_BYTES = 1 << 16
MAX_NAME_BYTES = 256
MAX_METADATA_ENTRIES = 1 << 16
MAX_TENSORS = 1 << 17
MAX_ARRAY_ELEMENTS = 1 << 24
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

# Metadata value types: id -> struct code of one little-endian element.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Position of one tensor. `shape` is row-major (a file lists it innermost first); `offset` counts from byte 0."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GGUFFile(TensorFile[GGUFTensor]):
    """An open GGUF file: parsed header, and tensors that can be read.

    Raises `GGUFError` if the file is malformed, `ModelFileError` if it is not a regular file or cannot be opened.
    """

    version: int
    metadata: Mapping[str, MetadataValue]
    header_digest: str  # sha256 of the header's bytes and the file's length, in hex

    def _check_size(self, size: int) -> None:
        if size < len(MAGIC):
            raise GGUFError(self.path, f"the file ends after {size} bytes", field="magic", offset=0)

    def _read_header(self, size: int) -> None:
        try:
            header = _Header(self.path, self._start(min(size, USUAL_HEADER_BYTES)), size)
        except _Cut:
            header = _Header(self.path, self._start(min(size, MAX_HEADER_BYTES)), size)
        self.version, self.metadata, self.tensors = header.version, header.metadata, header.tensors
        self.header_digest = header.digest()

    def _start(self, size: int) -> bytes:
        return bytes(self.read_range(0, size))


class _Cut(Exception):
    """The header is longer than the bytes that were read."""


class _Header:
    """Reads a header in one pass from front to back. Every read names its field."""

    def __init__(self, path: Path, data: bytes, size: int) -> None:
        """Read the header in `data`, the first bytes of a file of `size` bytes. Raises _Cut if it needs more bytes."""
        self._path = path
        self._data = data
        self._at = 0
        self._size = size
        self._limit = len(data)
        self.version = self._read_version()
        tensor_count = self._count("tensor count", MAX_TENSORS, smallest=24)
        entry_count = self._count("metadata count", MAX_METADATA_ENTRIES, smallest=13)
        self.metadata = self._read_metadata(entry_count)
        self._alignment = self._read_alignment()
        self.tensors = self._read_tensors(tensor_count)

    def digest(self) -> str:
        return hashlib.sha256(self._data[: self._at] + self._size.to_bytes(8, "little")).hexdigest()

    def _error(self, problem: str, *, field: str, offset: int) -> GGUFError:
        return GGUFError(self._path, problem, field=field, offset=offset)

    # -- reading of single values

    def _take(self, nbytes: int, field: str) -> int:
        """Move past `nbytes` bytes and return their start."""
        start = self._at
        if nbytes > self._limit - start:
            self._check_cut()
            bound = "the file ends" if self._limit == self._size else f"the header exceeds {MAX_HEADER_BYTES} bytes"
            raise self._error(f"{nbytes} bytes are required, but {bound}", field=field, offset=start)
        self._at = start + nbytes
        return start

    def _check_cut(self) -> None:
        if self._limit < min(self._size, MAX_HEADER_BYTES):
            raise _Cut

    def _number(self, code: str, field: str) -> int:
        layout = "<" + code
        value: int = struct.unpack_from(layout, self._data, self._take(struct.calcsize(layout), field))[0]
        return value

    def _count(self, field: str, most: int, *, smallest: int) -> int:
        """Read a 64-bit count of items that take at least `smallest` bytes each."""
        start = self._at
        count = self._number("Q", field)
        if count > most:
            raise self._error(f"{count} is over the limit of {most}", field=field, offset=start)
        if count * smallest > self._limit - self._at:
            self._check_cut()
            raise self._error(f"{count} is more than the rest of the file can hold", field=field, offset=start)
        return count

    def _string(self, field: str, most: int = MAX_STRING_BYTES) -> str:
        start = self._at
        length = self._number("Q", f"length of {field}")
        if length > most:
            raise self._error(f"a string of {length} bytes is over the limit of {most}", field=field, offset=start)
        begin = self._take(length, field)
        try:
            return str(self._data[begin : begin + length], "utf-8")
        except UnicodeDecodeError as error:
            raise self._error("the text is not UTF-8", field=field, offset=begin + error.start) from None

    # -- sections

    def _read_version(self) -> int:
        if self._data[: len(MAGIC)] != MAGIC:
            raise self._error(f"the file starts with {self._data[:4]!r}, not {MAGIC!r}", field="magic", offset=0)
        self._at = len(MAGIC)
        version = self._number("I", "version")
        if version not in VERSIONS:
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            problem = "the file is big endian" if big_endian else f"version {version} is neither 2 nor 3"
            remedy = "Use a little-endian GGUF of version 2 or 3; llama.cpp's converter writes one."
            raise GGUFError(self._path, problem, field="version", offset=4, remedy=remedy)
        return version

    def _read_metadata(self, count: int) -> dict[str, MetadataValue]:
        metadata: dict[str, MetadataValue] = {}
        for index in range(count):
            start = self._at
            key = self._string(f"key of metadata entry {index}", MAX_KEY_BYTES)
            if key in metadata:
                raise self._error(f"{key!r} appears twice", field=f"key of metadata entry {index}", offset=start)
            field = printable(key)
            metadata[key] = self._value(self._number("I", f"type of {field}"), field)
        return metadata

    def _value(self, kind: int, field: str) -> MetadataValue:
        if kind == _STRING:
            return self._string(field)
        if kind == _ARRAY:
            return self._array(field)
        return self._scalars(kind, 1, field)[0]

    def _scalars(self, kind: int, count: int, field: str) -> tuple[int, ...] | tuple[float, ...] | tuple[bool, ...]:
        if kind not in _SCALARS:
            raise self._error(f"unknown value type {kind}", field=field, offset=self._at)
        layout = f"<{count}{_SCALARS[kind]}"
        start = self._take(struct.calcsize(layout), field)
        values: tuple[int, ...] = struct.unpack_from(layout, self._data, start)
        if kind != _BOOL:
            return values
        if any(value > 1 for value in values):
            raise self._error("a boolean is neither 0 nor 1", field=field, offset=start)
        return tuple(value == 1 for value in values)

    def _array(self, field: str) -> MetadataValue:
        start = self._at
        kind = self._number("I", f"element type of {field}")
        if kind == _ARRAY:
            raise self._error("an array of arrays is not supported", field=field, offset=start)
        smallest = LENGTH_BYTES if kind == _STRING else struct.calcsize(_SCALARS.get(kind, "B"))
        count = self._count(f"length of {field}", MAX_ARRAY_ELEMENTS, smallest=smallest)
        return self._strings(count, field) if kind == _STRING else self._scalars(kind, count, field)

    def _strings(self, count: int, field: str) -> StringArray:
        """Read and check strings. This is the hot loop of opening a file: a vocabulary and its merges are 100,000 to a
        million strings.
        """
        data, start, limit = self._data, self._at, self._limit
        at, ends = start, array.array("q", [0])
        from_bytes = int.from_bytes
        for index in range(count):
            begin = at + LENGTH_BYTES
            length = from_bytes(data[at:begin], "little")
            at = begin + length
            if at > limit or length > MAX_STRING_BYTES:
                self._at = begin - LENGTH_BYTES
                self._string(f"{field}[{index}]")  # raises the error: it reads the same bytes again
            try:
                str(data[begin:at], "utf-8")
            except UnicodeDecodeError as error:
                raise self._error(
                    "the text is not UTF-8", field=f"{field}[{index}]", offset=begin + error.start
                ) from None
            ends.append(at - start)
        self._at = at
        return StringArray(data[start:at], ends)

    def _read_alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._error(f"{alignment!r} is not a power of two", field="general.alignment", offset=self._at)
        return alignment

    def _read_tensors(self, count: int) -> dict[str, GGUFTensor]:
        """Read all tensors. Their offsets count from the end of the header, which is known only after the last one is
        read.
        """
        found: list[tuple[GGUFTensor, int]] = []
        names: set[str] = set()
        for index in range(count):
            start = self._at
            tensor = self._read_tensor(index)
            if tensor.name in names:
                raise self._error(f"{tensor.name!r} appears twice", field=f"name of tensor {index}", offset=start)
            names.add(tensor.name)
            found.append((tensor, start))
        return self._locate(found, -(-self._at // self._alignment) * self._alignment)

    def _read_tensor(self, index: int) -> GGUFTensor:
        name = self._string(f"name of tensor {index}", MAX_NAME_BYTES)
        field = printable(name)
        at = self._at
        dimensions = self._number("I", f"dimension count of {field}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._error(
                f"{dimensions} dimensions, not 1 to {MAX_DIMENSIONS}", field=f"dimension count of {field}", offset=at
            )
        extents = [self._number("Q", f"dimension {axis} of {field}") for axis in range(dimensions)]
        kind_at = self._at
        number = self._number("I", f"type of {field}")
        kind = ggml_types().get(number)
        if kind is None:
            raise self._error(f"unknown tensor type {number}", field=f"type of {field}", offset=kind_at)
        nbytes = self._tensor_bytes(field, kind, extents, at)
        return GGUFTensor(name, kind, tuple(reversed(extents)), self._number("Q", f"offset of {field}"), nbytes)

    def _tensor_bytes(self, name: str, kind: GGMLType, extents: list[int], at: int) -> int:
        elements = 1
        for extent in extents:
            elements *= extent
            if not 0 < elements < 1 << 60:
                raise self._error(f"the shape {extents} is empty or too large", field=f"shape of {name}", offset=at)
        if extents[0] % kind.block_elements:
            raise self._error(
                f"rows of {extents[0]} elements do not divide into blocks of {kind.block_elements} ({kind.name})",
                field=f"shape of {name}",
                offset=at,
            )
        return kind.nbytes(elements)

    def _locate(self, found: list[tuple[GGUFTensor, int]], data_start: int) -> dict[str, GGUFTensor]:
        """Check offsets against each other and the file's length, and make them absolute."""
        end, previous = data_start, "the header"
        located: dict[str, GGUFTensor] = {}
        for tensor, at in sorted(found, key=lambda item: item[0].offset):
            start, field = data_start + tensor.offset, f"offset of {printable(tensor.name)}"
            if tensor.offset % self._alignment:
                raise self._error(f"{tensor.offset} is not aligned to {self._alignment}", field=field, offset=at)
            if start + tensor.nbytes > self._size:
                raise self._error(
                    f"its {tensor.nbytes} bytes at {start} extend past the end of the file ({self._size} bytes)",
                    field=field,
                    offset=at,
                )
            if start < end:
                raise self._error(f"its bytes at {start} overlap {previous}", field=field, offset=at)
            end, previous = start + tensor.nbytes, printable(tensor.name)
            located[tensor.name] = GGUFTensor(tensor.name, tensor.type, tensor.shape, start, tensor.nbytes)
        return {tensor.name: located[tensor.name] for tensor, _ in found}
