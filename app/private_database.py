"""SQLite files that only their owner can read, and that several processes may share.

`PrivateDatabase` is a file of one version, made when it is first written. The history of chats, which is repaired and
migrated, uses the functions below it.
"""

import errno
import os
import sqlite3
import threading
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import quote

from engine.private_folder import private_folder

Synchronous: TypeAlias = Literal["NORMAL", "FULL"]


class PrivateDatabase:
    """A connection to one file, opened when it is needed. Hold `lock` while you use it."""

    def __init__(self, path: Path | None, schema: str, version: int, busy_seconds: float) -> None:
        """`path` None: in memory. `schema` makes the tables of a new file, if they do not exist. `busy_seconds`: the
        longest wait for a write of another process."""
        self.lock = threading.RLock()
        self._path = path
        self._schema = schema
        self._version = version
        self._busy_seconds = busy_seconds
        self._open: sqlite3.Connection | None = None

    def writable(self) -> sqlite3.Connection:
        """The connection. Makes the file if there is none. Raises sqlite3.Error or OSError."""
        if self._open is None:
            if self._path is not None:
                private_folder(self._path.parent)
                make_private(self._path)
            self._open = connect(self._path, self._busy_seconds)
            try:
                self._prepare(self._open)
            except BaseException:
                self.close()
                raise
        return self._open

    def readable(self) -> sqlite3.Connection | None:
        """The connection, which cannot write. None if there is no file, or another process is just making it.

        Raises sqlite3.Error.
        """
        if self._open is None and self._path is not None and self._path.exists():
            self._open = connect(self._path, self._busy_seconds)
            self._open.execute("PRAGMA query_only = ON")
            if not version_of(self._open, self._version):
                self.close()
        return self._open

    def close(self) -> None:
        """Close the connection; it is opened again when it is needed."""
        opened, self._open = self._open, None
        if opened is not None:
            with suppress(sqlite3.Error):
                opened.close()

    def __del__(self) -> None:
        self.close()

    def _prepare(self, connection: sqlite3.Connection) -> None:
        write_ahead(connection, "NORMAL")
        if not version_of(connection, self._version):
            made = f"BEGIN IMMEDIATE; {self._schema} PRAGMA user_version = {self._version}; COMMIT;"
            connection.executescript(made)


def make_private(path: Path) -> None:
    """Create the file, if there is none, for its owner alone: SQLite gives its other files the same permissions.

    Raises OSError, also for a pipe or a socket of that name, which SQLite would wait for.
    """
    if not path.exists():
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    elif not path.is_file():
        raise OSError(errno.EINVAL, "is no file", str(path))


def connect(
    path: Path | None, busy_seconds: float, *, isolation_level: Literal["DEFERRED"] | None = "DEFERRED"
) -> sqlite3.Connection:
    """A connection for any thread to a file that is there; without one, to a database in memory. Others' writes are
    waited for so long. `isolation_level` None: transactions are begun by hand."""
    if path is None:
        return sqlite3.connect(":memory:", isolation_level=isolation_level, check_same_thread=False)
    address = f"file:{quote(str(path.absolute()))}?mode=rw"
    return sqlite3.connect(
        address, timeout=busy_seconds, uri=True, isolation_level=isolation_level, check_same_thread=False
    )


def write_ahead(connection: sqlite3.Connection, synchronous: Synchronous) -> None:
    """Changes go to a log first: whole after any end of a process with NORMAL, which is fast; after a power cut, too,
    with FULL. What is deleted is overwritten."""
    connection.execute("PRAGMA journal_mode = WAL").fetchall()
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("PRAGMA secure_delete = ON").fetchall()


def fold_log(connection: sqlite3.Connection) -> None:
    """Write the log of changes into the file and empty it, unless other connections still read the log."""
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def version_of(connection: sqlite3.Connection, known: int) -> int:
    """The version of what is there; 0: nothing is yet. Raises DatabaseError where it is another program's, or of
    another version than the `known` one."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, known):
        raise sqlite3.DatabaseError(f"its version is {version}, not {known}")
    return int(version)


def trim(connection: sqlite3.Connection, table: str, most: int) -> None:
    """Of the rows of a table with the columns `size` and `used`, delete those that were used longest ago, until the
    others have `most` together."""
    (total,) = connection.execute(f"SELECT sum(size) FROM {table}").fetchone()  # noqa: S608  # a name of ours
    if (total or 0) > most:
        connection.execute(_TRIM.format(table=table), (most,))


_TRIM = """
    DELETE FROM {table} WHERE rowid IN (
        SELECT rowid FROM (SELECT rowid, sum(size) OVER (ORDER BY used DESC, rowid DESC) AS total FROM {table})
        WHERE total > ?
    )
"""
