"""Check a history when it is opened: format, version, and damage.

Reads the schema, every page, and every row, which takes 3 ms per megabyte.
"""

import sqlite3
from collections.abc import Mapping
from functools import cache

from app.history.column_types import is_id
from app.history.digests import CHANGED, is_sound
from app.history.records import HistoryTooNew
from app.history.schema import ABOUT, COLUMNS, DIGESTS_SINCE, STEPS, VERSION
from app.history.sqlite_errors import Damaged

Key = tuple[str, int]  # table and row id

_SEARCHED_BYTES = 8 << 20  # size limit for checking the search index, which takes 8 ms per megabyte
_TRIAL = (
    "INSERT INTO chats (title, is_title_given, settings, trim, is_pinned, is_archived, created, changed)"
    " VALUES ('', 0, '', '', 0, 0, 0, 0)",
    "INSERT INTO messages (chat, role, text, attachments, reasoning, reasoning_seconds, model, state, usage, created)"
    " VALUES (last_insert_rowid(), '', 'one', '', '', 0, '', '', '', 0)",
    "UPDATE messages SET text = 'another' WHERE id = last_insert_rowid()",
)


def check_integrity(connection: sqlite3.Connection) -> list[Key]:
    """Check everything. Returns the rows without a digest, which another program wrote.

    Raises Damaged or another sqlite3.Error, and HistoryTooNew for a history of a newer program.
    """
    schema = _schema(connection)
    version = version_of(connection)
    if not version:
        _require(not schema, "it is not a chat history")
        return []
    _require(schema.get("about") == _entry("table", "about", ABOUT), "its version cannot be read")
    row = connection.execute("SELECT version FROM about").fetchone()
    _require(row == (version,), "it has two versions")
    if version > VERSION:
        raise too_new_error(version)
    _compare(schema, _expected(version))
    [answer] = connection.execute("PRAGMA integrity_check(1)").fetchone()
    _require(answer == "ok", "its pages are inconsistent")
    unsigned = _check_rows(connection, has_digests=version >= DIGESTS_SINCE)
    _check_ids(connection, schema)
    return unsigned


def try_writing(connection: sqlite3.Connection) -> None:
    """Write a message and roll back, which tests the triggers and the search index. Raises sqlite3.Error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        if _bytes(connection) <= _SEARCHED_BYTES:
            connection.execute("INSERT INTO words (words) VALUES ('integrity-check')")
        for statement in _TRIAL:
            connection.execute(statement)
    finally:
        connection.execute("ROLLBACK")


def version_of(connection: sqlite3.Connection) -> int:
    """Return the version of the history; 0 if it is empty."""
    [version] = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def too_new_error(version: int) -> HistoryTooNew:
    return HistoryTooNew(
        f"the chat history has version {version}, and this program supports up to {VERSION}",
        "Use the newer ingle that wrote it, or give this one another folder with INGLE_STATE_DIR.",
    )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Damaged(otherwise)


def _schema(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the definition of each table, index, trigger, and view, without SQLite's own statistics."""
    rows = connection.execute("SELECT name, type, tbl_name, sql FROM sqlite_schema").fetchall()
    return {str(name): _entry(*entry) for name, *entry in rows if not str(name).startswith("sqlite_stat")}


def _entry(kind: object, table: object, sql: object) -> str:
    return " ".join(f"{kind} {table} {sql}".split())


@cache
def _expected(version: int) -> Mapping[str, str]:
    """Return the schema of a history of that version."""
    connection = sqlite3.connect(":memory:")
    try:
        for step in STEPS[:version]:
            connection.executescript(step)
        return _schema(connection)
    finally:
        connection.close()


def _compare(schema: Mapping[str, str], expected: Mapping[str, str]) -> None:
    for name, entry in schema.items():
        _require(name in expected, f"it has a {entry.partition(' ')[0]} that is not Inglenook's, {name}")
        # Tables whose names start with words_ belong to SQLite, and their definitions depend on its version. Only the
        # triggers are Inglenook's.
        is_own = not name.startswith("words_") or entry.startswith("trigger")
        _require(not is_own or entry == expected[name], f"the definition of {name} has changed")
    _require(schema.keys() == expected.keys(), "tables are missing")


def _check_rows(connection: sqlite3.Connection, *, has_digests: bool) -> list[Key]:
    unsigned: list[Key] = []
    for table, columns in COLUMNS.items():
        names = ", ".join([*columns, "digest" if has_digests else "NULL"])
        for *row, digest in connection.execute(f"SELECT {names} FROM {table}"):  # noqa: S608  # names of the schema
            _require(is_sound(table, tuple(row), digest), CHANGED)
            if digest is None:
                unsigned.append((table, row[0]))
    return unsigned


def _check_ids(connection: sqlite3.Connection, schema: Mapping[str, str]) -> None:
    """Check that new rows get higher ids than existing ones."""
    last = dict(connection.execute("SELECT name, seq FROM sqlite_sequence"))
    for table in COLUMNS:
        if "AUTOINCREMENT" in schema[table]:
            [most] = connection.execute(f"SELECT max(id) FROM {table}").fetchone()  # noqa: S608  # a name of the schema
            _require(most is None or (is_id(last.get(table)) and last[table] >= most), "its ids are out of order")


def _bytes(connection: sqlite3.Connection) -> int:
    [pages] = connection.execute("PRAGMA page_count").fetchone()
    [size] = connection.execute("PRAGMA page_size").fetchone()
    return int(pages) * int(size)
