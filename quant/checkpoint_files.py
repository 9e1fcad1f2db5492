"""Read the small files in a checkpoint's folder: configurations, vocabularies, and templates.

Links are restricted as for weights (`quant.safetensors_shards.member`), and sizes are limited.
"""

import os
from pathlib import Path

from quant.bounded_json import JSONProblem, parse_object
from quant.errors import DAMAGED, ModelFileError
from quant.safetensors_shards import member
from quant.tensor_file import regular_file

MAX_BYTES = 64 << 20  # the largest vocabulary in use takes 33 MB


def read_bytes(folder: Path, name: str) -> bytes | None:
    """Return the file's bytes, or None if the folder has no such file. Raises ModelFileError."""
    if not os.path.lexists(folder / name):
        return None
    with regular_file(member(folder, name)) as (descriptor, size):
        if size > MAX_BYTES:
            raise ModelFileError(f"{folder / name} has {size} bytes, over the limit of {MAX_BYTES}", DAMAGED)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(size)


def read_text(folder: Path, name: str) -> str | None:
    """Return the file's text, or None if the folder has no such file. Raises ModelFileError."""
    raw = read_bytes(folder, name)
    try:
        return None if raw is None else raw.decode()
    except UnicodeDecodeError:
        raise ModelFileError(f"{folder / name} is not UTF-8", DAMAGED) from None


def read_object(folder: Path, name: str) -> dict[str, object] | None:
    """Return the JSON object in the file, or None if the folder has no such file. Raises ModelFileError."""
    raw = read_bytes(folder, name)
    return None if raw is None else as_object(raw, folder / name)


def as_object(raw: bytes, path: Path) -> dict[str, object]:
    """Parse the bytes of the file at `path` as a JSON object. Raises ModelFileError."""
    try:
        return parse_object(raw)
    except JSONProblem as problem:
        raise ModelFileError(f"{path}: {problem}", DAMAGED) from None
