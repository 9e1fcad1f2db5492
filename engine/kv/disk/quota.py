"""Quota: the size limit of the files of all models, and the deletion of the least recently used ones.

A writer enforces the limit whenever it has written a certain number of bytes. Several processes may do so in the same
folder.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.kv.disk.segment_file import SUFFIX, UNFINISHED, dir_entries, subfolders

GIB = 1 << 30
MIN_LIMIT, MAX_LIMIT = 8 * GIB, 100 * GIB  # bounds of the automatic limit
SHARE = 0.1  # share of the free space that the automatic limit allows
# 1 / SWEEP_FRACTION of the limit is written between two sweeps, and each sweep frees the same number of bytes
SWEEP_FRACTION = 32
UNFINISHED_MAX_AGE = 3600.0  # seconds after which an unfinished file is deleted


@dataclass(frozen=True, slots=True)
class CachedFile:
    """One segment file."""

    path: Path
    size: int  # size in bytes
    used: int  # time of the last use, as Unix time in ns


def cached_files(root: Path) -> Iterator[CachedFile]:
    """Iterate over the segment files of all models."""
    for path in _files(root, SUFFIX):
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            yield CachedFile(path, status.st_size, status.st_mtime_ns)


def automatic_limit(free: int, kept: int) -> int:
    """Return the automatic limit in bytes: a tenth of the space that is free or already used by the cache.

    The limit is at least MIN_LIMIT and at most MAX_LIMIT, but never more than half of that space.
    """
    there = free + kept
    return min(max(MIN_LIMIT, min(MAX_LIMIT, int(SHARE * there))), there // 2)


class Quota:
    """Enforces the size limit of one root folder. Thread-safe."""

    def __init__(self, root: Path, limit: int | None) -> None:
        """Set the limit in bytes; None: an automatic limit based on the free space."""
        self._root = root
        self._limit = limit
        self._lock = threading.Lock()
        self._written: int | None = None  # bytes written since the last sweep; None: no sweep yet
        self._step = 0  # bytes to write between two sweeps

    def charge(self, num_bytes: int) -> None:
        """Count written bytes, and sweep if enough bytes were written since the last sweep."""
        with self._lock:
            if self._written is not None:
                self._written += num_bytes
            if num_bytes and (self._written is None or self._written >= self._step):
                self._sweep()

    def enforce(self) -> None:
        """Delete files over the limit now, regardless of the number of bytes written."""
        with self._lock:
            self._sweep()

    def _sweep(self) -> None:
        files = sorted(cached_files(self._root), key=lambda file: file.used)
        kept = sum(file.size for file in files)
        limit = self._limit
        if limit is None:
            limit = automatic_limit(shutil.disk_usage(self._root).free, kept)
        self._written, self._step = 0, limit // SWEEP_FRACTION
        if kept > limit:
            for file in files:
                if kept <= limit - self._step:
                    break
                with contextlib.suppress(OSError):
                    file.path.unlink()
                kept -= file.size
        self._sweep_unfinished()

    def _sweep_unfinished(self) -> None:
        for path in _files(self._root, UNFINISHED):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > UNFINISHED_MAX_AGE:
                    path.unlink()


def _files(root: Path, suffix: str) -> Iterator[Path]:
    for model in subfolders(root):
        for shard in subfolders(model):
            yield from (Path(entry.path) for entry in dir_entries(shard) if entry.name.endswith(suffix))
