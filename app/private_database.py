"""SQLite files that their owner alone can read, and that several processes may share: made, opened and trimmed alike.

Refuses to know what is in them, and what is done where one cannot be used.
"""

import errno
import os
import sqlite3
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import quote

Synchronous: TypeAlias = Literal["NORMAL", "FULL"]


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
