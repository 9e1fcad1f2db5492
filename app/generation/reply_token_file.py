"""TokenSpan ids in a file: one table of SQLite, which several processes may share.

What it holds is digests and token ids, no text; it is readable to its owner alone. A write is whole or not there at
all, whenever the process dies. No error gets out of here: a damaged file is set aside for a fresh one, and where files
cannot be read or written, nothing is found and nothing kept any more. Either is told once, in the log.

Refuses to know what the digests are made of, and what is remembered in memory.
"""

import hashlib
import logging
import os
import sqlite3
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from app.private_database import PrivateDatabase, fold_log, trim

T = TypeVar("T")

MAX_SIZE = 4 << 20  # ids, and OVERHEAD for each reply: 16 MB of ids
OVERHEAD = 32  # what a reply takes besides its ids, counted in ids
MAX_SPANS_PER_PART = 256  # the newest are found
FILE_NAME = "replies.sqlite"

_VERSION = 1
_BUSY_SECONDS = 2.0  # for another process to end its write, which takes milliseconds
_PAUSES = (0.01, 0.1, 0.5, 0.0)  # seconds after each try; where a file is being made, SQLite does not wait by itself
_TABLE = """
    CREATE TABLE IF NOT EXISTS replies (
        key BLOB PRIMARY KEY, place BLOB, lead BLOB, lead_characters INTEGER, ids BLOB, size INTEGER, used INTEGER
    );
    CREATE INDEX IF NOT EXISTS by_place ON replies (place, used);
    CREATE INDEX IF NOT EXISTS by_lead ON replies (lead);
    CREATE INDEX IF NOT EXISTS by_use ON replies (used, size);
"""
_FIND = "SELECT lead, lead_characters, ids, used FROM replies WHERE place = ? ORDER BY used DESC, rowid DESC LIMIT ?"

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class TokenSpan:
    """Ids that a model generated in one go, as plain text, somewhere in a rendered text."""

    part_key: bytes  # digest of all parts of the text before the one that they stand in
    prefix_key: bytes  # digest of those and of the characters of that part in front of them
    prefix_characters: int  # how many those are
    ids: "array[int]"  # never empty
    stored: bool  # may be written to disk
    used: int = 0  # when, in seconds since the epoch
    text: bytes | None = None  # what the ids stand for, once somebody asked

    @property
    def key(self) -> bytes:
        return hashlib.sha256(self.prefix_key + self.ids.tobytes()).digest()

    @property
    def size(self) -> int:
        return len(self.ids) + OVERHEAD

    def continues(self, other: "TokenSpan") -> bool:
        """Whether it is the other one, of which more is known now."""
        return self.prefix_key == other.prefix_key and self.ids[: len(other.ids)] == other.ids


@dataclass(slots=True)
class Changes:
    """What the file does not know yet. What is forgotten goes first."""

    forgotten: set[bytes] = field(default_factory=set)  # leads
    replaced: list[bytes] = field(default_factory=list)  # keys of those that others go on from
    written: list[TokenSpan] = field(default_factory=list)  # new ones, and those used again

    def __bool__(self) -> bool:
        return bool(self.forgotten or self.written)


class ReplyTokenFile:
    """The table in `folder`, which is created with its first row. Safe for several threads: one writes, others read."""

    def __init__(self, folder: Path, *, max_size: int = MAX_SIZE) -> None:
        self._path = folder / FILE_NAME
        self._max_size = max_size
        self._reader = PrivateDatabase(self._path, _TABLE, _VERSION, _BUSY_SECONDS)
        self._writer = PrivateDatabase(self._path, _TABLE, _VERSION, _BUSY_SECONDS)
        self._files = 0  # that were set aside
        self._is_off = False

    def find(self, part_key: bytes) -> list[TokenSpan]:
        """What was generated there, oldest first."""
        return self._attempt(self._reader, lambda: self._find(part_key), [])

    def apply(self, changes: Changes) -> None:
        """Write `changes`: all of them, or none."""
        if changes.written or self._path.exists():
            self._attempt(self._writer, lambda: self._apply(changes), None)

    def close(self) -> None:
        """Let go of the file; what comes later opens it again."""
        for connection in (self._reader, self._writer):
            with connection.lock:
                connection.close()

    def _find(self, part_key: bytes) -> list[TokenSpan]:
        reader = self._reader.readable()
        if reader is None:
            return []
        rows = reader.execute(_FIND, (part_key, MAX_SPANS_PER_PART)).fetchall()
        return [span for row in reversed(rows) if (span := _span_of(part_key, row)) is not None]

    def _apply(self, changes: Changes) -> None:
        connection = self._writer.writable()
        with connection:
            connection.executemany("DELETE FROM replies WHERE lead = ?", [(key,) for key in changes.forgotten])
            connection.executemany("DELETE FROM replies WHERE key = ?", [(key,) for key in changes.replaced])
            connection.executemany(
                "INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?, ?, ?)", map(_row, changes.written)
            )
            trim(connection, "replies", self._max_size)
        if changes.forgotten:  # from the log of changes, too
            fold_log(connection)

    def _attempt(self, connection: PrivateDatabase, work: Callable[[], T], otherwise: T) -> T:
        for pause in _PAUSES:
            if self._is_off:
                return otherwise
            with connection.lock:
                files_before = self._files
                try:
                    if not self._path.exists():  # it may have been deleted meanwhile
                        connection.close()
                    return work()
                except (sqlite3.Error, OSError) as problem:
                    connection.close()
                    error = problem
            if not _is_busy(error):
                self._failed(error, files_before)
                return otherwise
            time.sleep(pause)
        return otherwise  # others have it: a later miss

    def _failed(self, error: Exception, files_before: int) -> None:
        """Set a damaged file aside, once; else leave files alone from now on."""
        with self._reader.lock, self._writer.lock:
            if self._is_off or self._files != files_before:  # somebody else was faster
                return
            self.close()
            damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
            if damaged and not self._files and self._set_aside():
                self._files += 1
                log.warning("%s is damaged (%s) and was set aside; a new one takes its place.", self._path, error)
                return
            self._is_off = True
            log.warning("%s cannot be used (%s): replies are remembered in memory alone.", self._path, error)

    def _set_aside(self) -> bool:
        try:
            os.replace(self._path, self._path.with_suffix(".damaged"))
            for suffix in ("-wal", "-shm"):  # they belong to the damaged one
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)
        except OSError:
            return False
        return True


def _is_busy(error: Exception) -> bool:
    """Whether another process has the file just now."""
    code: int = getattr(error, "sqlite_errorcode", 0)  # errors of Python's own have none
    return code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _row(span: TokenSpan) -> tuple[bytes, bytes, bytes, int, bytes, int, int]:
    part_key, prefix_key, ids = span.part_key, span.prefix_key, span.ids.tobytes()
    return span.key, part_key, prefix_key, span.prefix_characters, ids, span.size, span.used


def _span_of(part_key: bytes, row: tuple[object, ...]) -> TokenSpan | None:
    """A row, or None where it is none of ours: a column can hold a value of any type."""
    match row:
        case (bytes(prefix_key), int(prefix_characters), bytes(ids), int(used)) if ids and not len(ids) % 4:
            return TokenSpan(part_key, prefix_key, max(0, prefix_characters), array("I", ids), stored=True, used=used)
    return None
