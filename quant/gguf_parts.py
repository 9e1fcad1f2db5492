"""The parts of a split GGUF model as one set of tensors. A single file is one part.

The parts are named `NAME-00001-of-0000N.gguf` and so on, and the path of any part opens all of them. The other paths
are derived from that name, never read from a file. The `split.no` (from 0), `split.count`, and `split.tensors.count` of
every part must agree with the names. Source: llama.cpp's gguf-split, and the `gguf` package's writer.
`engine.checkpoints.gguf` opens these files as a model's checkpoint.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from quant.errors import DAMAGED, ModelFileError, printable
from quant.gguf import GGUFFile, GGUFTensor, MetadataValue
from quant.tensor_file import TensorFiles

MAX_PARTS = 1000  # the largest models are split into several hundred parts

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


class GGUFParts(TensorFiles[GGUFTensor]):
    """The tensors of all parts of the file at `path`.

    Links are followed, because the caller chose the path, which also determines the paths of the other parts. Raises
    `GGUFError` if a file is malformed, and `ModelFileError` if one is missing or cannot be opened, or if the parts do
    not fit together.
    """

    path: Path  # the file, or the first part
    metadata: Mapping[str, MetadataValue]  # metadata of the first part, which describes the model
    header_digest: str  # SHA-256 over the parts' digests, in hex; for a single file its digest

    def __init__(self, path: str | os.PathLike[str]) -> None:
        paths = part_paths(Path(path))
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(GGUFFile(part)) for part in paths]
            _check_numbers(files)
            self.path, self.metadata = paths[0], files[0].metadata
            self.header_digest = _digest(files)
            super().__init__(_owners(files), opened)


def part_paths(path: Path) -> list[Path]:
    """Return all files of the checkpoint that `path` belongs to, in order. Raises ModelFileError if one is missing.

    Only names are checked here; GGUFParts checks that the contents agree with them.
    """
    name = _PART.fullmatch(path.name)
    if name is None:
        return [path]
    number, count = int(name["number"]), int(name["count"])
    if not 1 <= number <= count <= MAX_PARTS:
        raise ModelFileError(
            f"{path} has the name of part {number} of {count}", f"A model can have 1 to {MAX_PARTS} parts."
        )
    parts = [path.with_name(f"{name['stem']}-{i:05d}-of-{count:05d}{name['suffix']}") for i in range(1, count + 1)]
    missing = [part for part in parts if part != path and not part.exists()]
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelFileError(
            f"{missing[0]} is missing{more}: the model is in {count} parts",
            "Pull the model again, or put all of its parts into one folder.",
        )
    return parts


def _check_numbers(files: Sequence[GGUFFile]) -> None:
    """Check that each part has the number in its name and belongs to the same split. A single file needs no split
    fields.
    """
    if len(files) == 1 and files[0].metadata.get(_COUNT, 1) == 1:
        return
    total = sum(len(file.tensors) for file in files)
    for number, file in enumerate(files):
        for key, expected in ((_COUNT, len(files)), (_NUMBER, number), (_TENSORS, total)):
            value = file.metadata.get(key)
            if type(value) is not int or value != expected:
                shown = "missing" if value is None else printable(repr(value))
                raise ModelFileError(
                    f"{file.path}: {key} is {shown}, but the file names and the number of parts require {expected}",
                    "Restore the original names of the parts, or pull the model again.",
                )


def _owners(files: Sequence[GGUFFile]) -> dict[str, GGUFFile]:
    """Return the part that holds each tensor."""
    owners: dict[str, GGUFFile] = {}
    for file in files:
        if twice := owners.keys() & file.tensors.keys():
            name = min(twice)
            raise ModelFileError(
                f"{file.path}: {owners[name].path.name} also has the tensor {printable(name)}", DAMAGED
            )
        owners.update(dict.fromkeys(file.tensors, file))
    return owners


def _digest(files: Sequence[GGUFFile]) -> str:
    if len(files) == 1:
        return files[0].header_digest
    return hashlib.sha256("".join(f"{file.header_digest}\n" for file in files).encode()).hexdigest()
