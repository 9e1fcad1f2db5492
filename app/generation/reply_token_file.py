"""The file of generated token ids: one SQLite table, which several processes may share.

It contains digests and token ids, no text, and only its owner can read it. A write is atomic, even if the process is
killed. This module raises no errors: a damaged file is renamed and replaced by a new one, and a file that cannot be
used is treated as empty. Either is logged once.
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

MAX_SIZE = 4 << 20  # size limit in ids, including OVERHEAD for each span: 16 MB
OVERHEAD = 32  # size of a span in addition to its ids, counted in ids
MAX_SPANS_PER_PART = 256  # limit of the spans that are read for a part; older ones are ignored
FILE_NAME = "replies.sqlite"

_VERSION = 1
_BUSY_SECONDS = 2.0  # seconds to wait for another process to finish its write, which takes milliseconds
# Pauses in seconds after each attempt. SQLite itself does not wait while another process creates the file.
_PAUSES = (0.01, 0.1, 0.5, 0.0)
_TABLE = """
    CREATE TABLE IF NOT EXISTS replies (
        key BLOB PRIMARY KEY, place BLOB, lead BLOB, lead_characters INTEGER, ids BLOB, size INTEGER, used INTEGER
    );
    CREATE INDEX IF NOT EXISTS by_place ON replies (place, used);
    CREATE INDEX IF NOT EXISTS by_lead ON replies (lead);
    CREATE INDEX IF NOT EXISTS by_use ON replies (used, size);
"""
_FIND = """
    SELECT lead, lead_characters, ids, used FROM replies WHERE place = ? ORDER BY used DESC, rowid DESC LIMIT ?
"""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class TokenSpan:
    """Token ids that a model generated without a break, as plain text, and their position in a rendered text."""

    part_key: bytes  # digest of all parts of the text before the one that contains the span
    prefix_key: bytes  # digest of those parts and of the text between them and the span
    prefix_characters: int  # number of characters of the part before the span
    ids: "array[int]"  # never empty
    stored: bool  # whether it may be written to disk
    used: int = 0  # time of the last use, in seconds since the epoch
    text: bytes | None = None  # the decoded ids; None: not decoded yet

    @property
    def key(self) -> bytes:
        return hashlib.sha256(self.prefix_key + self.ids.tobytes()).digest()

    @property
    def size(self) -> int:
        return len(self.ids) + OVERHEAD

    def continues(self, other: "TokenSpan") -> bool:
        """Whether this span is a longer version of `other`."""
        return self.prefix_key == other.prefix_key and self.ids[: len(other.ids)] == other.ids


@dataclass(slots=True)
class Changes:
    """Changes that are not written to the file yet. Deletions are applied first."""

    forgotten: set[bytes] = field(default_factory=set)  # prefix keys of spans to delete
    replaced: list[bytes] = field(default_factory=list)  # keys of spans that a longer version replaces
    written: list[TokenSpan] = field(default_factory=list)  # new spans, and spans that were used again

    def __bool__(self) -> bool:
        return bool(self.forgotten or self.written)


class ReplyTokenFile:
    """The table in `folder`, created with its first row. Thread-safe: one thread writes, others read."""

    def __init__(self, folder: Path, *, max_size: int = MAX_SIZE) -> None:
        self._path = folder / FILE_NAME
        self._max_size = max_size
        self._reader = PrivateDatabase(self._path, _TABLE, _VERSION, _BUSY_SECONDS)
        self._writer = PrivateDatabase(self._path, _TABLE, _VERSION, _BUSY_SECONDS)
        self._files = 0  # number of damaged files that were renamed
        self._is_off = False

    def find(self, part_key: bytes) -> list[TokenSpan]:
        """Return the spans of a text part, oldest first."""
        return self._attempt(self._reader, lambda: self._find(part_key), [])

    def apply(self, changes: Changes) -> None:
        """Write `changes` in one transaction."""
        if changes.written or self._path.exists():
            self._attempt(self._writer, lambda: self._apply(changes), None)

    def close(self) -> None:
        """Close the file. A later call opens it again."""
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
        if changes.forgotten:  # also remove the rows from the write-ahead log
            fold_log(connection)

    def _attempt(self, connection: PrivateDatabase, work: Callable[[], T], otherwise: T) -> T:
        for pause in _PAUSES:
            if self._is_off:
                return otherwise
            with connection.lock:
                files_before = self._files
                try:
                    if not self._path.exists():  # another process may have deleted it
                        connection.close()
                    return work()
                except (sqlite3.Error, OSError) as problem:
                    connection.close()
                    error = problem
            if not _is_busy(error):
                self._failed(error, files_before)
                return otherwise
            time.sleep(pause)
        return otherwise  # Another process holds the lock. The only cost is a cache miss later.

    def _failed(self, error: Exception, files_before: int) -> None:
        """Rename a damaged file, once. After any further failure, stop using files."""
        with self._reader.lock, self._writer.lock:
            if self._is_off or self._files != files_before:  # another thread has handled it
                return
            self.close()
            damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
            if damaged and not self._files and self._set_aside():
                self._files += 1
                log.warning("%s is damaged (%s) and was renamed. A new file replaces it.", self._path, error)
                return
            self._is_off = True
            log.warning("%s cannot be used (%s). Replies are remembered only in memory.", self._path, error)

    def _set_aside(self) -> bool:
        try:
            os.replace(self._path, self._path.with_suffix(".damaged"))
            for suffix in ("-wal", "-shm"):  # these files belong to the damaged file, so they are deleted
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)
        except OSError:
            return False
        return True


def _is_busy(error: Exception) -> bool:
    """Whether another process holds a lock on the file."""
    code: int = getattr(error, "sqlite_errorcode", 0)  # errors that Python itself raises have no code
    return code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _row(span: TokenSpan) -> tuple[bytes, bytes, bytes, int, bytes, int, int]:
    part_key, prefix_key, ids = span.part_key, span.prefix_key, span.ids.tobytes()
    return span.key, part_key, prefix_key, span.prefix_characters, ids, span.size, span.used


def _span_of(part_key: bytes, row: tuple[object, ...]) -> TokenSpan | None:
    """Return the span in a row, or None if the row is malformed: a SQLite column can hold any type."""
    match row:
        case (bytes(prefix_key), int(prefix_characters), bytes(ids), int(used)) if ids and not len(ids) % 4:
            return TokenSpan(part_key, prefix_key, max(0, prefix_characters), array("I", ids), stored=True, used=used)
    return None
