"""Parse and check the header of a safetensors file, before any tensor is read. Also lists the storage types.

Format: https://huggingface.co/docs/safetensors. Types are tested against the `safetensors` package.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quant.bounded_json import JSONProblem, parse_object
from quant.errors import SafetensorsError, printable
from quant.tensor_file import TensorFile


@dataclass(frozen=True, slots=True)
class SafetensorsType:
    """One storage type. Elements of less than a byte are packed without gaps."""

    name: str
    bits: int


SAFETENSORS_TYPES: dict[str, SafetensorsType] = {
    name: SafetensorsType(name, bits)
    for bits, names in {
        4: ("F4",),
        6: ("F6_E2M3", "F6_E3M2"),
        8: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
        16: ("U16", "I16", "F16", "BF16"),
        32: ("U32", "I32", "F32"),
        64: ("U64", "I64", "F64", "C64"),
    }.items()
    for name in names
}


LENGTH_BYTES = 8

# The format allows headers of 100 MB; 131,072 tensors take about 15 MB.
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 1 << 17
MAX_NAME_CHARACTERS = 1024
MAX_DIMENSIONS = 8

METADATA = "__metadata__"
FIELDS = {"dtype", "shape", "data_offsets"}
_SURROGATE = re.compile("[\ud800-\udfff]")  # characters that JSON can escape and UTF-8 cannot encode


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """Position of one tensor. `shape` is row-major, empty for a scalar; `offset` counts from byte 0."""

    name: str
    type: SafetensorsType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile(TensorFile[SafetensorsTensor]):
    """An open safetensors file: parsed header, and tensors that can be read, in the header's order.

    Raises `SafetensorsError` if the file is malformed, `ModelFileError` if it is not a regular file or cannot be
    opened.
    """

    metadata: Mapping[str, str]
    header_digest: str  # sha256 of the header's bytes and the file's length, in hex

    def _check_size(self, size: int) -> None:
        if size < LENGTH_BYTES:
            raise SafetensorsError(self.path, f"the file ends after {size} bytes", field="header length")

    def _read_header(self, size: int) -> None:
        header = _Header(self.path, self.read_range, size)
        self.metadata, self.tensors, self.header_digest = header.metadata, header.tensors, header.digest


class _Header:
    """Reads and checks a header in one pass."""

    def __init__(self, path: Path, read: Callable[[int, int], memoryview], size: int) -> None:
        self._path = path
        self._size = size
        length = int.from_bytes(read(0, LENGTH_BYTES), "little")
        self._data_start = LENGTH_BYTES + length
        if self._data_start > self._size:
            raise self._error(f"{length} bytes extend past the end of the file ({self._size} bytes)", "header length")
        if length > MAX_HEADER_BYTES:
            raise self._error(f"{length} bytes are over the limit of {MAX_HEADER_BYTES}", "header length")
        raw = bytes(read(LENGTH_BYTES, self._data_start))
        digest = hashlib.sha256(raw)
        digest.update(self._size.to_bytes(LENGTH_BYTES, "little"))
        self.digest = digest.hexdigest()
        entries = self._parse(raw)
        self.metadata = self._read_metadata(entries.pop(METADATA, {}))
        if len(entries) > MAX_TENSORS:
            raise self._error(f"{len(entries)} tensors are over the limit of {MAX_TENSORS}", "header")
        self.tensors = {name: self._read_tensor(name, entry) for name, entry in entries.items()}
        self._check_cover()

    def _error(self, problem: str, field: str) -> SafetensorsError:
        return SafetensorsError(self._path, problem, field=field)

    def _parse(self, raw: bytes) -> dict[str, object]:
        if raw[:1] != b"{":
            raise self._error(f"it starts with {raw[:4]!r}, not with a brace", "header")
        try:
            return parse_object(raw)
        except JSONProblem as problem:
            raise self._error(str(problem), "header") from None

    def _read_metadata(self, entries: object) -> dict[str, str]:
        if not isinstance(entries, dict):
            raise self._error("it is not an object", METADATA)
        metadata: dict[str, str] = {}
        for key, value in entries.items():
            if not isinstance(value, str) or _SURROGATE.search(key + value):
                raise self._error("it is not a string of Unicode characters", f"{METADATA}, {printable(key)}")
            metadata[key] = value
        return metadata

    def _read_tensor(self, name: str, entry: object) -> SafetensorsTensor:
        """Read one tensor. This is the hot loop of opening a file, so messages are formatted only for errors."""
        if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
            problem = f"1 to {MAX_NAME_CHARACTERS} printable characters are required"
            raise self._error(problem, f"name {printable(name)}")
        if not isinstance(entry, dict) or entry.keys() != FIELDS:
            raise self._error("it is not an object of dtype, shape and data_offsets", printable(name))
        kind = entry["dtype"]
        if not isinstance(kind, str) or kind not in SAFETENSORS_TYPES:
            shown = printable(kind) if isinstance(kind, str) else "which is not a string"
            raise self._error(f"unknown type {shown}", f"dtype of {printable(name)}")
        shape = self._numbers(entry["shape"], "shape", name)
        offsets = self._numbers(entry["data_offsets"], "data_offsets", name)
        most = self._size - self._data_start
        if len(offsets) != 2 or not offsets[0] <= offsets[1] <= most:
            problem = f"a start and an end within {most} bytes are required"
            raise self._error(problem, f"data_offsets of {printable(name)}")
        begin, end = offsets
        self._check_size(name, SAFETENSORS_TYPES[kind], shape, end - begin)
        return SafetensorsTensor(name, SAFETENSORS_TYPES[kind], tuple(shape), self._data_start + begin, end - begin)

    def _numbers(self, values: object, what: str, name: str) -> list[int]:
        if not isinstance(values, list) or len(values) > MAX_DIMENSIONS:
            raise self._error(f"it is not a list of up to {MAX_DIMENSIONS} numbers", f"{what} of {printable(name)}")
        for value in values:
            if type(value) is not int or not 0 <= value < 1 << 63:
                raise self._error("a value is not an integer from 0 to 2^63 - 1", f"{what} of {printable(name)}")
        return values

    def _check_size(self, name: str, kind: SafetensorsType, shape: list[int], nbytes: int) -> None:
        bits = kind.bits * math.prod(shape)
        if bits != 8 * nbytes:
            raise self._error(
                f"{kind.name} of shape {shape} takes {bits / 8:g} bytes, and the offsets span {nbytes}",
                f"data_offsets of {printable(name)}",
            )

    def _check_cover(self) -> None:
        """Check that every byte after the header belongs to one tensor."""
        end, previous = self._data_start, "the header"
        for tensor in sorted(self.tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
            if tensor.offset != end:
                problem = "overlap" if tensor.offset < end else "leave a gap after"
                field = printable(tensor.name)
                raise self._error(f"its bytes at {tensor.offset} {problem} {previous}", f"data_offsets of {field}")
            end, previous = tensor.offset + tensor.nbytes, printable(tensor.name)
        if end != self._size:
            raise self._error(f"the tensors end at byte {end}, and the file at {self._size}", "header")
