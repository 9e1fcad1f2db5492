"""Write safetensors files, well-formed or malformed."""

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors

Entry = dict[str, object]
Header = dict[str, object]


def entry(kind: str, shape: list[int], begin: int, end: int) -> Entry:
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


def file_bytes(header: Mapping[str, object] | str | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a file with this header; `length` overrides the stored length of the header."""
    text = json.dumps(header) if isinstance(header, Mapping) else header
    raw = text if isinstance(text, bytes) else text.encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def build(tensors: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a valid safetensors file. `tensors` has the type, shape, and bytes of each tensor."""
    header: Header = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        header[name] = entry(kind, shape, len(data), len(data) + len(raw))
        data += raw
    return file_bytes(header, data)


def read_by_the_package(data: bytes) -> dict[str, bytes]:
    """Read the tensors of a file with the `safetensors` package. Raises its SafetensorError."""
    tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    return {name: bytes(tensor["data"]) for name, tensor in tensors}


def small_file() -> bytes:
    """Return a file with metadata, a scalar, an empty tensor, several types, and a tensor of odd size."""
    return build(
        {
            "plain": ("F32", [2, 3], bytes(range(24))),
            "scale": ("BF16", [], b"\x80\x3f"),
            "none": ("F16", [0, 7], b""),
            "bytes": ("U8", [3], b"abc"),
            "packed": ("F4", [2, 3], b"\x12\x34\x56"),
            "eight": ("F8_E4M3", [4, 2], bytes(range(8))),
            "mångs": ("I64", [1, 1, 1, 2], bytes(16)),
        },
        {"format": "pt", "note": 'a "quoted" {text}'},
    )


def write_shards(folder: Path, shards: dict[str, dict[str, tuple[str, list[int], bytes]]]) -> None:
    """Write a sharded checkpoint and its index."""
    for shard, tensors in shards.items():
        (folder / shard).write_bytes(build(tensors))
    write_index(folder, {name: shard for shard, tensors in shards.items() for name in tensors})


def write_index(folder: Path, weight_map: object) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
