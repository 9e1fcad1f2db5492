"""How much all files of all models may take, and which of them go first: those that were used longest ago.

Looked at now and then, by whoever writes; several processes may do so at once, over the same folder. Refuses to know
what is in a file.
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
LEAST, MOST = 8 * GIB, 100 * GIB  # of a limit that is chosen here
SHARE = 0.1  # of the free space
SLACK = 32  # one in so many bytes of the limit: between two looks, and what is free afterwards
UNFINISHED_SECONDS = 3600.0  # after which what was begun will not be finished


@dataclass(frozen=True, slots=True)
class CachedFile:
    """One run file."""

    path: Path
    size: int  # bytes
    used: int  # ns of Unix time


def cached_files(root: Path) -> Iterator[CachedFile]:
    """Every run file of every model."""
    for path in _files(root, SUFFIX):
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            yield CachedFile(path, status.st_size, status.st_mtime_ns)


def automatic_limit(free: int, kept: int) -> int:
    """Bytes: a tenth of what is free, what is kept already included, within bounds; never more than half of it."""
    there = free + kept
    return min(max(LEAST, min(MOST, int(SHARE * there))), there // 2)


class Quota:
    """Of one root folder. Safe for several threads."""

    def __init__(self, root: Path, limit: int | None) -> None:
        """`limit` in bytes; None: chosen by what is free."""
        self._root = root
        self._limit = limit
        self._lock = threading.Lock()
        self._written: int | None = None  # since it was looked at; None: it never was
        self._step = 0  # bytes between two looks

    def charge(self, num_bytes: int) -> None:
        """So many bytes were written. Deletes what is too much."""
        with self._lock:
            if self._written is not None:
                self._written += num_bytes
            if num_bytes and (self._written is None or self._written >= self._step):
                self._sweep()

    def enforce(self) -> None:
        """Delete what is too much, however little was written."""
        with self._lock:
            self._sweep()

    def _sweep(self) -> None:
        files = sorted(cached_files(self._root), key=lambda file: file.used)
        kept = sum(file.size for file in files)
        limit = self._limit
        if limit is None:
            limit = automatic_limit(shutil.disk_usage(self._root).free, kept)
        self._written, self._step = 0, limit // SLACK
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
                if time.time() - path.lstat().st_mtime > UNFINISHED_SECONDS:
                    path.unlink()


def _files(root: Path, suffix: str) -> Iterator[Path]:
    for model in subfolders(root):
        for shard in subfolders(model):
            yield from (Path(entry.path) for entry in dir_entries(shard) if entry.name.endswith(suffix))
