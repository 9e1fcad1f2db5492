"""Classify errors of SQLite and the system: damage, a read-only disk, or a lock that passes."""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import disk_usage

from app.errors import AppError, NoSpace
from app.history.records import HistoryDamaged, HistoryUnavailable

# Errors that reading a damaged file can raise. SQLite returns bytes of the file, which may not be UTF-8 or fit a Python
# number.
FAILURES = (sqlite3.Error, ValueError, OverflowError)


class Damaged(sqlite3.DatabaseError):
    """A file has content that this program did not write."""


_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_UNWRITABLE = (
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR
)  # fmt: skip
_UNREADABLE = (
    sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS,
    sqlite3.SQLITE_IOERR_DATA,
)  # fmt: skip
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_UNLOCK = "Close the program that has it open, such as a database browser, and try again."
FULL = "the disk is full"
_LITTLE = 1 << 18  # bytes that SQLite needs for a log and its index; with fewer it reports an I/O error
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_WRITING = (*_NO_SPACE, errno.EROFS, errno.EACCES, errno.EPERM)


def code_of(problem: BaseException) -> int:
    """Return SQLite's primary error code; -1 for Python's own errors."""
    code = _extended_code(problem)
    return code & 0xFF if code >= 0 else -1


def _extended_code(problem: BaseException) -> int:
    """Return SQLite's extended error code; -1 for Python's own errors."""
    code: int = getattr(problem, "sqlite_errorcode", -1)
    return code


def is_lock(problem: BaseException) -> bool:
    """Whether another process has the file locked."""
    return code_of(problem) in _LOCKED


def is_unwritable(problem: BaseException) -> bool:
    """Whether the disk is full, or the file or its folder is read-only."""
    if isinstance(problem, OSError):
        return problem.errno in _NO_WRITING
    return code_of(problem) in _UNWRITABLE and _extended_code(problem) not in _UNREADABLE


def is_damage(problem: BaseException) -> bool:
    """Whether opening failed because of damage: the cause is neither a lock nor an unwritable disk."""
    return isinstance(problem, FAILURES) and not is_lock(problem) and not is_unwritable(problem)


def is_corrupt(problem: BaseException) -> bool:
    """Whether SQLite or a digest found damage in an open history."""
    # a damaged search index violates a constraint of the index's tables; SQLite reports no more specific code
    is_index = _extended_code(problem) == sqlite3.SQLITE_CONSTRAINT
    return isinstance(problem, Damaged) or code_of(problem) in _CORRUPT or is_index


def describe_damage(problem: BaseException) -> str:
    """Describe the damage in a few words."""
    if isinstance(problem, Damaged):
        return str(problem)
    return f"SQLite cannot use it ({problem})" if isinstance(problem, sqlite3.Error) else "SQLite cannot use it"


def unwritable_reason(problem: BaseException, folder: Path) -> str:
    """Return why nothing can be written to `folder`, in a few words."""
    if isinstance(problem, OSError) and problem.errno in _NO_SPACE:
        return FULL
    if code_of(problem) == sqlite3.SQLITE_FULL or (folder.exists() and disk_usage(folder).free < _LITTLE):
        return FULL
    if isinstance(problem, OSError):
        return f"{problem.filename or 'the folder'} cannot be written ({problem.strerror})"
    return f"its file or folder cannot be written ({problem})"


@contextmanager
def history_errors() -> Iterator[None]:
    """Convert errors of SQLite and the system to AppError, except programming errors in SQL."""
    try:
        yield
    except sqlite3.Error as problem:
        if (known := _history_error(problem)) is None:
            raise
        raise known from problem
    except OSError as problem:
        where = problem.filename or "the chat history"
        raise HistoryUnavailable(f"{where}: {problem.strerror or problem}") from problem


def _history_error(problem: sqlite3.Error) -> AppError | None:
    if code_of(problem) == sqlite3.SQLITE_FULL:
        return NoSpace("the disk is full, and the chat cannot be saved", "Free disk space, for example with ingle rm.")
    if is_lock(problem):
        return HistoryUnavailable("another program has the chat history locked", _UNLOCK)
    if is_corrupt(problem):
        return HistoryDamaged("the chat history is damaged", "Restart ingle: it recovers the readable chats.")
    if is_unwritable(problem) or isinstance(problem, sqlite3.OperationalError):
        return HistoryUnavailable(f"the chat history cannot be used: {problem}")
    return None
