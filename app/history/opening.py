"""Open a history: one process at a time checks, repairs, and migrates it.

A history that cannot be written is read into memory. Notices for the user are returned.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from app.history.connections import create_database, open_checked
from app.history.files import Stamp, find_damage, is_empty, require_files, stamp_of
from app.history.notices import HistoryNotice, Rescue, rescue_of
from app.history.open_marks import is_open_elsewhere, mark_open
from app.history.records import HistoryInUse, HistoryUnavailable
from app.history.refill import refill
from app.history.rescue import finish_replacement, rescue
from app.history.salvage import salvage
from app.history.sqlite_errors import (
    FAILURES,
    FULL,
    Damaged,
    describe_damage,
    is_damage,
    is_lock,
    is_unwritable,
    unwritable_reason,
)
from app.private_database import fold_log
from engine.private_folder import private_folder

if TYPE_CHECKING:
    from filelock import BaseFileLock

T = TypeVar("T")
Tell = Callable[[str], None]

_BUSY_MS = 10_000  # longest wait for a write of another process, which takes milliseconds
_LOCKED_SECONDS = 30.0  # longest wait until another program unlocks the history
_REPAIR_SECONDS = 300.0  # longest wait for another Inglenook process that repairs the history
_SOON_SECONDS = 1.0  # seconds until a waiting user gets a message
_GLANCE_SECONDS = 0.05  # seconds between two attempts

_MAKE_ROOM = (
    "Free disk space: saving then resumes. Until then old chats can be read, and new ones are lost when you leave."
)
_READ_ONLY = "Old chats can be read; new ones are lost when you leave."
_CLOSE_OTHERS = "Close the other chats, then restart ingle: it recovers the readable chats."


@dataclass(frozen=True, slots=True)
class Opened:
    """An open history."""

    connection: sqlite3.Connection
    notices: Sequence[HistoryNotice] = ()
    # lock that shows other processes that the history is open; None: it is in memory
    mark: "BaseFileLock | None" = None
    rescue: Rescue | None = None  # result of a repair
    unsaved: str = ""  # why nothing is saved, or ""
    read_from: Stamp = ()  # state of the files that were read into memory, for a history that is not saved


def in_memory() -> Opened:
    """Return an empty history that is never saved."""
    return Opened(create_database(None))


def open_history(path: Path, tell: Tell, damage: str = "") -> Opened:
    """Open or create the history at `path`. If it cannot be written, read it into memory.

    `tell` is called with a message if the user has to wait. `damage`: why the file is known to be damaged. Raises
    HistoryTooNew, HistoryUnavailable, one of FAILURES, or OSError.
    """
    try:
        return open_file(path, tell, damage)
    except HistoryInUse as problem:
        return _read(path, tell, problem.message, _CLOSE_OTHERS)
    except (OSError, *FAILURES) as problem:
        if not is_unwritable(problem):
            raise
        why = unwritable_reason(problem, path.parent)
        return _read(path, tell, why, _MAKE_ROOM if why == FULL else _READ_ONLY)


def open_file(path: Path, tell: Tell, damage: str = "") -> Opened:
    """Open the history as `open_history` does, but raise the error if it cannot be written or repaired."""
    require_files(path)
    private_folder(path.parent)
    with _opening_lock(path, tell):
        finish_replacement(path)
        is_alone = not is_open_elsewhere(path.parent)
        notices = [_empty(path)] if is_alone and is_empty(path) else []
        account: Rescue | None = None
        try:
            _require(damage or (find_damage(path) if is_alone else ""))
            connection = _retry_while_locked(lambda: open_checked(path), tell)
        except FAILURES as problem:
            if not is_damage(problem):
                raise
            if not is_alone:
                raise HistoryInUse("the chat history is damaged, and other chats have it open") from problem
            tell("The chat history is damaged. Recovering the readable chats.")
            account = rescue(path, describe_damage(problem), create_database)
            connection = _retry_while_locked(lambda: open_checked(path), tell)
        try:
            fold_log(connection)
            connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}").fetchall()
            return Opened(connection, [account.notice] if account else notices, mark_open(path.parent), account)
        except BaseException:
            connection.close()
            raise


def _read(path: Path, tell: Tell, why: str, remedy: str) -> Opened:
    """Read the readable rows of a history that cannot be written. Raises OSError."""
    tell("The chat history cannot be written. Reading it into memory.")
    read_from, salvaged = stamp_of(path), salvage(path)
    connection = create_database(None)
    account = rescue_of("it cannot be repaired now", None, salvaged, refill(connection, salvaged))
    notices = [HistoryNotice(f"Nothing is saved: {why}.", remedy, is_saved=False)]
    if account.is_loss:
        notices.append(replace(account.notice, is_saved=False))
    return Opened(connection, notices, rescue=account if account.is_loss else None, unsaved=why, read_from=read_from)


def _require(damage: str) -> None:
    if damage:
        raise Damaged(damage)


@contextmanager
def _opening_lock(path: Path, tell: Tell) -> Iterator[None]:
    """Hold the lock that lets one process at a time open the history."""
    from filelock import FileLock, Timeout

    lock = FileLock(path.with_suffix(".lock"), mode=0o600)
    try:
        lock.acquire(timeout=_SOON_SECONDS)
    except Timeout:
        tell("Another ingle is opening or repairing the chat history. Waiting for it; Ctrl-C cancels.")
        try:
            lock.acquire(timeout=_REPAIR_SECONDS)
        except Timeout:
            raise HistoryUnavailable("another ingle is still opening the chat history", "End that process.") from None
    try:
        yield
    finally:
        lock.release()


def _retry_while_locked(work: Callable[[], T], tell: Tell) -> T:
    """Call `work` until no other program has the file locked, and return its result."""
    started, is_reported = time.monotonic(), False
    while True:
        try:
            return work()
        except FAILURES as problem:
            waited = time.monotonic() - started
            if not is_lock(problem) or waited > _LOCKED_SECONDS:
                raise
        if waited > _SOON_SECONDS and not is_reported:
            is_reported = True
            tell(
                "Another program has the chat history locked."
                f" Waiting for {_LOCKED_SECONDS:.0f} s at most; Ctrl-C cancels."
            )
        time.sleep(_GLANCE_SECONDS)


def _empty(path: Path) -> HistoryNotice:
    return HistoryNotice(f"The chat history was an empty file, {path}.", "If there were chats in it, restore a backup.")
