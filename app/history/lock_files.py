"""Files that a process locks while something is true. The operating system releases a lock when its process ends."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock


def hold(path: Path) -> "BaseFileLock":
    """Create a file and lock it. Raises OSError, also if another process holds the lock."""
    from filelock import FileLock

    lock = FileLock(path, mode=0o600, thread_local=False)
    lock.acquire(timeout=0)
    return lock


def remove(lock: "BaseFileLock") -> None:
    """Delete the file and release its lock."""
    with suppress(OSError):
        Path(lock.lock_file).unlink(missing_ok=True)
    lock.release()


def is_held(path: Path) -> bool:
    """Whether a process holds the lock of a file. If none does, delete the file. Raises OSError."""
    from filelock import Timeout

    try:
        lock = hold(path)
    except Timeout:
        return True
    remove(lock)
    return False
