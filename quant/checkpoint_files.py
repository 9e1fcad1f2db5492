"""The small files beside the weights in a checkpoint's folder: configurations, vocabularies, templates.

Links are followed as for the weights (`quant.safetensors_shards.member`), and sizes are bounded.
"""

import os
from pathlib import Path

from quant.bounded_json import JSONProblem, parse_object
from quant.errors import DAMAGED, ModelFileError
from quant.mapped_file import regular_file
from quant.safetensors_shards import member

MAX_BYTES = 64 << 20  # the largest vocabulary in use takes 33 MB


def read_bytes(folder: Path, name: str) -> bytes | None:
    """The file's bytes; None where the folder has no such file. Raises ModelFileError."""
    if not os.path.lexists(folder / name):
        return None
    with regular_file(member(folder, name)) as (descriptor, size):
        if size > MAX_BYTES:
            raise ModelFileError(f"{folder / name} has {size} bytes, over the bound of {MAX_BYTES}", DAMAGED)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(size)


def read_text(folder: Path, name: str) -> str | None:
    """The file's text; None where the folder has no such file. Raises ModelFileError."""
    raw = read_bytes(folder, name)
    try:
        return None if raw is None else raw.decode()
    except UnicodeDecodeError:
        raise ModelFileError(f"{folder / name} is not UTF-8", DAMAGED) from None


def read_object(folder: Path, name: str) -> dict[str, object] | None:
    """The JSON object that the file is; None where the folder has no such file. Raises ModelFileError."""
    raw = read_bytes(folder, name)
    return None if raw is None else as_object(raw, folder / name)


def as_object(raw: bytes, path: Path) -> dict[str, object]:
    """The JSON object that the bytes of the file at `path` are. Raises ModelFileError."""
    try:
        return parse_object(raw)
    except JSONProblem as problem:
        raise ModelFileError(f"{path}: {problem}", DAMAGED) from None
