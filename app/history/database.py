"""The file of the history: opened, checked, brought to this version, and shared with other processes.

Every change is on disk when `writing` is left (WAL, synchronous=FULL), and whole or not there at all, whenever the
process or the machine dies. A damaged file is set aside while it is opened, and what can be read of it is saved.
Refuses to know what the tables hold.
"""

import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from app.errors import NoSpace
from app.history.errors import HistoryDamaged, HistoryTooNew, HistoryUnavailable
from app.history.salvage import fill, salvaged
from app.history.schema import PAGE_SIZE, STEPS, VERSION
from app.private_database import connect, make_private, write_ahead
from engine.private_folder import private_folder

FILE_NAME = "history.sqlite"
_BUSY_SECONDS = 30.0  # for another process to end its write, which takes milliseconds
_OPENING_SECONDS = 300.0  # for another process to save what can be read of a damaged file

_NO_DAMAGE = (
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_FULL
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rescue:
    """What became of a damaged file."""

    aside: Path  # where it is now
    chats: int  # that could be read
    messages: int


class Database:
    """The file in `folder`, which is made for this user alone; without a folder, in memory. Safe for several threads
    and processes.

    Raises HistoryTooNew, HistoryUnavailable or NoSpace; not for damage, of which `rescue` tells.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE_NAME
        self.rescue: Rescue | None = None
        self._lock = threading.RLock()
        with _told():
            self._connection = self._open()
            self._identity = self._present()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The body's changes are on disk, all of them, when this is left; none, if it raises. Inside of another one,
        they are a part of that one's."""
        with self._used() as connection:
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
        with self._used() as connection:
            if connection.in_transaction:
                yield connection
                return
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")

    def erase_traces(self) -> None:
        """What was removed goes from the index of words and from the log of changes, too."""
        with self._used() as connection:
            connection.execute("INSERT INTO words (words) VALUES ('optimize')")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        with self._lock, suppress(sqlite3.Error):
            self._connection.close()

    @contextmanager
    def _used(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _told():
            if (
                not self._connection.in_transaction and self._present() != self._identity
            ):  # another process has set it aside
                self._connection.close()
                self._connection = self._open()
                self._identity = self._present()
            yield self._connection

    def _present(self) -> tuple[int, int] | None:
        """Which file lies there now."""
        if self._path is not None:
            with suppress(FileNotFoundError):
                status = os.stat(self._path)
                return status.st_dev, status.st_ino
        return None

    def _open(self) -> sqlite3.Connection:
        """One process at a time makes, checks and mends the file."""
        if self._path is None:
            return _prepared(connect(None, _BUSY_SECONDS, isolation_level=None))
        from filelock import FileLock

        private_folder(self._path.parent)
        with FileLock(self._path.with_suffix(".lock"), timeout=_OPENING_SECONDS, mode=0o600):
            try:
                return _opened(self._path)
            except sqlite3.Error as problem:
                if _primary(problem) in _NO_DAMAGE or not os.access(self._path, os.W_OK):
                    raise
            self.rescue = _set_aside(self._path)
            return _opened(self._path)


def _opened(path: Path) -> sqlite3.Connection:
    """Raises sqlite3.Error for a damaged file, and HistoryTooNew."""
    make_private(path)
    return _prepared(connect(path, _BUSY_SECONDS, isolation_level=None))


def _prepared(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Checked, and of this version."""
    connection.text_factory = lambda content: content.decode("utf-8", "replace")
    try:
        connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
        write_ahead(connection, "FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        _check(connection)
        _migrate(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection) -> None:
    """Raises sqlite3.Error, or HistoryTooNew for a sound file of a newer program."""
    version = _version(connection)
    [answer] = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if answer != "ok":
        raise sqlite3.DatabaseError(answer)
    if version:
        told = connection.execute("SELECT version FROM about").fetchone()
        if told != (version,):
            raise sqlite3.DatabaseError(f"its version is {version}, and {told}")
    if version > VERSION:
        raise HistoryTooNew(
            f"the history of chats is of version {version}, and this program knows up to {VERSION}",
            "Use the newer ingle that wrote it, or give this one another folder with INGLE_STATE_DIR.",
        )
    if version:
        connection.execute("INSERT INTO words (words) VALUES ('integrity-check')")


def _version(connection: sqlite3.Connection) -> int:
    [version] = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _migrate(connection: sqlite3.Connection) -> None:
    """Each step is a change of its own: whoever is killed in between goes on there."""
    for number in range(_version(connection) + 1, VERSION + 1):
        reached = f"UPDATE about SET version = {number}; PRAGMA user_version = {number};"  # noqa: S608  # a number
        connection.executescript(f"BEGIN IMMEDIATE; {STEPS[number - 1]} {reached} COMMIT;")


def _set_aside(path: Path) -> Rescue:
    """Move a damaged file away, and make a new one with what can be read of it."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    aside = path.with_name(f"{path.stem}-damaged-{stamp}{path.suffix}")
    fresh = path.with_suffix(".fresh")
    for suffix in ("", "-wal", "-shm"):
        Path(f"{fresh}{suffix}").unlink(missing_ok=True)
    rows = salvaged(path)
    connection = _opened(fresh)
    try:
        counts = fill(connection, rows)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        connection.close()
    _keep(path, aside)
    if Path(f"{path}-wal").exists():
        os.replace(f"{path}-wal", f"{aside}-wal")
    Path(f"{path}-shm").unlink(missing_ok=True)
    os.replace(fresh, path)  # in one step: whenever this process is killed, there is a file of that name
    return Rescue(aside, counts["chats"], counts["messages"])


def _keep(path: Path, aside: Path) -> None:
    """Give a file another name besides its own; a copy, where the file system has no links."""
    try:
        os.link(path, aside)
    except OSError:
        shutil.copy2(path, aside)


@contextmanager
def _told() -> Iterator[None]:
    """Errors of SQLite and of the system become ours."""
    try:
        yield
    except sqlite3.Error as problem:
        code = _primary(problem)
        if code == sqlite3.SQLITE_FULL:
            raise NoSpace("the disk is full, and the chat cannot be saved", "Make room; ingle rm helps.") from problem
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise HistoryDamaged(
                "the history of chats is damaged", "Start ingle again: it saves what can be read."
            ) from problem
        if isinstance(problem, sqlite3.OperationalError):
            raise HistoryUnavailable(f"the history of chats cannot be used: {problem}") from problem
        raise
    except OSError as problem:
        where = problem.filename or "the history of chats"
        raise HistoryUnavailable(f"{where}: {problem.strerror or problem}") from problem


def _primary(problem: sqlite3.Error) -> int:
    """SQLite's code, without its details; -1 for errors of Python's own."""
    code: int = getattr(problem, "sqlite_errorcode", -1)
    return code & 0xFF if code >= 0 else -1
