"""The schema of the history: the migration to each version, and the type of each column.

app/history/salvage.py recognizes rows by the number and types of their values, without the schema in the file.
"""

from collections.abc import Mapping, Sequence

from app.history.column_types import (
    ATTACHMENTS,
    DRAFT_OF,
    FLAG,
    ID,
    NUMBER,
    OPTIONAL_NUMBER,
    OPTIONAL_REFERENCE,
    REFERENCE,
    ROLE,
    SETTINGS,
    STATE,
    TEXT,
    TRIM,
    USAGE,
    ColumnType,
)

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
# The version is stored a second time in this table, so that a flipped bit in the file's header is not mistaken for a
# newer version.
ABOUT = "CREATE TABLE about (version INTEGER NOT NULL)"
FIRST_VERSION = f"{ABOUT}; INSERT INTO about VALUES (0);"  # noqa: S608  # no input

# A row's checksum (app/history/digests.py). NULL: another program wrote the row.
DIGESTS = """
    ALTER TABLE chats ADD COLUMN digest INTEGER;
    ALTER TABLE messages ADD COLUMN digest INTEGER;
    ALTER TABLE drafts ADD COLUMN digest INTEGER;
    ALTER TABLE inputs ADD COLUMN digest INTEGER;
    ALTER TABLE presets ADD COLUMN digest INTEGER;
"""

# migrations to version 1 and version 2
STEPS: Sequence[str] = (CHATS + MESSAGES + INPUTS + WORDS + FIRST_VERSION, DIGESTS)
VERSION = len(STEPS)
DIGESTS_SINCE = 2

# Table -> its columns in the order on disk, without the digest, which is the last one.
COLUMNS: Mapping[str, Mapping[str, ColumnType]] = {
    "chats": {
        "id": ID, "title": TEXT, "is_title_given": FLAG, "settings": SETTINGS, "trim": TRIM, "is_pinned": FLAG,
        "is_archived": FLAG, "created": NUMBER, "changed": NUMBER, "deleted": OPTIONAL_NUMBER,
        "shown": OPTIONAL_REFERENCE,
    },
    "messages": {
        "id": ID, "chat": REFERENCE, "parent": OPTIONAL_REFERENCE, "role": ROLE, "text": TEXT,
        "attachments": ATTACHMENTS, "reasoning": TEXT, "reasoning_seconds": NUMBER, "model": TEXT, "state": STATE,
        "usage": USAGE, "created": NUMBER,
    },
    "drafts": {"chat": DRAFT_OF, "text": TEXT, "changed": NUMBER},
    "inputs": {"id": ID, "chat": OPTIONAL_REFERENCE, "text": TEXT, "created": NUMBER},
    "presets": {"id": ID, "name": TEXT, "settings": SETTINGS, "created": NUMBER, "changed": NUMBER},
}  # fmt: skip
