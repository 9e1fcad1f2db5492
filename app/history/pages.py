"""Read rows and index entries from single pages of an SQLite file, without using its B-trees and schema.

The format is https://sqlite.org/fileformat2.html#b_tree_pages. Pages are not trusted: invalid rows are left out.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from app.history.column_types import Row, Value
from app.history.schema import PAGE_SIZE

_TABLE_LEAF, _INDEX_LEAF, _INDEX_INTERIOR = 0x0D, 0x0A, 0x02
_LEAST_CELL = 6  # bytes that the smallest row takes on a page, with its pointer
_INTEGER_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}  # serial type -> bytes of the integer

Pages = Sequence[bytes]


class MalformedRow(Exception):
    """The bytes are not a valid row."""


def read_pages(path: Path) -> list[bytes]:
    """Return the pages of a file, with empty ones where the disk cannot be read. None if no file exists. Raises
    OSError.
    """
    pages = []
    try:
        with open(path, "rb") as file:
            for start in range(0, os.fstat(file.fileno()).st_size, PAGE_SIZE):
                file.seek(start)
                try:
                    pages.append(file.read(PAGE_SIZE))
                except OSError:
                    pages.append(b"")
    except FileNotFoundError:
        return []
    return pages


def is_cut(pages: Pages) -> bool:
    """Whether a file has fewer pages than its header states, or ends within a page."""
    stated = int.from_bytes(pages[0][28:32], "big") if pages else 0
    return len(pages) < stated or any(len(page) % PAGE_SIZE for page in pages)


def table_cells(page: bytes, number: int) -> list[int]:
    """Return the offsets of the rows on a page, if it is a leaf of a table. `number` counts from 0."""
    head = 100 if number == 0 else 0
    return _cells(page, head, 8) if page[head : head + 1] == bytes([_TABLE_LEAF]) else []


def states_possible_rows(page: bytes, number: int) -> bool:
    """Whether as many rows as the header of a page states fit on it. Otherwise the header is damaged."""
    head = 100 if number == 0 else 0
    count = int.from_bytes(page[head + 3 : head + 5], "big")
    return count * _LEAST_CELL <= PAGE_SIZE - head


def row_at(pages: Pages, page: bytes, offset: int) -> tuple[int, Row]:
    """Return the id and the columns of the row at `offset`. Raises MalformedRow.

    If the row continues on damaged pages, the readable columns and the start of the cut text are returned.
    """
    try:
        size, offset = _varint(page, offset)
        rowid, offset = _varint(page, offset)
        if not 0 < size <= len(pages) * PAGE_SIZE:
            raise MalformedRow
        return rowid, _values(_payload(pages, page, offset, size, PAGE_SIZE - 35))
    except (IndexError, struct.error) as problem:
        raise MalformedRow from problem


def index_entries(pages: Pages, number: int) -> Iterator[Row]:
    """Yield the entries of a page if it belongs to an index."""
    page = pages[number]
    kind = page[0] if page else 0
    if kind not in (_INDEX_LEAF, _INDEX_INTERIOR) or number == 0:
        return
    before = 4 if kind == _INDEX_INTERIOR else 0  # bytes of the child's page number at the start of each cell
    for cell in _cells(page, 0, 8 + before):
        try:
            size, offset = _varint(page, cell + before)
            if 0 < size <= PAGE_SIZE:
                yield _values(_payload(pages, page, offset, size, (PAGE_SIZE - 12) * 64 // 255 - 23))
        except (MalformedRow, IndexError, struct.error):
            continue


def is_suspect(page: bytes, number: int, num_pages: int) -> bool:
    """Whether a page may contain more rows than `table_cells` finds: its header is invalid or its type is unknown."""
    head = 100 if number == 0 else 0
    if len(page) < PAGE_SIZE:
        return bool(page.strip(b"\0"))
    kind, free, _, start = struct.unpack_from(">BHHH", page, head)
    if kind == _TABLE_LEAF:
        cells = _cells(page, head, 8)
        return not states_possible_rows(page, number) or start not in (min(cells, default=PAGE_SIZE), free)
    # an overflow page or a free page starts with the number of another page
    return kind not in (_INDEX_LEAF, _INDEX_INTERIOR) and int.from_bytes(page[:4], "big") > num_pages


def _cells(page: bytes, head: int, head_size: int) -> list[int]:
    if len(page) < head + head_size:
        return []
    [count] = struct.unpack_from(">H", page, head + 3)
    first = head + head_size
    count = min(count, (len(page) - first) // 2)
    return list(struct.unpack_from(f">{count}H", page, first))


def _payload(pages: Pages, page: bytes, offset: int, size: int, most: int) -> bytes:
    """Return the bytes of a row, including overflow pages; fewer than `size` if one of them is damaged."""
    if size <= most:
        return page[offset : offset + size]
    least = (PAGE_SIZE - 12) * 32 // 255 - 23
    local = least + (size - least) % (PAGE_SIZE - 4)
    local = local if local <= most else least
    parts, left = [page[offset : offset + local]], size - local
    following = int.from_bytes(page[offset + local : offset + local + 4], "big")
    while left > 0 and 0 < following <= len(pages):
        content = pages[following - 1]
        parts.append(content[4 : 4 + left])
        following, left = int.from_bytes(content[:4], "big"), left - (PAGE_SIZE - 4)
    return b"".join(parts)


def _values(payload: bytes) -> Row:
    """Decode the columns of a row from SQLite's record format."""
    head_size, offset = _varint(payload, 0)
    if head_size > len(payload):
        raise MalformedRow
    body, values = head_size, []
    while offset < head_size:
        kind, offset = _varint(payload, offset)
        size = _size_of(kind)
        values.append(_value(kind, payload[body : body + size], size))
        body += size
    return tuple(values)


def _size_of(kind: int) -> int:
    if kind >= 12:
        return (kind - 12) // 2
    return 8 if kind == 7 else _INTEGER_BYTES.get(kind, 0)


def _value(kind: int, content: bytes, size: int) -> Value:
    if kind >= 12:
        return content.decode("utf-8", "replace") if kind % 2 else content
    if kind in (8, 9):
        return kind - 8
    if kind in (10, 11) or kind < 0:
        raise MalformedRow
    if kind == 0 or len(content) < size:
        return None
    return float(struct.unpack(">d", content)[0]) if kind == 7 else int.from_bytes(content, "big", signed=True)


def _varint(content: bytes, offset: int) -> tuple[int, int]:
    """Return a number in SQLite's variable-length format, and the offset after it."""
    number = 0
    for count in range(9):
        byte = content[offset + count]
        if count == 8:
            number = number << 8 | byte
        else:
            number = number << 7 | byte & 0x7F
            if byte < 0x80:
                return number, offset + count + 1
    return number - (1 << 64) if number >> 63 else number, offset + 9
