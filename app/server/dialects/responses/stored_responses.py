"""Stored responses: read again by clients, and continued by `previous_response_id`.

One SQLite table, in a file that only its owner can read and that several servers may share, or in memory. The size is
bounded; the least recently used response is deleted first. If the file cannot be used, responses are not stored and the
log reports it; no reply fails because of that.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from app.generation.conversation import Message
from app.private_database import PrivateDatabase, fold_log, trim
from app.server.dialects.responses.input_items import InputItem, messages_of
from app.server.dialects.responses.tools import qualified

T = TypeVar("T")

FILE_NAME = "responses.sqlite"
MAX_BYTES = 256 << 20
ROW_BYTES = 512  # size in bytes of a response in addition to its texts
MAX_CHAIN = 4096  # longest chain of responses that continue each other

_VERSION = 1
_BUSY_SECONDS = 5.0  # maximum wait for a write of another server
_TABLE = """
    CREATE TABLE IF NOT EXISTS responses (
        id TEXT PRIMARY KEY, owner TEXT, previous TEXT, body BLOB, input BLOB, size INTEGER, used INTEGER
    );
    CREATE INDEX IF NOT EXISTS by_use ON responses (used, size);
"""
_CHAIN = """
    WITH RECURSIVE chain(depth, id, owner, previous, body, input) AS (
        SELECT 0, id, owner, previous, body, input FROM responses WHERE id = ?1 AND owner = ?2
        UNION ALL
        SELECT depth + 1, r.id, r.owner, r.previous, r.body, r.input
        FROM responses r JOIN chain ON r.id = chain.previous WHERE r.owner = ?2 AND depth < ?3
    )
    SELECT id, owner, previous, body, input FROM chain ORDER BY depth DESC
"""
_PUT = """
    INSERT OR REPLACE INTO responses
    VALUES (?, ?, ?, ?, ?, ?, (SELECT coalesce(max(used), 0) + 1 FROM responses))
"""
_USE = "UPDATE responses SET used = (SELECT max(used) + 1 FROM responses) WHERE id = ?"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and its input."""

    id: str
    owner: str  # cache salt of the callers who may read the response
    previous: str | None  # id of the response that it continues
    body: bytes  # JSON, like the next field
    input: bytes  # input items of its request


class StoredResponses:
    """Responses in one folder, or in memory."""

    def __init__(self, folder: Path | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = None if folder is None else folder / FILE_NAME
        self._max_bytes = max_bytes
        self._database = PrivateDatabase(self._path, _TABLE, _VERSION, _BUSY_SECONDS)

    async def put(self, stored: StoredResponse) -> None:
        await self._on_thread(lambda connection: self._put(connection, stored), None)

    async def chain(self, id: str, owner: str) -> Sequence[StoredResponse]:  # noqa: A002
        """Return a response and all responses that it continues, oldest first; empty if it is not stored.

        If the oldest ones were deleted, the first returned response has a `previous` that is not stored.
        """
        return await self._on_thread(lambda connection: self._chain(connection, id, owner), [])

    async def get(self, id: str, owner: str) -> StoredResponse | None:  # noqa: A002
        query = "SELECT id, owner, previous, body, input FROM responses WHERE id = ? AND owner = ?"
        rows: list[tuple[str, str, str | None, bytes, bytes]] = await self._on_thread(
            lambda connection: connection.execute(query, (id, owner)).fetchall(), []
        )
        return StoredResponse(*rows[0]) if rows else None

    async def has_successor(self, id: str, owner: str) -> bool:  # noqa: A002
        """Whether another response continues it."""
        query = "SELECT 1 FROM responses WHERE previous = ? AND owner = ? LIMIT 1"
        rows: list[tuple[int]] = await self._on_thread(
            lambda connection: connection.execute(query, (id, owner)).fetchall(), []
        )
        return bool(rows)

    async def delete(self, id: str, owner: str) -> bool:  # noqa: A002
        """Delete a response. Returns whether it existed."""
        return await self._on_thread(lambda connection: self._delete(connection, id, owner), False)

    def close(self) -> None:
        with self._database.lock:
            self._database.close()

    def _put(self, connection: sqlite3.Connection, stored: StoredResponse) -> None:
        size = ROW_BYTES + len(stored.body) + len(stored.input)
        row = (stored.id, stored.owner, stored.previous, stored.body, stored.input, size)
        with connection:
            connection.execute(_PUT, row)
            trim(connection, "responses", self._max_bytes)

    def _chain(self, connection: sqlite3.Connection, id: str, owner: str) -> list[StoredResponse]:  # noqa: A002
        found = [StoredResponse(*row) for row in connection.execute(_CHAIN, (id, owner, MAX_CHAIN))]
        with connection:
            connection.executemany(_USE, [(one.id,) for one in found])
        return found

    def _delete(self, connection: sqlite3.Connection, id: str, owner: str) -> bool:  # noqa: A002
        with connection:
            deleted = connection.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (id, owner)).rowcount
        fold_log(connection)  # removes it from the write-ahead log
        return deleted > 0

    async def _on_thread(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        return await asyncio.to_thread(self._attempt, work, otherwise)

    def _attempt(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        with self._database.lock:
            try:
                return work(self._database.writable())
            except (sqlite3.Error, OSError) as problem:
                self._database.close()
                log.warning(
                    "%s cannot be used (%s): responses are not stored. Delete the file, and restart the server.",
                    self._path,
                    problem,
                )
                return otherwise


class _Continuation(Struct):
    """The fields of a response that are needed to continue or forget it."""

    output: list[InputItem]
    model: str | None = None  # null: the default model
    instructions: str | None = None


_items = msgspec.json.Decoder(list[InputItem])
_continuation = msgspec.json.Decoder(_Continuation)


def request_items(stored: StoredResponse) -> list[InputItem]:
    """Return the input items of a response."""
    return _items.decode(stored.input)


def instructions_of(stored: StoredResponse) -> str | None:
    """Return the instructions of a response."""
    return _continuation.decode(stored.body).instructions


def model_of(stored: StoredResponse) -> str | None:
    """Return the name of the model that generated a response."""
    return _continuation.decode(stored.body).model


def items_of(chain: Sequence[StoredResponse]) -> list[InputItem]:
    """Return the items of all responses, oldest first."""
    return [item for one in chain for item in (*request_items(one), *_continuation.decode(one.body).output)]


def conversation_of(chain: Sequence[StoredResponse]) -> tuple[list[Message], list[Message]]:
    """Return the messages of a chain, and of the chain without its last response.

    Both have the last response's instructions, and no tools.
    """
    instructions = _continuation.decode(chain[-1].body).instructions
    whole, before = (messages_of(instructions, items_of(some), (), qualified) for some in (chain, chain[:-1]))
    return whole, before
