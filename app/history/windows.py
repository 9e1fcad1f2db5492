"""Number the processes that use a history at the same time.

A lock file for each number shows that it is in use. The operating system releases the lock when the process ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock


class Window:
    """The number of this process: the lowest free number at the first use. Raises OSError if no lock file can be
    created.
    """

    def __init__(self, folder: Path | None) -> None:
        """Set the folder of the history. None: the history is in memory and has one window."""
        self._folder = folder
        self._number = 0
        self._held: BaseFileLock | None = None

    @property
    def number(self) -> int:
        folder = self._folder
        if folder is not None and self._held is None:
            self._number, self._held = next((n, lock) for n in count() if (lock := _acquire(folder, n)))
        return self._number

    @contextmanager
    def reserve(self, number: int) -> Iterator[bool]:
        """Reserve another number while the body runs. Yields whether it was free."""
        lock = None if self._folder is None else _acquire(self._folder, number)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()

    def close(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None


def _acquire(folder: Path, number: int) -> "BaseFileLock | None":
    """Lock a number and return its lock; None if another process holds it."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / f"window-{number}.lock", mode=0o600, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock
