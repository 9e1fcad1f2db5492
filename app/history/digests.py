"""Checksums of rows, which detect changes made outside this program.

SQLite checks the structure of a file but not the content of a string: a file with a flipped bit in a string is still
valid.
"""

import sqlite3
import zlib

import msgspec

from app.history.column_types import Row
from app.history.schema import COLUMNS
from app.history.sqlite_errors import Damaged

CHANGED = "rows have changed since they were written"


def digest_of(row: Row) -> int:
    """Return the CRC-32 of a row without its digest. It detects all changes of up to 3 bits."""
    return zlib.crc32(msgspec.msgpack.encode(row))


def sign(connection: sqlite3.Connection, table: str, key: object) -> None:
    """Store the digest of a changed row, in the same transaction. `key` is the row's id."""
    columns = COLUMNS[table]
    select = f"SELECT {', '.join(columns)} FROM {table} WHERE rowid = ?"  # noqa: S608  # names of the schema
    row = connection.execute(select, (key,)).fetchone()
    if row is not None:
        update = f"UPDATE {table} SET digest = ? WHERE rowid = ?"  # noqa: S608  # a name of the schema
        connection.execute(update, (digest_of(row), key))


def is_sound(table: str, row: Row, digest: object) -> bool:
    """Whether a row is unchanged, according to its digest.

    A row without a digest counts as unchanged if its values have valid types.
    """
    if digest is None:
        return all(kind.holds(value) for kind, value in zip(COLUMNS[table].values(), row, strict=True))
    return digest == digest_of(row)


def checked(table: str, row: Row) -> Row:
    """Return a row without its last value, the digest. Raises Damaged if it does not match."""
    if not is_sound(table, row[:-1], row[-1]):
        raise Damaged(CHANGED)
    return row[:-1]
