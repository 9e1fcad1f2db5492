"""The table of chats, without their messages: create, list, rename, configure, delete, and restore chats."""

import time
from collections.abc import Sequence

from app.history.column_types import Row
from app.history.database import Database
from app.history.digests import CHANGED, checked, sign
from app.history.records import Chat, ChatSettings, NoSuchChat, Trim, read, storable, written
from app.history.schema import COLUMNS
from app.history.sqlite_errors import Damaged

_BEGINNING = 80  # characters of a chat's first text that lists show

_SELECT = f"""
    SELECT {", ".join(COLUMNS["chats"])}, digest,
        (SELECT count(*) FROM messages WHERE chat = chats.id),
        coalesce(
            (SELECT substr(text, 1, {_BEGINNING}) FROM messages WHERE chat = chats.id ORDER BY id LIMIT 1),
            (SELECT substr(text, 1, {_BEGINNING}) FROM drafts WHERE chat = chats.id)
        )
    FROM chats
"""  # noqa: S608 # names and a number from this module
# A chat without messages or a draft is not listed, unless the user pinned or named it. A chat that changed after it was
# created had messages, even if they were lost to damage.
_IS_LISTED = """
    deleted IS NULL AND is_archived = ? AND (
        is_pinned OR is_title_given OR changed > created
        OR EXISTS (SELECT 1 FROM messages WHERE chat = chats.id) OR EXISTS (SELECT 1 FROM drafts WHERE chat = chats.id)
    )
"""


class Chats:
    """The table of chats. Methods raise NoSuchChat for an unknown number, and the errors of Database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def listed(self, *, archived: bool = False) -> Sequence[Chat]:
        """Return chats that are not deleted: pinned ones first, then newest first.

        A listed chat without messages is a draft, unless the user pinned or named it.
        """
        order = "ORDER BY is_pinned DESC, changed DESC, id DESC"
        with self._database.reading() as connection:
            rows = connection.execute(f"{_SELECT} WHERE {_IS_LISTED} {order}", (archived,))
            return [_chat(row) for row in rows]

    def get(self, chat: int, *, deleted: bool = False) -> Chat:
        """Return one chat. With `deleted`, also return a chat that is deleted but not erased yet."""
        with self._database.reading() as connection:
            row = connection.execute(f"{_SELECT} WHERE id = ? AND (? OR deleted IS NULL)", (chat, deleted)).fetchone()
            if row is None:
                raise NoSuchChat
            return _chat(row)

    def create(self, settings: ChatSettings, title: str = "", *, created: float | None = None) -> Chat:
        """Create a chat. `title` is set by the user. `created`: seconds since the epoch, by default now."""
        now = time.time() if created is None else created
        values = (storable(title), bool(title), storable(written(settings)), written(Trim()), now, now)
        with self._database.writing() as connection:
            statement = (
                "INSERT INTO chats (title, is_title_given, settings, trim, is_pinned, is_archived, created, changed)"
                " VALUES (?, ?, ?, ?, 0, 0, ?, ?) RETURNING id"
            )
            [chat] = connection.execute(statement, values).fetchone()
            sign(connection, "chats", chat)
        return self.get(chat)

    def rename(self, chat: int, title: str) -> None:
        self._set(chat, "title = ?, is_title_given = 1", storable(title))

    def give_title(self, chat: int, title: str) -> None:
        """Set a generated title, unless the user has set one."""
        self._set(chat, "title = iif(is_title_given, title, ?)", storable(title))

    def configure(self, chat: int, settings: ChatSettings) -> None:
        self._set(chat, "settings = ?", storable(written(settings)))

    def trim(self, chat: int, trim: Trim) -> None:
        self._set(chat, "trim = ?", storable(written(trim)))

    def pin(self, chat: int, *, pinned: bool) -> None:
        self._set(chat, "is_pinned = ?", pinned)

    def archive(self, chat: int, *, archived: bool) -> None:
        self._set(chat, "is_archived = ?", archived)

    def show(self, chat: int, leaf: int) -> None:
        """Store which branch is shown."""
        self._set(chat, "shown = ?", leaf)

    def set_imported(self, chat: int, title: str, trim: Trim, *, is_title_given: bool, changed: float) -> None:
        """Set what a chat had when it was exported. `changed`: seconds since the epoch; 0 leaves it."""
        self._set(chat, "title = ?", storable(title))
        self._set(chat, "is_title_given = ?", is_title_given)
        self._set(chat, "changed = coalesce(nullif(?, 0.0), changed)", changed)
        self.trim(chat, trim)

    def delete(self, chat: int) -> None:
        """Remove a chat from all lists. Its text stays in the file until the chat is erased."""
        self._set(chat, "deleted = ?", time.time())

    def undelete(self, chat: int) -> None:
        self._set(chat, "deleted = ?", None)

    def erase(self, chats: Sequence[int]) -> None:
        """Erase deleted chats and all traces of their text. Chats that were restored meanwhile are kept."""
        with self._database.writing() as connection:
            one = [(chat,) for chat in chats]
            connection.executemany("DELETE FROM chats WHERE id = ? AND deleted IS NOT NULL", one)
            for table in ("drafts", "inputs"):
                gone = f"DELETE FROM {table} WHERE chat > 0 AND chat NOT IN (SELECT id FROM chats)"  # noqa: S608
                connection.execute(gone)
        if chats:
            self._database.erase_traces()

    def deleted_before(self, moment: float) -> Sequence[int]:
        """Return chats that were deleted before `moment`, in seconds since the epoch."""
        with self._database.reading() as connection:
            rows = connection.execute("SELECT id FROM chats WHERE deleted < ?", (moment,))
            return [chat for (chat,) in rows]

    def _set(self, chat: int, change: str, value: object) -> None:
        with self._database.writing() as connection:
            statement = f"UPDATE chats SET {change} WHERE id = ?"  # noqa: S608 # from this module
            if not connection.execute(statement, (value, chat)).rowcount:
                raise NoSuchChat
            sign(connection, "chats", chat)


def _chat(row: Row) -> Chat:
    """Convert a row to a chat. Raises Damaged."""
    match (*checked("chats", row[:-2]), *row[-2:]):
        case (
            int(chat), str(title), int(given), str(settings), str(trim), int(pinned), int(archived), float(created),
            float(changed), _, int() | None as shown, int(count), beginning,
        ):  # fmt: skip
            return Chat(
                id=chat,
                title=title,
                is_title_given=bool(given),
                settings=read(settings, ChatSettings),
                trim=read(trim, Trim),
                is_pinned=bool(pinned),
                is_archived=bool(archived),
                created=created,
                changed=changed,
                shown=shown,
                num_messages=count,
                beginning=beginning if isinstance(beginning, str) else "",
            )
    raise Damaged(CHANGED)
