"""User input: drafts, texts sent earlier, and presets of settings."""

import time
from collections.abc import Sequence

from app.history.database import Database
from app.history.digests import sign
from app.history.records import ChatSettings, Preset, read, storable, written

NEW = 0  # key of the draft of the first window's new chat; other windows use negative numbers
MOST_INPUTS = 200


class Inputs:
    """The tables of drafts, inputs, and presets."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def draft(self, chat: int = NEW) -> str:
        with self._database.reading() as connection:
            row = connection.execute("SELECT text FROM drafts WHERE chat = ?", (chat,)).fetchone()
        return "" if row is None else str(row[0])

    def save_draft(self, text: str, chat: int = NEW) -> None:
        """Save the draft of a chat. An empty string deletes it."""
        with self._database.writing() as connection:
            if text:
                values = (chat, storable(text), time.time())
                connection.execute("INSERT OR REPLACE INTO drafts (chat, text, changed) VALUES (?, ?, ?)", values)
                sign(connection, "drafts", chat)
            else:
                connection.execute("DELETE FROM drafts WHERE chat = ?", (chat,))

    def windows(self) -> Sequence[int]:
        """Return the numbers of the windows that have a draft of a new chat."""
        with self._database.reading() as connection:
            rows = connection.execute("SELECT chat FROM drafts WHERE chat <= ? ORDER BY chat DESC", (NEW,))
            return [NEW - chat for (chat,) in rows]

    def move_draft(self, window: int, chat: int) -> None:
        """Assign the draft of a window's new chat to a chat."""
        with self._database.writing() as connection:
            connection.execute("UPDATE drafts SET chat = ? WHERE chat = ?", (chat, NEW - window))
            sign(connection, "drafts", chat)

    def recent(self) -> Sequence[str]:
        """Return the texts sent in chats that are not deleted, newest first, each once."""
        select = (
            "SELECT text FROM inputs WHERE chat NOT IN (SELECT id FROM chats WHERE deleted IS NOT NULL)"
            " GROUP BY text ORDER BY max(id) DESC LIMIT ?"
        )
        with self._database.reading() as connection:
            return [text for (text,) in connection.execute(select, (MOST_INPUTS,))]

    def presets(self) -> Sequence[Preset]:
        """Return the presets, sorted by name."""
        with self._database.reading() as connection:
            rows = connection.execute("SELECT name, settings FROM presets ORDER BY name")
            return [Preset(name, read(settings, ChatSettings)) for name, settings in rows]

    def save_preset(self, preset: Preset) -> None:
        """Save a preset. It replaces one of the same name."""
        now = time.time()
        with self._database.writing() as connection:
            [key] = connection.execute(
                "INSERT INTO presets (name, settings, created, changed) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (name) DO UPDATE SET settings = excluded.settings, changed = excluded.changed"
                " RETURNING id",
                (storable(preset.name), storable(written(preset.settings)), now, now),
            ).fetchone()
            sign(connection, "presets", key)

    def delete_preset(self, name: str) -> None:
        with self._database.writing() as connection:
            connection.execute("DELETE FROM presets WHERE name = ?", (storable(name),))
