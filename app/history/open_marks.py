"""Lock files of the processes that have a history open.

A history's files may be replaced, and its log may be checked for damage, only while no other process has them open.
"""

import os
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from app.history import lock_files

if TYPE_CHECKING:
    from filelock import BaseFileLock

_SUFFIX = ".open"


def is_open_elsewhere(folder: Path) -> bool:
    """Whether another process has the history open. Removes the lock files of killed processes.

    The caller holds the lock for opening the history, so no other process can open it meanwhile. Raises OSError.
    """
    are_held = {lock_files.is_held(mark) for mark in folder.glob(f"*{_SUFFIX}")}
    return True in are_held


def mark_open(folder: Path) -> "BaseFileLock":
    """Lock a file that shows that this process has the history open. Remove it to close. Raises OSError."""
    marks = (folder / f"{os.getpid()}-{number}{_SUFFIX}" for number in count())
    return lock_files.hold(next(mark for mark in marks if not mark.exists()))
