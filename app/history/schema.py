"""The tables of the history, as the steps from each version to the next.

Each table that is worth saving has another number of columns, by which app/history/salvage.py knows its rows without
the help of the database's own directory. Refuses to know what is done with the tables.
"""

from collections.abc import Sequence

PAGE_SIZE = 4096

CHATS = """
    CREATE TABLE chats (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        title TEXT NOT NULL, is_title_given INTEGER NOT NULL, settings TEXT NOT NULL, trim TEXT NOT NULL,
        is_pinned INTEGER NOT NULL, is_archived INTEGER NOT NULL,
        created REAL NOT NULL, changed REAL NOT NULL, deleted REAL, shown INTEGER
    );
"""
MESSAGES = """
    CREATE TABLE messages (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        chat INTEGER NOT NULL REFERENCES chats ON DELETE CASCADE, parent INTEGER,
        role TEXT NOT NULL, text TEXT NOT NULL, attachments TEXT NOT NULL,
        reasoning TEXT NOT NULL, reasoning_seconds REAL NOT NULL, model TEXT NOT NULL,
        state TEXT NOT NULL, usage TEXT NOT NULL, created REAL NOT NULL
    );
    CREATE INDEX messages_by_chat ON messages (chat);
"""
INPUTS = """
    CREATE TABLE drafts (chat INTEGER PRIMARY KEY, text TEXT NOT NULL, changed REAL NOT NULL);
    CREATE TABLE inputs (id INTEGER PRIMARY KEY AUTOINCREMENT, chat INTEGER, text TEXT NOT NULL, created REAL NOT NULL);
    CREATE TABLE presets (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, settings TEXT NOT NULL,
        created REAL NOT NULL, changed REAL NOT NULL
    );
"""
WORDS = """
    CREATE VIRTUAL TABLE words USING fts5 (
        text, content='messages', content_rowid='id', tokenize='unicode61 remove_diacritics 2'
    );
    CREATE TRIGGER words_of_new AFTER INSERT ON messages BEGIN
        INSERT INTO words (rowid, text) VALUES (new.id, new.text);
    END;
    CREATE TRIGGER words_of_gone AFTER DELETE ON messages BEGIN
        INSERT INTO words (words, rowid, text) VALUES ('delete', old.id, old.text);
    END;
    CREATE TRIGGER words_of_changed AFTER UPDATE OF text ON messages WHEN old.text <> new.text BEGIN
        INSERT INTO words (words, rowid, text) VALUES ('delete', old.id, old.text);
        INSERT INTO words (rowid, text) VALUES (new.id, new.text);
    END;
"""
# The version a second time: a bit that flips in the file's head must not look like the work of a newer program.
ABOUT = "CREATE TABLE about (version INTEGER NOT NULL); INSERT INTO about VALUES (0);"

STEPS: Sequence[str] = (CHATS + MESSAGES + INPUTS + WORDS + ABOUT,)  # each to the version of its place, from 1 on
VERSION = len(STEPS)

# Table -> its columns, in the order of the rows on disk.
COLUMNS = {
    "chats": (
        "id", "title", "is_title_given", "settings", "trim", "is_pinned", "is_archived", "created", "changed",
        "deleted", "shown",
    ),
    "messages": (
        "id", "chat", "parent", "role", "text", "attachments", "reasoning", "reasoning_seconds", "model", "state",
        "usage", "created",
    ),
    "drafts": ("chat", "text", "changed"),
    "inputs": ("id", "chat", "text", "created"),
    "presets": ("id", "name", "settings", "created", "changed"),
}  # fmt: skip
