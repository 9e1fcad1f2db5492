"""The root folder of the disk tier: which model has which sub-folder, what is in each, and how to be rid of it.

A sub-folder is named by the engine's fingerprint of everything that keys and values depend on. Beside the files of a
`DiskStore` it holds `about.json`, which says in plain words what they are of, for people alone: nothing depends on it.
Only what is named as our own files are is counted or deleted, so that a root folder that holds other things keeps them.
Safe beside processes that read and write: they find less.
"""

import contextlib
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from engine.config import BLOCK_SIZE
from engine.kv.disk.quota import CachedFile, automatic_limit, cached_files
from engine.kv.disk.segment_file import (
    SUFFIX,
    UNFINISHED,
    BadSegment,
    dir_entries,
    open_segment,
    read_head,
    segment_name,
    segment_of,
    shard_name,
    subfolders,
    verify,
)
from engine.private_folder import private_folder

ABOUT = "about.json"
MIN_PREFIX = 4  # characters of a fingerprint that stand for it

_NAME_DIGITS = 32  # of the fingerprint, in hex
_FOLDER_NAME = re.compile(rf"[0-9a-f]{{{_NAME_DIGITS}}}")
_SHARD_NAME = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class About:
    """What the files of a sub-folder are of. What is not known is empty."""

    model: str = ""  # what people call it
    sha256: str = ""  # of the model file, in hex
    backend: str = ""
    kv_type: str = ""
    made: str = ""  # when the sub-folder was, ISO 8601 in UTC


@dataclass(frozen=True, slots=True)
class CachedModel:
    """What is kept of one model, as computed by one backend with one KV type."""

    folder: Path
    about: About
    files: int
    size: int  # bytes
    blocks: int  # in files that can be read
    tokens: int
    used: int  # ns of Unix time when any of it was used last; 0: there is none

    @property
    def fingerprint(self) -> str:
        """Its first digits, by which the sub-folder is named."""
        return self.folder.name


@dataclass(frozen=True, slots=True)
class ClearResult:
    """What `clear` did."""

    freed: int = 0  # bytes
    left: int = 0  # files that could not be deleted

    def __add__(self, other: "ClearResult") -> "ClearResult":
        return ClearResult(self.freed + other.freed, self.left + other.left)


def model_folder(root: Path, fingerprint: bytes, about: About) -> Path:
    """The sub-folder of an engine fingerprint, created for its user alone, and told what it is about.

    Where it cannot be written, it is named all the same: whoever stores blocks there tells of it.
    """
    folder = root / fingerprint.hex()[:_NAME_DIGITS]
    with contextlib.suppress(OSError):
        private_folder(folder)
        before = _read_about(folder)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        about = replace(about, made=before.made or now)
        if about != before:
            _write_about(folder, about)
    return folder


def cached_models(root: Path) -> list[CachedModel]:
    """All models of which something is kept, the last used first. Reads the head of every file."""
    models = [_cached_model(folder) for folder in subfolders(root, _FOLDER_NAME)]
    return sorted((model for model in models if model.files), key=lambda model: model.used, reverse=True)


def find_cached_models(models: Sequence[CachedModel], name: str, sha256: str = "") -> list[CachedModel]:
    """Those of a model by its name, or by the digest of its file if one is given, else those whose fingerprints begin
    with the name."""
    by_name = [model for model in models if model.about.model == name or model.about.sha256 == (sha256 or None)]
    prefix = name.lower()
    return by_name or [model for model in models if len(name) >= MIN_PREFIX and model.fingerprint.startswith(prefix)]


def resolve_limit(root: Path, limit: int | None, kept: int) -> int:
    """Bytes that the files of all models may take: `limit`, or what is chosen while so many are kept."""
    if limit is not None:
        return limit
    existing = next(path for path in (root, *root.parents) if path.exists())
    return automatic_limit(shutil.disk_usage(existing).free, kept)


def segment_files(root: Path) -> list[CachedFile]:
    """The run files of all models."""
    return [file for file in cached_files(root) if _FOLDER_NAME.fullmatch(file.path.parent.parent.name)]


def find_damage(path: Path) -> str:
    """What is wrong with a run file or with where it lies; empty where nothing is, or it is gone. Reads all of it."""
    problem = verify(path) or _misplaced(path)
    return problem if os.path.lexists(path) else ""


def clear(folder: Path) -> ClearResult:
    """Delete all blocks of a sub-folder. What it is about stays: a process that runs may go on writing there."""
    done = ClearResult()
    for shard in subfolders(folder, _SHARD_NAME):
        for entry in dir_entries(shard):
            if entry.name.endswith((SUFFIX, UNFINISHED)):
                done += delete(Path(entry.path))
        with contextlib.suppress(OSError):
            shard.rmdir()
    return done


def delete(path: Path) -> ClearResult:
    """Delete a file, or try to."""
    try:
        size = path.lstat().st_size
        path.unlink()
    except FileNotFoundError:
        return ClearResult()
    except OSError:
        return ClearResult(left=1)
    return ClearResult(freed=size)


def _cached_model(folder: Path) -> CachedModel:
    files, size, used = 0, 0, 0
    blocks: Counter[int] = Counter()  # by KV group
    for shard in subfolders(folder, _SHARD_NAME):
        for entry in dir_entries(shard):
            if entry.name.endswith(SUFFIX):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    files, size, used = files + 1, size + status.st_size, max(used, status.st_mtime_ns)
                with contextlib.suppress(OSError, BadSegment), open_segment(Path(entry.path)) as file:
                    head = read_head(file)
                    blocks[head.header.group] += len(head.entries)
    # A token has a block of every group.
    tokens = BLOCK_SIZE * max(blocks.values(), default=0)
    return CachedModel(folder, _read_about(folder), files, size, blocks.total(), tokens, used)


def _misplaced(path: Path) -> str:
    try:
        with open_segment(path) as file:
            header = read_head(file).header
    except (BadSegment, OSError) as problem:
        return str(problem)
    if header.fingerprint.hex()[:_NAME_DIGITS] != path.parent.parent.name:
        return "it is of another model"
    segment = segment_name(header.group, header.first_key)
    is_right = segment_of(path.name) == segment and path.parent.name == shard_name(segment)
    return "" if is_right else "it is of another segment"


def _read_about(folder: Path) -> About:
    """Whatever of it makes sense."""
    try:
        content = json.loads((folder / ABOUT).read_bytes())
    except (OSError, ValueError):
        return About()
    fields = content.items() if isinstance(content, dict) else ()
    return About(**{name: text for name, text in fields if name in About.__slots__ and isinstance(text, str)})


def _write_about(folder: Path, about: About) -> None:
    unfinished = folder / f"{ABOUT}.{os.getpid()}{UNFINISHED}"
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
            json.dump(asdict(about), file, indent=2)
        os.replace(unfinished, folder / ABOUT)
    finally:
        unfinished.unlink(missing_ok=True)
