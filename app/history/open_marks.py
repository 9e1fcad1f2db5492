"""Lock files of the processes that have a history open. The system releases a lock when its process ends.

A history's files may be replaced, and its log may be checked for damage, only while no other process has them open.
"""

import os
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock

_SUFFIX = ".open"


def is_open_elsewhere(folder: Path) -> bool:
    """Whether another process has the history open. Removes the lock files of killed processes.

    The caller holds the lock for opening the history, so no other process can open it meanwhile. Raises OSError.
    """
    from filelock import FileLock, Timeout

    held = False
    for mark in folder.glob(f"*{_SUFFIX}"):
        lock = FileLock(mark, mode=0o600)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            held = True
            continue
        lock.release()
        with suppress(OSError):
            mark.unlink()
    return held


def mark_open(folder: Path) -> "BaseFileLock":
    """Lock a file that shows that this process has the history open. Release it with `unmark`. Raises OSError."""
    from filelock import FileLock

    marks = (folder / f"{os.getpid()}-{number}{_SUFFIX}" for number in count())
    lock = FileLock(next(mark for mark in marks if not mark.exists()), mode=0o600, thread_local=False)
    lock.acquire(timeout=0)
    return lock


def unmark(lock: "BaseFileLock") -> None:
    with suppress(OSError):
        Path(lock.lock_file).unlink(missing_ok=True)
    lock.release()
