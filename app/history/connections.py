"""Open the database file of a history: check it, migrate it to this version, and checkpoint its log often."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from app.history.digests import sign
from app.history.integrity import Key, check_integrity, try_writing, version_of
from app.history.schema import PAGE_SIZE, STEPS, VERSION
from app.private_database import connect, make_private, write_ahead

_BUSY_SECONDS = 0.2
_LOG_PAGES = 100  # a longer log is checkpointed by SQLite


def open_checked(path: Path) -> sqlite3.Connection:
    """Open or create a history. It is checked before anything is written.

    Raises sqlite3.Error, OverflowError, ValueError, or HistoryTooNew if it is damaged or too new.
    """
    make_private(path)
    connection = _connection(path)
    try:
        # rejects text that is not UTF-8, so the replacement below cannot hide damage
        unsigned = check_integrity(connection)
        connection.text_factory = lambda content: content.decode("utf-8", "replace")
        _migrate(connection)
        _sign_rows(connection, unsigned)
        try_writing(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def create_database(path: Path | None) -> sqlite3.Connection:
    """Create an empty history; without a path, in memory."""
    if path is not None:
        make_private(path)
    connection = _connection(path)
    try:
        _migrate(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _connection(path: Path | None) -> sqlite3.Connection:
    connection = connect(path, _BUSY_SECONDS, isolation_level=None)
    connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}").fetchall()
    return connection


def _migrate(connection: sqlite3.Connection) -> None:
    """Migrate step by step, one transaction each, so that the next start continues an interrupted migration."""
    write_ahead(connection, "FULL")
    for number in range(version_of(connection) + 1, VERSION + 1):
        reached = f"UPDATE about SET version = {number}; PRAGMA user_version = {number};"  # noqa: S608  # a number
        connection.executescript(f"BEGIN IMMEDIATE; {STEPS[number - 1]} {reached} COMMIT;")


def _sign_rows(connection: sqlite3.Connection, keys: Sequence[Key]) -> None:
    if keys:
        connection.execute("BEGIN IMMEDIATE")
        for table, key in keys:
            sign(connection, table, key)
        connection.execute("COMMIT")
