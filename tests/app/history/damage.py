"""Create histories for tests of damage, damage their files, and read them."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

from app.history.database import FILE_NAME, Database
from app.history.history import History
from app.history.records import ChatSettings, State

CHATS = 6
LOG, INDEX = f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"


def talk(history: History, number: int) -> None:
    """Create a chat with a question and a reply."""
    chat = history.chats.create(ChatSettings(f"Be number {number}."), f"chat {number}").id
    asked = history.messages.add_user_message(chat, None, f"question {number} " + "lorem ipsum " * 40)
    reply = history.messages.start_reply(chat, asked.id, "tiny")
    history.messages.write_reply(reply.id, f"answer {number} " + "dolor sit " * 40, "", state=State.WHOLE)


def filled(folder: Path) -> None:
    """Create a history whose chats are all in the database file."""
    with History(folder) as history:
        for number in range(CHATS):
            talk(history, number)


def logged(folder: Path) -> None:
    """Create a history in the state that a killed process leaves: half of the chats are only in the log."""
    work = folder / "of the process"
    with History(work) as history:
        for number in range(CHATS // 2):
            talk(history, number)
    with History(work) as history, patch.object(Database, "checkpoint"):
        history._database._opened.connection.execute("PRAGMA wal_autocheckpoint = 0").fetchall()
        for number in range(CHATS // 2, CHATS):
            talk(history, number)
        for name in (FILE_NAME, LOG, INDEX):
            shutil.copy(work / name, folder / name)
    shutil.rmtree(work)


def execute(file: Path, *statements: str) -> None:
    """Execute SQL statements on the file, as another program would."""
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def flip(file: Path, found: bytes, offset: int, bit: int) -> None:
    """Flip a bit of the byte that is `offset` bytes after the start of `found`."""
    content = bytearray(file.read_bytes())
    content[content.index(found) + offset] ^= 1 << bit
    file.write_bytes(content)


def titles(history: History) -> list[str]:
    return sorted(chat.title for archived in (False, True) for chat in history.chats.listed(archived=archived))


def texts(history: History) -> set[str]:
    """Return the first two words of every message."""
    messages = (one for chat in history.chats.listed() for one in history.messages.in_chat(chat.id))
    return {" ".join(message.text.split()[:2]) for message in messages}


ALL_TITLES = [f"chat {number}" for number in range(CHATS)]
ALL_TEXTS = {f"{who} {number}" for who in ("question", "answer") for number in range(CHATS)}
