"""The number of a program among those that use a history at the same time.

A lock file for each number tells whether it is taken; the operating system releases the lock however the program ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock


class Window:
    """This program's number: the lowest that is free when it is asked for. Raises OSError if no lock can be made."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: that of the history; without one, in memory, there is one window."""
        self._folder = folder
        self._number = 0
        self._held: BaseFileLock | None = None

    @property
    def number(self) -> int:
        folder = self._folder
        if folder is not None and self._held is None:
            self._number, self._held = next((n, lock) for n in count() if (lock := _taken(folder, n)))
        return self._number

    @contextmanager
    def reserve(self, number: int) -> Iterator[bool]:
        """Whether another number is free; then no other program takes it while the body runs."""
        lock = None if self._folder is None else _taken(self._folder, number)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()

    def close(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None


def _taken(folder: Path, number: int) -> "BaseFileLock | None":
    """The lock of a number; None if another program holds it."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / f"window-{number}.lock", mode=0o600, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock
