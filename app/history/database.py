"""The connection to the history: every change is whole and on disk when `writing` is left.

Changes go to a log first (WAL, synchronous=FULL), so that they are whole whenever the process or the machine dies. A
history that turns out to be damaged is repaired at once. One that cannot be written is kept in memory until it can be.
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
from app.history.files import stamp_of
from app.history.notices import HistoryNotice, Rescue
from app.history.open_marks import unmark
from app.history.opening import Opened, Tell, in_memory, open_file, open_history
from app.history.records import HistoryDamaged
from app.history.sqlite_errors import FAILURES, describe_damage, history_errors, is_corrupt
from app.private_database import fold_log

FILE_NAME = "history.sqlite"
_AGAIN_SECONDS = 5.0  # between two attempts to write what could not be written
_FOLD_MS = 100  # the longest wait for other processes that read


def quiet(sentence: str) -> None:
    """Drop a sentence that no user waits for."""


class Database:
    """The file in `folder`, which is made for this user alone; without a folder, in memory. Safe for several threads
    and processes.

    `tell` is called with sentences for a user who waits while it is opened. Raises HistoryTooNew, HistoryUnavailable or
    NoSpace.
    """

    def __init__(self, folder: Path | None, tell: Tell = quiet) -> None:
        # SQLite puts the log beside the file that a symbolic link points to
        self._path = None if folder is None else Path(os.path.realpath(folder / FILE_NAME))
        self._lock = threading.RLock()
        self._is_used = False  # by a body, within which there may be others
        self._notices: list[HistoryNotice] = []
        self._on_notice: Callable[[HistoryNotice], None] = self._notices.append
        with history_errors():
            self._adopt(in_memory() if self._path is None else open_history(self._path, tell))

    def subscribe(self, on_notice: Callable[[HistoryNotice], None]) -> Sequence[HistoryNotice]:
        """Call `hear`, on any thread, with all news from now on. Returns the news that nobody has heard yet."""
        with self._lock:
            self._on_notice, before, self._notices = on_notice, self._notices, []
        return before

    @property
    def notices(self) -> Sequence[HistoryNotice]:
        """The news that nobody has heard yet."""
        return tuple(self._notices)

    @property
    def rescue(self) -> Rescue | None:
        """What became of a damaged history, if it was one when it was opened last."""
        return self._opened.rescue

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The body's changes are on disk, all of them, when this is left; none, if it raises. Inside of another one,
        they are a part of that one's."""
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
        """What the body reads was there at one moment."""
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
        """Write the log into the file, as far as other processes allow it, so that a damaged log costs little."""
        with self._connected() as connection:
            [patience] = connection.execute("PRAGMA busy_timeout").fetchone()
            connection.execute(f"PRAGMA busy_timeout = {_FOLD_MS}").fetchall()
            with suppress(sqlite3.OperationalError):  # on a full disk the log stays as it is
                fold_log(connection)
            connection.execute(f"PRAGMA busy_timeout = {patience}").fetchall()

    def erase_traces(self) -> None:
        """What was removed goes from the index of words and from the log of changes, too."""
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
        """Open the file again if another process has replaced it, or if the disk may have room again."""
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
            unmark(self._opened.mark)

    def _repair(self, path: Path, damage: str) -> None:
        """Raises HistoryDamaged, for the change that was under way."""
        self._close_file()
        self._adopt(open_history(path, quiet, damage))
        raise HistoryDamaged("the history of chats was damaged", "It was repaired as far as possible: do this again.")

    def _save_again(self) -> None:
        """Write what is in memory to the file, if it can be written by now, and nobody else has written it."""
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
        """Which file lies there now."""
        if self._path is not None:
            with suppress(OSError):
                status = os.stat(self._path)
                return status.st_dev, status.st_ino
        return None
