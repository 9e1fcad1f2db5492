"""Search for words in the messages and titles of all chats.

A message matches if it contains words that start with the given ones. If none does, the text is searched as a
substring, because scripts without spaces have no indexable words.
"""

import re
import sqlite3
from collections.abc import Iterator, Sequence

from app.history.chats import Chats
from app.history.database import Database
from app.history.records import Chat, Hit, Role, storable

MOST_HITS = 50
_AROUND = 40  # characters before and after a match, in whole words; "…" marks omitted text

_BY_WORDS = """
    SELECT messages.chat, messages.id, messages.role, messages.text
    FROM words JOIN messages ON messages.id = words.rowid
    JOIN chats ON chats.id = messages.chat
    WHERE words MATCH ? AND chats.deleted IS NULL ORDER BY rank LIMIT ?
"""
_AS_IT_STANDS = """
    SELECT messages.chat, messages.id, messages.role, messages.text FROM messages JOIN chats ON chats.id = messages.chat
    WHERE messages.text LIKE ? ESCAPE '\\' AND chats.deleted IS NULL ORDER BY messages.id DESC LIMIT ?
"""
_WORD = re.compile(r"\w+")

_Found = tuple[int, int, str, str]  # chat id, message id, role, and the text of the message


class Search:
    """Searches one history."""

    def __init__(self, database: Database, chats: Chats) -> None:
        self._database = database
        self._chats = chats

    def find(self, text: str) -> Sequence[Hit]:
        """Return matches in titles, then in messages, best first; at most MOST_HITS."""
        words = _WORD.findall(storable(text))
        if not words:
            return []
        chats = {chat.id: chat for archived in (False, True) for chat in self._chats.listed(archived=archived)}
        asked = storable(text).strip()
        hits = [*self._in_titles(chats, asked, words), *self._in_messages(chats, asked, words)]
        return hits[:MOST_HITS]

    def _in_titles(self, chats: dict[int, Chat], text: str, words: Sequence[str]) -> Iterator[Hit]:
        for chat in chats.values():
            found = text in chat.title or all(_beginning(word).search(chat.title) for word in words)
            if found and chat.shown is not None:
                yield _hit(chat, chat.shown, None, chat.title, words)

    def _in_messages(self, chats: dict[int, Chat], text: str, words: Sequence[str]) -> Iterator[Hit]:
        with self._database.reading() as connection:
            found = _by_words(connection, words) or _as_it_stands(connection, text)
        for chat, message, role, content in found:
            if chat in chats:
                author = Role.USER if role == Role.USER else Role.ASSISTANT
                yield _hit(chats[chat], message, author, content, words)


def _beginning(word: str) -> re.Pattern[str]:
    """Return a pattern for words that start with `word`."""
    return re.compile(rf"\b{re.escape(word)}", re.IGNORECASE)


def _by_words(connection: sqlite3.Connection, words: Sequence[str]) -> list[_Found]:
    query = " ".join(f'"{word}"*' for word in words)
    return connection.execute(_BY_WORDS, (query, MOST_HITS)).fetchall()


def _as_it_stands(connection: sqlite3.Connection, text: str) -> list[_Found]:
    pattern = re.sub(r"([\\%_])", r"\\\1", text)
    return connection.execute(_AS_IT_STANDS, (f"%{pattern}%", MOST_HITS)).fetchall()


def _hit(chat: Chat, message: int, role: Role | None, text: str, words: Sequence[str]) -> Hit:
    """Return a hit with the text around the first word that occurs literally, or else the start of the text."""
    matches = (_beginning(word).search(text) or re.search(re.escape(word), text, re.IGNORECASE) for word in words)
    start, end = next((match.span() for match in matches if match), (0, 0))
    before, after = text[max(0, start - _AROUND - 1) : start], text[end : end + _AROUND + 1]
    if len(before) > _AROUND:
        before = "…" + re.sub(r"\A\S*\s", "", before)  # without the cut word
    if len(after) > _AROUND:
        after = re.sub(r"\s\S*\Z", "", after) + "…"
    return Hit(chat, message, role, before, text[start:end], after)
