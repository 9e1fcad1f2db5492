"""What can be read of a damaged history file, page by page, without the help of its trees and directories.

Reads the file format of SQLite (https://sqlite.org/fileformat2.html): each leaf page of a table is read alone, and a
row belongs to the table that has as many columns. Changes in the write-ahead log are applied first, whatever their
checksums are. Nothing is trusted: a page, a cell or a row that makes no sense is left out.
"""

import sqlite3
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from app.history.records import Role, State
from app.history.schema import COLUMNS, PAGE_SIZE

Value = None | int | float | str | bytes
Row = tuple[Value, ...]
Rows = Mapping[str, list[Row]]  # by table

RESCUED_TITLE = "Recovered chat"

_LEAF = 0x0D
_WAL_HEADER, _FRAME_HEADER = 32, 24
_MAX_TEXT = 64 << 20  # bytes of one row
_TABLES = {len(columns): table for table, columns in COLUMNS.items()}
_INTEGER_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}  # by serial type


class Nonsense(Exception):
    """What is read there cannot be a row."""


def salvaged(path: Path) -> Rows:
    """The rows of all tables, the latest of each. Raises OSError."""
    found: dict[str, dict[int, Row]] = {table: {} for table in COLUMNS}
    pages = _pages(path)
    for number in range(len(pages)):
        for rowid, row in _rows(pages, number):
            table = _TABLES.get(len(row))
            if table and _is_likely(table, row):
                found[table][rowid] = row
    return {table: [(rowid, *row[1:]) for rowid, row in sorted(rows.items())] for table, rows in found.items()}


def fill(connection: sqlite3.Connection, rows: Rows) -> Mapping[str, int]:
    """Put rows into fresh tables; gives how many of each table went in. Messages without their chat get one."""
    chats = {row[0] for row in rows["chats"]}
    lost = {row[1]: row[-1] for row in rows["messages"] if row[1] not in chats}
    made: list[Row] = [
        (chat, RESCUED_TITLE, 0, "{}", "{}", 0, 0, created, created, None, None) for chat, created in lost.items()
    ]
    counts = {}
    connection.execute("BEGIN IMMEDIATE")
    for table, columns in COLUMNS.items():
        marks = ", ".join("?" * len(columns))
        statement = f"INSERT OR IGNORE INTO {table} ({', '.join(columns)}) VALUES ({marks})"  # noqa: S608  # of a table
        wanted = [*rows[table], *made] if table == "chats" else rows[table]
        counts[table] = connection.executemany(statement, wanted).rowcount
    connection.execute("COMMIT")
    return counts


def _pages(path: Path) -> list[bytes]:
    """The pages of the file, with the committed changes of the log in front of it."""
    content = path.read_bytes()
    pages = [content[start : start + PAGE_SIZE] for start in range(0, len(content), PAGE_SIZE)]
    log = Path(f"{path}-wal")
    if log.exists():
        for number, page in _logged(log.read_bytes()):
            if number <= len(pages) + len(page):
                pages += [b""] * (number - len(pages))
                pages[number - 1] = page
    return pages


def _logged(log: bytes) -> Iterator[tuple[int, bytes]]:
    """The pages of the log up to its last commit, oldest first, with their numbers from 1 on."""
    salt, frames, committed = log[16:24], [], 0
    for start in range(_WAL_HEADER, len(log) - _FRAME_HEADER - PAGE_SIZE + 1, _FRAME_HEADER + PAGE_SIZE):
        number, size = struct.unpack_from(">II", log, start)
        if log[start + 8 : start + 16] != salt or not number:
            continue
        body = start + _FRAME_HEADER
        frames.append((number, log[body : body + PAGE_SIZE]))
        committed = len(frames) if size else committed
    yield from frames[:committed]


def _rows(pages: list[bytes], number: int) -> Iterator[tuple[int, Row]]:
    """The rows of one page, if it is a leaf of a table, with their ids."""
    page, head = pages[number], 100 if number == 0 else 0
    if len(page) < head + 8 or page[head] != _LEAF:
        return
    [cells] = struct.unpack_from(">H", page, head + 3)
    for cell in range(min(cells, (len(page) - head - 8) // 2)):
        [place] = struct.unpack_from(">H", page, head + 8 + 2 * cell)
        try:
            yield _row(pages, page, place)
        except (Nonsense, IndexError, struct.error):
            continue


def _row(pages: list[bytes], page: bytes, place: int) -> tuple[int, Row]:
    size, place = _varint(page, place)
    rowid, place = _varint(page, place)
    if not 0 < size <= _MAX_TEXT:
        raise Nonsense
    return rowid, _values(_payload(pages, page, place, size))


def _payload(pages: list[bytes], page: bytes, place: int, size: int) -> bytes:
    """The bytes of a row, those that did not fit on its page included."""
    most, least = PAGE_SIZE - 35, (PAGE_SIZE - 12) * 32 // 255 - 23
    if size <= most:
        return _exactly(page[place : place + size], size)
    local = least + (size - least) % (PAGE_SIZE - 4)
    local = local if local <= most else least
    parts, left = [_exactly(page[place : place + local], local)], size - local
    [following] = struct.unpack_from(">I", page, place + local)
    while left > 0:
        if not 0 < following <= len(pages):
            raise Nonsense
        [after] = struct.unpack_from(">I", pages[following - 1])
        parts.append(pages[following - 1][4 : 4 + left])
        following, left = after, left - (PAGE_SIZE - 4)
    return _exactly(b"".join(parts), size)


def _values(payload: bytes) -> Row:
    """The columns of a row, from its record format."""
    head_size, place = _varint(payload, 0)
    body, values = head_size, []
    while place < head_size:
        kind, place = _varint(payload, place)
        size = _size_of(kind)
        values.append(_value(kind, _exactly(payload[body : body + size], size)))
        body += size
    return tuple(values)


def _size_of(kind: int) -> int:
    if kind >= 12:
        return (kind - 12) // 2
    return 8 if kind == 7 else _INTEGER_BYTES.get(kind, 0)


def _value(kind: int, content: bytes) -> Value:
    if kind == 0:
        return None
    if kind in _INTEGER_BYTES:
        return int.from_bytes(content, "big", signed=True)
    if kind == 7:
        return float(struct.unpack(">d", content)[0])
    if kind in (8, 9):
        return kind - 8
    if kind < 12:
        raise Nonsense
    return content.decode("utf-8", "replace") if kind % 2 else content


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """A number of SQLite's variable length, and the place behind it."""
    number = 0
    for count in range(9):
        byte = content[place + count]
        if count == 8:
            number = number << 8 | byte
        else:
            number = number << 7 | byte & 0x7F
            if byte < 0x80:
                return number, place + count + 1
    return number - (1 << 64) if number >> 63 else number, place + 9


def _exactly(content: bytes, size: int) -> bytes:
    if len(content) != size:
        raise Nonsense
    return content


def _is_likely(table: str, row: Row) -> bool:
    """Whether a row has values of the types that the table's columns have."""
    match table, row:
        case "chats", (None, str(), int(), str(), str(), int(), int(), created, changed, deleted, shown):
            return _times(created, changed) and (deleted is None or _times(deleted)) and _is_id(shown)
        case "messages", (None, int(), parent, role, str(), str(), str(), thought, str(), state, str(), created):
            return _times(created, thought) and _is_id(parent) and role in set(Role) and state in set(State)
        case "drafts", (None, str(), changed):
            return _times(changed)
        case "inputs", (None, chat, str(), created):
            return _times(created) and _is_id(chat)
        case "presets", (None, str(), str(), created, changed):
            return _times(created, changed)
    return False


def _times(*values: Value) -> bool:
    """SQLite stores a whole REAL as an integer."""
    return all(isinstance(value, int | float) and value == value for value in values)


def _is_id(value: Value) -> bool:
    return value is None or isinstance(value, int)
