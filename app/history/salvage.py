"""Read the rows of a damaged history from its pages and its log, and report the losses.

A row belongs to the table whose columns its values fit best, and its digest shows whether it is unchanged. The index of
messages and references between rows show which rows existed. To find missing rows, damaged pages and older versions of
pages in the log are searched at every byte.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from app.history.column_types import NUMBER, OPTIONAL_NUMBER, ColumnType, Row, Value, is_id
from app.history.digests import is_sound
from app.history.files import read_start, shm_path, wal_path
from app.history.pages import (
    MalformedRow,
    Pages,
    index_entries,
    is_cut,
    is_suspect,
    read_pages,
    row_at,
    states_possible_rows,
    table_cells,
)
from app.history.records import State
from app.history.schema import COLUMNS
from app.history.wal import Frame, read_wal

# Number of values -> tables with that number of columns, and whether the last value is a digest.
_LAYOUTS: Mapping[int, Sequence[tuple[str, bool]]] = {
    count: [(table, count > len(names)) for table, names in COLUMNS.items() if count - len(names) in (0, 1)]
    for count in range(2 * max(map(len, COLUMNS.values())))
}
_FITTING = 2 / 3  # share of a row's values that must have the types of the table's columns


@dataclass(frozen=True, slots=True)
class FoundRow:
    """A row that was found on a page."""

    table: str
    id: int
    row: Row  # values without the digest; damaged ones are replaced
    is_sound: bool  # whether it is unchanged
    has_digest: bool


@dataclass(slots=True)
class Salvage:
    """The readable rows of a history, and the losses."""

    rows: dict[str, dict[int, Row]] = field(default_factory=lambda: {table: {} for table in COLUMNS})
    changed: dict[str, set[int]] = field(default_factory=lambda: {table: set() for table in COLUMNS})
    lost: dict[str, set[int]] = field(default_factory=lambda: {table: set() for table in COLUMNS})
    indexed: Mapping[int, int] = field(default_factory=dict)  # message id -> chat id, from the index of messages
    unreadable: int = 0  # number of further lost rows, whose tables are unknown
    gaps: list[str] = field(default_factory=list)  # lost parts of the files, with unknown contents

    def add(self, found: FoundRow) -> None:
        """Keep a row, unless a sound row with the same id was found before."""
        if found.is_sound or found.id not in self.rows[found.table] or found.id in self.changed[found.table]:
            self.rows[found.table][found.id] = found.row
            self.changed[found.table].discard(found.id)
            if not found.is_sound:
                self.changed[found.table].add(found.id)

    def restore_committed(self, before: Iterable[FoundRow]) -> None:
        """Add missing rows from `before`, and replace damaged rows with sound ones from there.

        `before` was read without the damaged part of the log, which may contain uncommitted changes. A reply that was
        still being generated keeps its later, longer version.
        """
        for found in before:
            if self.lacks(found):
                self.add(found)
            elif found.id in self.changed[found.table] and found.is_sound and State.COMING not in found.row:
                self.rows[found.table][found.id] = found.row

    def assign_chats(self) -> None:
        """Assign damaged messages to the chats that the index names, or to a new chat."""
        messages, other = self.rows["messages"], max(self.rows["chats"], default=0) + 1
        for message in self.changed["messages"]:
            _, chat, *rest = messages[message]
            messages[message] = (message, self.indexed.get(message) or chat or other, *rest)

    def lacks(self, found: FoundRow) -> bool:
        return found.id not in self.rows[found.table]


def salvage(path: Path) -> Salvage:
    """Read the history at `path` and its log. Raises OSError."""
    log = read_wal(read_start(wal_path(path)), read_start(shm_path(path)))
    pages = read_pages(path)
    _apply(log.frames[: log.applied], pages)
    salvaged = Salvage()
    salvaged.gaps += ["changes stored only in its log"] if log.is_damaged and not log.is_complete else []
    salvaged.gaps += ["the end of its file"] if is_cut(pages) else []
    settled = list(_all_rows(pages)) if log.is_damaged else []
    older = _apply(log.frames[log.applied :], pages) if log.is_damaged else []
    for found in _all_rows(pages):
        if found is None:
            salvaged.unreadable += 1
        else:
            salvaged.add(found)
    salvaged.restore_committed(found for found in settled if found is not None)
    salvaged.indexed = _indexed(pages)
    salvaged.assign_chats()
    has_false_header = any(
        table_cells(page, number) and not states_possible_rows(page, number) for number, page in enumerate(pages)
    )
    if salvaged.unreadable or has_false_header or any(_missing(salvaged).values()):
        _look_again(salvaged, pages, older)
    salvaged.lost.update(_missing(salvaged))
    salvaged.unreadable = max(0, salvaged.unreadable - sum(map(len, salvaged.lost.values())))
    return salvaged


def _apply(frames: Sequence[Frame], pages: list[bytes]) -> Pages:
    """Replace pages with their versions in the log. Returns the replaced versions, latest first."""
    older: list[bytes] = []
    most = len(pages) + len(frames)
    for frame in frames:
        if 0 < frame.page <= most:
            pages += [b""] * (frame.page - len(pages))
            older.append(pages[frame.page - 1])
            pages[frame.page - 1] = frame.content
    return older[::-1]


def _all_rows(pages: Pages) -> Iterator[FoundRow | None]:
    return chain.from_iterable(_rows(pages, page, number) for number, page in enumerate(pages))


def _rows(pages: Pages, page: bytes, number: int) -> Iterator[FoundRow | None]:
    """Yield the rows of a page that belong to the history's tables; None for an unreadable one.

    If the header states more rows than fit, most of its entries never were rows, so unreadable ones are left out.
    """
    for offset in table_cells(page, number):
        try:
            found = _found(*row_at(pages, page, offset))
        except MalformedRow:
            if states_possible_rows(page, number):
                yield None
        else:
            if found is not None:
                yield found


def _found(rowid: int, values: Row) -> FoundRow | None:
    """Return the row of the table that fits best, or None if none fits."""
    layouts = _LAYOUTS.get(len(values), ())
    if not layouts or values[0] is not None:  # SQLite stores NULL in the id column, because the rowid is the id
        return None
    return max((_fitted(table, rowid, values, has_digest) for table, has_digest in layouts), key=lambda fit: fit[0])[1]


def _fitted(table: str, rowid: int, values: Row, has_digest: bool) -> tuple[float, FoundRow | None]:
    """Return the share of values that fit the columns of a table, and the row if the share is high enough."""
    kinds = list(COLUMNS[table].values())
    if not kinds[0].holds(rowid):
        return 0.0, None
    row = (rowid, *map(_real, kinds[1:], values[1:]))
    share = sum(kind.holds(value) for kind, value in zip(kinds, row, strict=True)) / len(kinds)
    if share < _FITTING:
        return share, None
    repaired = tuple(map(ColumnType.repaired, kinds, row))
    sound = row == repaired and is_sound(table, row, values[-1] if has_digest else None)
    return share, FoundRow(table, rowid, repaired, sound, has_digest and values[-1] is not None)


def _real(kind: ColumnType, value: Value) -> Value:
    """Return a value of a REAL column as a float: SQLite stores whole numbers there as integers."""
    return float(value) if isinstance(value, int) and kind in (NUMBER, OPTIONAL_NUMBER) else value


def _indexed(pages: Pages) -> Mapping[int, int]:
    entries = chain.from_iterable(index_entries(pages, number) for number in range(len(pages)))
    return {entry[1]: entry[0] for entry in entries if len(entry) == 2 and is_id(entry[0]) and is_id(entry[1])}


def _missing(salvaged: Salvage) -> Mapping[str, set[int]]:
    """Return ids of messages and chats that other rows or the index refer to, but that were not found."""
    messages, chats = salvaged.rows["messages"], salvaged.rows["chats"]
    sound = [row for message, row in messages.items() if message not in salvaged.changed["messages"]]
    parents = {row[2] for row in sound}
    shown = {row[-1] for chat, row in chats.items() if chat not in salvaged.changed["chats"]}
    chats_of = {row[1] for row in sound}
    known = {"messages": {*salvaged.indexed, *parents, *shown}, "chats": {*salvaged.indexed.values(), *chats_of}}
    return {table: {one for one in ids if is_id(one)} - salvaged.rows[table].keys() for table, ids in known.items()}


def _look_again(salvaged: Salvage, pages: Pages, older: Pages) -> None:
    """Search for missing rows in damaged pages, ignoring their headers, and in older versions of pages."""
    for number, page in enumerate(pages):
        if is_suspect(page, number, len(pages)) or None in _rows(pages, page, number):
            for found in _carved(pages, page):
                if salvaged.lacks(found) and found.is_sound:
                    salvaged.add(found)
                    salvaged.unreadable = max(0, salvaged.unreadable - 1)
    missing = _missing(salvaged)
    for page in older if any(missing.values()) else ():
        for row in _rows(pages, page, 1):
            if row is not None and row.id in missing.get(row.table, ()) and salvaged.lacks(row):
                salvaged.add(row)


def _carved(pages: Pages, page: bytes) -> Iterator[FoundRow]:
    """Search every byte offset of a page for rows, and yield those that have a digest."""
    for offset in range(len(page)):
        try:
            found = _found(*row_at(pages, page, offset))
        except MalformedRow:
            continue
        if found is not None and found.has_digest:
            yield found
