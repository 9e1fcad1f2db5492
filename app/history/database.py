"""The connection to the history: a change is complete and on disk when the block of `writing` ends.

The write-ahead log (WAL, synchronous=FULL) makes changes atomic even if the process or the machine dies. A history that
turns out to be damaged is repaired at once. A history that cannot be written is kept in memory until it can be.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from app.errors import AppError
from app.history import lock_files
from app.history.files import stamp_of
from app.history.notices import HistoryNotice, Rescue
from app.history.opening import Opened, Tell, in_memory, open_file, open_history
from app.history.records import HistoryDamaged
from app.history.sqlite_errors import FAILURES, describe_damage, history_errors, is_corrupt
from app.private_database import fold_log

FILE_NAME = "history.sqlite"
_AGAIN_SECONDS = 5.0  # seconds between two attempts to write a read-only history
_FOLD_MS = 100  # longest wait of a checkpoint for readers in other processes, in ms


def quiet(sentence: str) -> None:
    """Ignore a message, because no user is waiting for it."""


class Database:
    """The database file in `folder`, readable only by this user; without a folder, in memory.

    Safe for several threads and processes. `tell` is called with messages for a user who waits while the file is
    opened. Raises HistoryTooNew, HistoryUnavailable, or NoSpace.
    """

    def __init__(self, folder: Path | None, tell: Tell = quiet) -> None:
        # SQLite creates the log next to the target of a symbolic link
        self._path = None if folder is None else Path(os.path.realpath(folder / FILE_NAME))
        self._lock = threading.RLock()
        self._is_used = False  # whether a block is active; blocks may be nested
        self._notices: list[HistoryNotice] = []
        self._on_notice: Callable[[HistoryNotice], None] = self._notices.append
        with history_errors():
            self._adopt(in_memory() if self._path is None else open_history(self._path, tell))

    def subscribe(self, on_notice: Callable[[HistoryNotice], None]) -> Sequence[HistoryNotice]:
        """Call `on_notice`, on any thread, with each later notice. Returns the notices that no subscriber
        has received yet.
        """
        with self._lock:
            self._on_notice, before, self._notices = on_notice, self._notices, []
        return before

    @property
    def notices(self) -> Sequence[HistoryNotice]:
        """The notices that no subscriber has received."""
        return tuple(self._notices)

    @property
    def is_saved(self) -> bool:
        """Whether changes are saved in the file, where other processes see them."""
        return self._path is not None and not self._opened.unsaved

    @property
    def rescue(self) -> Rescue | None:
        """The result of a repair, if the history was damaged when it was last opened."""
        return self._opened.rescue

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction, which commits at the end of the block, or rolls back if it raises.

        A nested block joins the outer one.
        """
        with self._connected(to_write=True) as connection:
            if connection.in_transaction:
                yield connection
                return
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open a read transaction, in which the block sees one state of the database."""
        with self._connected() as connection:
            if connection.in_transaction:
                yield connection
                return
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")

    def checkpoint(self) -> None:
        """Checkpoint the log as far as other processes allow, so that a damaged log loses little."""
        with self._connected() as connection:
            [patience] = connection.execute("PRAGMA busy_timeout").fetchone()
            connection.execute(f"PRAGMA busy_timeout = {_FOLD_MS}").fetchall()
            with suppress(sqlite3.OperationalError):  # raised if the disk is full; the log then stays as it is
                fold_log(connection)
            connection.execute(f"PRAGMA busy_timeout = {patience}").fetchall()

    def erase_traces(self) -> None:
        """Remove deleted text from the search index and the log."""
        with self._connected() as connection:
            connection.execute("INSERT INTO words (words) VALUES ('optimize')")
            fold_log(connection)

    def close(self) -> None:
        with self._lock:
            if self._opened.unsaved:
                self._save_again()
            self._close_file()

    @contextmanager
    def _connected(self, *, to_write: bool = False) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._is_used:
                yield self._opened.connection
                return
            with history_errors():
                self._reopen_if_replaced(to_write)
                self._is_used = True
                try:
                    yield self._opened.connection
                except sqlite3.Error as problem:
                    if self._path is not None and not self._opened.unsaved and is_corrupt(problem):
                        self._repair(self._path, describe_damage(problem))
                    raise
                finally:
                    self._is_used = False

    def _reopen_if_replaced(self, to_write: bool) -> None:
        """Reopen the file if another process has replaced it, or if it may be writable again."""
        if self._path is None:
            return
        if self._opened.unsaved:
            if to_write and time.monotonic() > self._retry_at:
                self._save_again()
        elif self._file_id() != self._identity:
            self._close_file()
            self._adopt(open_history(self._path, quiet))

    def _adopt(self, opened: Opened) -> None:
        self._opened = opened
        self._identity = self._file_id()
        self._retry_at = time.monotonic() + _AGAIN_SECONDS
        for notice in opened.notices:
            self._on_notice(notice)

    def _close_file(self) -> None:
        with suppress(sqlite3.Error):
            self._opened.connection.close()
        if self._opened.mark is not None:
            lock_files.remove(self._opened.mark)

    def _repair(self, path: Path, damage: str) -> None:
        """Repair the file, and raise HistoryDamaged for the change in progress."""
        self._close_file()
        self._adopt(open_history(path, quiet, damage))
        raise HistoryDamaged("the chat history was damaged", "It was repaired as far as possible. Try again.")

    def _save_again(self) -> None:
        """Write the in-memory history to the file, if the file is writable now and no other process has changed it."""
        self._retry_at = time.monotonic() + _AGAIN_SECONDS
        if self._path is None or stamp_of(self._path) != self._opened.read_from:
            return
        with suppress(AppError, OSError, *FAILURES):
            opened = open_file(self._path, quiet)
            before, self._opened = self._opened, opened
            try:
                before.connection.backup(opened.connection)
            except sqlite3.Error:
                self._close_file()
                self._opened = replace(before, read_from=stamp_of(self._path))
                return
            before.connection.close()
            self._adopt(replace(opened, notices=[*opened.notices, HistoryNotice("Chats are saved again.")]))

    def _file_id(self) -> tuple[int, int] | None:
        """Return the device and inode of the current file, or None."""
        if self._path is not None:
            with suppress(OSError):
                status = os.stat(self._path)
                return status.st_dev, status.st_ino
        return None
