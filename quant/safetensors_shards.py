"""The shards of a safetensors checkpoint as one set of tensors; a single file is one shard.

The index of the shards, `model.safetensors.index.json`, maps under `weight_map` the name of each tensor to the file
that holds it. The index is as untrusted as the shards. A file name in it is a single component of letters, digits, and
`-._`, which names the same file on every system. The file is in the folder or, in a snapshot of the Hugging Face cache,
a link to a blob of the same repository. No other file is opened. `engine.checkpoints.safetensors` opens a folder as a
model's checkpoint.
"""

import contextlib
import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Set
from pathlib import Path

from quant.bounded_json import JSONProblem, parse_object
from quant.errors import ModelFileError, SafetensorsError, printable
from quant.safetensors import SafetensorsFile, SafetensorsTensor
from quant.tensor_file import TensorFiles, regular_file

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT_MAP = "weight_map"

# The largest published index has about 200,000 tensors, 20 MB, and 200 shards.
MAX_INDEX_BYTES = 64 << 20
MAX_SHARDS = 4096

_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")
_DEVICE = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)\.", re.IGNORECASE)  # names of devices on Windows, in any folder


class SafetensorsShards(TensorFiles[SafetensorsTensor]):
    """The tensors of all shards at `path`.

    `path` is a safetensors file or a folder. In a folder, `model.safetensors` is opened if it exists, otherwise the
    shards. A file that the caller names may be a link; in a folder, links are restricted as described above. Raises
    `SafetensorsError` if a file is malformed or the files do not fit together, and `ModelFileError` if there is no file
    or one cannot be opened.
    """

    header_digest: str  # SHA-256 over the names and digests of all shards, in hex; for a single file its digest

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with contextlib.ExitStack() as opened:
            files = _open(self.path, opened)
            self.header_digest = _digest(files)
            super().__init__({name: file for file in files.values() for name in file.tensors}, opened)


def _open(path: Path, opened: contextlib.ExitStack) -> dict[str, SafetensorsFile]:
    """Return the files by name, each registered with `opened` for closing."""
    if not os.path.isdir(path):
        return {path.name: opened.enter_context(SafetensorsFile(path))}
    if os.path.lexists(path / SINGLE_FILE):
        return {SINGLE_FILE: opened.enter_context(SafetensorsFile(member(path, SINGLE_FILE)))}
    if not os.path.lexists(path / INDEX):
        raise ModelFileError(
            f"{path} has neither {SINGLE_FILE} nor {INDEX}", "Pull the model again, or name another folder."
        )
    index = member(path, INDEX)
    files: dict[str, SafetensorsFile] = {}
    for shard, names in sorted(read_index(index).items()):
        _require(shard, index)
        files[shard] = opened.enter_context(SafetensorsFile(member(path, shard)))
        _compare(index, shard, names, files[shard].tensors.keys())
    return files


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder that hold its weights, without opening them, or [] if there are none.

    Raises SafetensorsError if the index is malformed or a shard is missing.
    """
    if os.path.lexists(folder / SINGLE_FILE):
        return [member(folder, SINGLE_FILE)]
    if not os.path.lexists(folder / INDEX):
        return []
    index = member(folder, INDEX)
    shards = sorted(read_index(index))
    for shard in shards:
        _require(shard, index)
    return [member(folder, shard) for shard in shards]


def _require(shard: str, index: Path) -> None:
    if not os.path.lexists(index.parent / shard):
        raise SafetensorsError(
            index, f"{shard} is missing", field=WEIGHT_MAP, remedy="The checkpoint is incomplete: pull it again."
        )


def read_index(path: Path) -> dict[str, set[str]]:
    """Return the names of the tensors of each shard."""
    with regular_file(path) as (descriptor, size):
        if size > MAX_INDEX_BYTES:
            raise SafetensorsError(path, f"{size} bytes are over the limit of {MAX_INDEX_BYTES}", field="index")
        with open(descriptor, "rb", closefd=False) as file:
            raw = file.read(size)
    try:
        weight_map = parse_object(raw).get(WEIGHT_MAP)
    except JSONProblem as problem:
        raise SafetensorsError(path, str(problem), field="index") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise SafetensorsError(path, "it does not map names of tensors to files", field=WEIGHT_MAP)
    shards: dict[str, set[str]] = defaultdict(set)
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard) or _DEVICE.match(shard):
            shown = printable(shard) if isinstance(shard, str) else "a value that is not a string"
            field = f"{WEIGHT_MAP}, {printable(name)}"
            raise SafetensorsError(path, f"{shown} is not a valid name for a shard", field=field)
        shards[shard].add(name)
        if len(shards) > MAX_SHARDS:
            raise SafetensorsError(path, f"more than {MAX_SHARDS} shards", field=WEIGHT_MAP)
    return shards


def _compare(index: Path, shard: str, mapped: set[str], held: Set[str]) -> None:
    """Check that the index and a shard list the same tensors."""
    if missing := mapped - held:
        field = f"{WEIGHT_MAP}, {printable(min(missing))}"
        raise SafetensorsError(index, f"{shard} has no such tensor", field=field)
    if surplus := held - mapped:
        field = f"{WEIGHT_MAP}, {printable(min(surplus))}"
        raise SafetensorsError(index, f"{shard} has the tensor, but the index does not list it", field=field)


def _digest(files: Mapping[str, SafetensorsFile]) -> str:
    digests = [file.header_digest for file in files.values()]
    if len(digests) == 1:
        return digests[0]
    lines = "".join(f"{name} {digest}\n" for name, digest in zip(files, digests, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def member(folder: Path, name: str) -> Path:
    """Return the path of `name` in a checkpoint's folder or in a subfolder. Raises SafetensorsError for a forbidden
    link.

    The Hugging Face cache keeps files as `blobs/DIGEST`, and links of the form `snapshots/REVISION/NAME` point to them.
    The folder itself may be a link, and so may a folder of blobs that was moved, since the user made those links.
    """
    path = folder / name
    for link in (path, *(folder / parent for parent in Path(name).parents[:-1])):
        if os.path.islink(link) and not _is_blob(link, folder):
            raise SafetensorsError(link, "it points outside of the checkpoint's folder", field="link")
    return path


def _is_blob(link: Path, folder: Path) -> bool:
    snapshots, _ = os.path.split(os.path.realpath(folder))
    repository, kind = os.path.split(snapshots)
    blobs = os.path.realpath(os.path.join(repository, "blobs"))
    return kind == "snapshots" and os.path.dirname(os.path.realpath(link)) == blobs
