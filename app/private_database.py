"""SQLite files that only their owner can read, and that several processes can share.

`PrivateDatabase` is a file of one schema version, created on the first write. The history of chats, which is repaired
and migrated, uses the functions below it.
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
    """A connection to one file, opened on first use. Hold `lock` while you use the connection."""

    def __init__(self, path: Path | None, schema: str, version: int, busy_seconds: float) -> None:
        """Set the parameters of the connection, which is opened later.

        `path`: the file; None: a database in memory. `schema`: SQL that creates the tables if they do not exist.
        `busy_seconds`: the longest wait for a write of another process.
        """
        self.lock = threading.RLock()
        self._path = path
        self._schema = schema
        self._version = version
        self._busy_seconds = busy_seconds
        self._open: sqlite3.Connection | None = None

    def writable(self) -> sqlite3.Connection:
        """Return a connection that can write. Creates the file if there is none. Raises sqlite3.Error or OSError."""
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
        """Return a connection for reading, or None if there is no file or another process is just creating it.

        Raises sqlite3.Error.
        """
        if self._open is None and self._path is not None and self._path.exists():
            self._open = connect(self._path, self._busy_seconds)
            self._open.execute("PRAGMA query_only = ON")
            if not version_of(self._open, self._version):
                self.close()
        return self._open

    def close(self) -> None:
        """Close the connection. The next use opens it again."""
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
    """Create the file, if there is none, readable for its owner alone. SQLite gives its other files the same mode.

    Raises OSError, also if the path is a pipe or a socket, on which SQLite would block.
    """
    if not path.exists():
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    elif not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def connect(
    path: Path | None, busy_seconds: float, *, isolation_level: Literal["DEFERRED"] | None = "DEFERRED"
) -> sqlite3.Connection:
    """Return a connection, which any thread can use, to an existing file. `path` None: to a database in memory.

    `busy_seconds`: the longest wait for a write of another process. `isolation_level` None: the caller starts
    transactions explicitly.
    """
    if path is None:
        return sqlite3.connect(":memory:", isolation_level=isolation_level, check_same_thread=False)
    address = f"file:{quote(str(path.absolute()))}?mode=rw"
    return sqlite3.connect(
        address, timeout=busy_seconds, uri=True, isolation_level=isolation_level, check_same_thread=False
    )


def write_ahead(connection: sqlite3.Connection, synchronous: Synchronous) -> None:
    """Turn on write-ahead logging, and overwrite deleted data.

    With NORMAL, which is fast, committed changes survive a crash of the process. With FULL they also survive a power
    cut.
    """
    connection.execute("PRAGMA journal_mode = WAL").fetchall()
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("PRAGMA secure_delete = ON").fetchall()


def fold_log(connection: sqlite3.Connection) -> None:
    """Copy the write-ahead log into the file and truncate it, unless other connections still read the log."""
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def version_of(connection: sqlite3.Connection, known: int) -> int:
    """Return the schema version of the file: 0 if it is new, or else `known`.

    Raises DatabaseError if the file has another version, or belongs to another program.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, known):
        raise sqlite3.DatabaseError(f"its version is {version}, not {known}")
    return int(version)


def trim(connection: sqlite3.Connection, table: str, most: int) -> None:
    """Delete the least recently used rows until the sum of the column `size` is at most `most`.

    The table needs the columns `size` and `used`.
    """
    (total,) = connection.execute(f"SELECT sum(size) FROM {table}").fetchone()  # noqa: S608  # the name is a constant
    if (total or 0) > most:
        connection.execute(_TRIM.format(table=table), (most,))


_TRIM = """
    DELETE FROM {table} WHERE rowid IN (
        SELECT rowid FROM (SELECT rowid, sum(size) OVER (ORDER BY used DESC, rowid DESC) AS total FROM {table})
        WHERE total > ?
    )
"""
