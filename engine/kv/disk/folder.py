"""The root folder of the disk tier: maps models to subfolders, lists their contents, and deletes them.

A subfolder is named after the fingerprint of everything that keys and values depend on. Besides the files of a
`DiskStore` it contains `about.json`, a description for users that no code depends on. Only files with the names of this
cache are counted or deleted, so other files in the root folder are kept. All functions are safe while other processes
read and write; those processes merely find fewer blocks.
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
MIN_PREFIX = 4  # minimum number of fingerprint digits that identify a subfolder

_NAME_DIGITS = 32  # hex digits of the fingerprint in a folder name
_FOLDER_NAME = re.compile(rf"[0-9a-f]{{{_NAME_DIGITS}}}")
_SHARD_NAME = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class About:
    """The description of a subfolder, from `about.json`. Unknown fields are empty."""

    model: str = ""  # name shown to users
    sha256: str = ""  # digest of the model file, in hex
    backend: str = ""
    kv_type: str = ""
    made: str = ""  # creation time of the subfolder, in ISO 8601 and UTC


@dataclass(frozen=True, slots=True)
class CachedModel:
    """The cache of one model, computed by one backend with one KV type."""

    folder: Path
    about: About
    files: int
    size: int  # size of all files in bytes
    blocks: int  # number of blocks in readable files
    tokens: int
    used: int  # time of the last use, as Unix time in ns; 0: there are no files

    @property
    def fingerprint(self) -> str:
        """The leading hex digits of the fingerprint, which are the subfolder's name."""
        return self.folder.name


@dataclass(frozen=True, slots=True)
class ClearResult:
    """The result of `clear` and `delete`."""

    freed: int = 0  # freed bytes
    left: int = 0  # number of files that could not be deleted

    def __add__(self, other: "ClearResult") -> "ClearResult":
        return ClearResult(self.freed + other.freed, self.left + other.left)


def model_folder(root: Path, fingerprint: bytes, about: About) -> Path:
    """Return the subfolder of an engine fingerprint. Creates it with its description; only the user can access it.

    The path is returned even if it cannot be written. `DiskStore.prepare` logs the problem.
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
    """Return all cached models, the most recently used first. Reads the header and table of every file."""
    models = [_cached_model(folder) for folder in subfolders(root, _FOLDER_NAME)]
    return sorted((model for model in models if model.files), key=lambda model: model.used, reverse=True)


def find_cached_models(models: Sequence[CachedModel], name: str, sha256: str = "") -> list[CachedModel]:
    """Return the models with this name or file digest. If there are none, match `name` with the start of
    fingerprints.
    """
    by_name = [model for model in models if model.about.model == name or model.about.sha256 == (sha256 or None)]
    prefix = name.lower()
    return by_name or [model for model in models if len(name) >= MIN_PREFIX and model.fingerprint.startswith(prefix)]


def resolve_limit(root: Path, limit: int | None, kept: int) -> int:
    """Return the size limit for the files of all models: `limit`, or if it is None, a default based on the free
    space.
    """
    if limit is not None:
        return limit
    existing = next(path for path in (root, *root.parents) if path.exists())
    return automatic_limit(shutil.disk_usage(existing).free, kept)


def segment_files(root: Path) -> list[CachedFile]:
    """Return the segment files of all models."""
    return [file for file in cached_files(root) if _FOLDER_NAME.fullmatch(file.path.parent.parent.name)]


def find_damage(path: Path) -> str:
    """Return a description of the damage in a segment file's content or path; empty if it is undamaged or was deleted.

    Reads the whole file.
    """
    problem = verify(path) or _misplaced(path)
    return problem if os.path.lexists(path) else ""


def clear(folder: Path) -> ClearResult:
    """Delete all blocks in a subfolder. Its description stays, because a running process may still write blocks
    there.
    """
    done = ClearResult()
    for shard in subfolders(folder, _SHARD_NAME):
        for entry in dir_entries(shard):
            if entry.name.endswith((SUFFIX, UNFINISHED)):
                done += delete(Path(entry.path))
        with contextlib.suppress(OSError):
            shard.rmdir()
    return done


def delete(path: Path) -> ClearResult:
    """Delete a file. If that fails, the result counts it as left."""
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
    blocks: Counter[int] = Counter()  # blocks per KV group
    for shard in subfolders(folder, _SHARD_NAME):
        for entry in dir_entries(shard):
            if entry.name.endswith(SUFFIX):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    files, size, used = files + 1, size + status.st_size, max(used, status.st_mtime_ns)
                with contextlib.suppress(OSError, BadSegment), open_segment(Path(entry.path)) as file:
                    head = read_head(file)
                    blocks[head.header.group] += len(head.entries)
    # A token has a block in every group, so the group with the most blocks determines the number of tokens.
    tokens = BLOCK_SIZE * max(blocks.values(), default=0)
    return CachedModel(folder, _read_about(folder), files, size, blocks.total(), tokens, used)


def _misplaced(path: Path) -> str:
    try:
        with open_segment(path) as file:
            header = read_head(file).header
    except (BadSegment, OSError) as problem:
        return str(problem)
    if header.fingerprint.hex()[:_NAME_DIGITS] != path.parent.parent.name:
        return "it belongs to another model"
    segment = segment_name(header.group, header.first_key)
    is_right = segment_of(path.name) == segment and path.parent.name == shard_name(segment)
    return "" if is_right else "it belongs to another segment"


def _read_about(folder: Path) -> About:
    """Read `about.json`. Fields that are missing or of another type stay empty."""
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
