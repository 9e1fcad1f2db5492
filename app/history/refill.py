"""Fill a new database with the rows saved from a damaged history."""

import sqlite3
from collections.abc import Mapping

from app.history.column_types import Row
from app.history.digests import digest_of
from app.history.salvage import Salvage
from app.history.schema import COLUMNS

RESCUED_TITLE = "Recovered chat"


def refill(connection: sqlite3.Connection, salvaged: Salvage) -> Mapping[str, int]:
    """Insert all rows in one transaction. Returns the number of inserted rows per table. Other rows count as
    unreadable.

    Messages whose chat is lost get a new chat. A message whose parent is lost follows the message before it.
    """
    rows = {**salvaged.rows, "messages": _reattached(salvaged.rows["messages"])}
    rows["chats"] = _chats(salvaged.rows["chats"], rows["messages"])
    counts = {}
    connection.execute("BEGIN IMMEDIATE")
    for table, columns in COLUMNS.items():
        marks = ", ".join("?" * (len(columns) + 1))
        names = ", ".join([*columns, "digest"])
        statement = f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({marks})"  # noqa: S608  # names of the schema
        signed = ((*row, digest_of(row)) for _, row in sorted(rows[table].items()))
        counts[table] = connection.executemany(statement, signed).rowcount
        salvaged.unreadable += len(rows[table]) - counts[table]
    connection.execute("COMMIT")
    return counts


def _reattached(messages: Mapping[int, Row]) -> Mapping[int, Row]:
    joined, last_of = {}, dict[object, int]()
    for message, (_, chat, parent, *rest) in sorted(messages.items()):
        is_lost = parent is not None and parent not in messages
        joined[message] = (message, chat, last_of.get(chat) if is_lost else parent, *rest)
        last_of[chat] = message
    return joined


def _chats(chats: Mapping[int, Row], messages: Mapping[int, Row]) -> Mapping[int, Row]:
    """Return the chats, plus new ones for messages without a chat.

    If the shown message of a chat is lost, the newest message of the chat is shown.
    """
    newest: dict[object, Row] = {row[1]: row for _, row in sorted(messages.items())}
    new = {int(chat): _new_chat(int(chat), row) for chat, row in newest.items() if isinstance(chat, int)}
    known = {**new, **chats}
    return {chat: _with_shown(row, messages, newest.get(chat)) for chat, row in known.items()}


def _new_chat(chat: int, newest: Row) -> Row:
    return chat, RESCUED_TITLE, 0, "{}", "{}", 0, 0, newest[-1], newest[-1], None, newest[0]


def _with_shown(chat: Row, messages: Mapping[int, Row], newest: Row | None) -> Row:
    if chat[-1] is None or chat[-1] in messages:
        return chat
    return (*chat[:-1], None if newest is None else newest[0])
