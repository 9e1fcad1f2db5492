"""Random damage to a history: the program starts and shows all readable chats."""

import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from app.history.database import FILE_NAME
from app.history.history import History
from app.history.records import ChatSettings, State
from app.history.refill import RESCUED_TITLE
from app.history.salvage import salvage
from app.history.schema import COLUMNS, PAGE_SIZE

CHATS, TURNS = 4, 8


def text_of(chat: int, turn: int) -> str:
    return f"chat {chat} turn {turn}: " + "lorem ipsum dolor sit amet " * ((chat * turn) % 40 + 1)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an intact history of several hundred pages. Some of its rows span several pages."""
    folder = tmp_path_factory.mktemp("sound")
    with History(folder) as history:
        for number in range(CHATS):
            chat, parent = history.chats.create(ChatSettings(), f"chat {number}").id, None
            for turn in range(TURNS):
                parent = history.messages.add_user_message(chat, parent, text_of(number, turn)).id
                reply = history.messages.start_reply(chat, parent, "tiny")
                history.messages.write_reply(reply.id, "x" * 9000 if turn == 3 else "yes", "", state=State.WHOLE)
                parent = reply.id
    return folder


def texts(history: History) -> set[str]:
    listed = [chat for archived in (False, True) for chat in history.chats.listed(archived=archived)]
    return {message.text for chat in listed for message in history.messages.in_chat(chat.id)}


def test_all_rows_are_read_from_pages_without_schema(sound: Path) -> None:
    left = salvage(sound / FILE_NAME)
    assert not any((left.unreadable, *left.lost.values(), *left.changed.values()))
    with sqlite3.connect(sound / FILE_NAME) as connection:
        for table, columns in COLUMNS.items():
            select = f"SELECT {', '.join(columns)} FROM {table} ORDER BY 1"  # noqa: S608
            assert sorted(left.rows[table].values()) == connection.execute(select).fetchall(), table
    connection.close()


def test_rows_only_in_the_log_are_read(tmp_path: Path) -> None:
    history = History(tmp_path)
    chat = history.chats.create(ChatSettings())
    history.messages.add_user_message(chat.id, None, "not in the file yet")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in (FILE_NAME, f"{FILE_NAME}-wal"):
        shutil.copy(tmp_path / name, copy / name)
    history.close()
    assert [row[4] for row in salvage(copy / FILE_NAME).rows["messages"].values()] == ["not in the file yet"]


def flip(content: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 3, 20))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def flip_head(content: bytearray, draw: random.Random) -> None:
    content[draw.randrange(100)] ^= 1 << draw.randrange(8)


def cut(content: bytearray, draw: random.Random) -> None:
    del content[draw.randrange(len(content) // 2, len(content)) :]


def wipe_page(content: bytearray, draw: random.Random) -> None:
    page = draw.randrange(len(content) // PAGE_SIZE) * PAGE_SIZE
    content[page : page + PAGE_SIZE] = draw.randbytes(PAGE_SIZE)


def damaged(sound: Path, folder: Path, damage: Callable[[bytearray, random.Random], None], seed: int) -> None:
    content = bytearray((sound / FILE_NAME).read_bytes())
    damage(content, random.Random(seed))
    (folder / FILE_NAME).write_bytes(content)


@pytest.mark.parametrize("damage", [flip, flip_head, cut, wipe_page])
@pytest.mark.parametrize("seed", range(2))
def test_program_starts_with_any_damage(
    sound: Path, tmp_path: Path, damage: Callable[[bytearray, random.Random], None], seed: int
) -> None:
    damaged(sound, tmp_path, damage, seed)
    before = (tmp_path / FILE_NAME).read_bytes()
    with History(tmp_path) as history:
        assert len(texts(history)) > (0 if damage is cut else CHATS * TURNS // 2)
        history.search.find("lorem")
        chat = history.chats.create(ChatSettings())
        history.messages.add_user_message(chat.id, None, "and it goes on")
        if history.rescue is not None:
            assert history.rescue.aside is not None
            assert history.rescue.aside.stat().st_size >= min(len(before), PAGE_SIZE)
    with History(tmp_path) as again:
        assert again.rescue is None
        assert "and it goes on" in texts(again)


def test_messages_without_a_chat_get_a_new_one(tmp_path: Path) -> None:
    with History(tmp_path) as history:
        chat = history.chats.create(ChatSettings(), "lost")
        history.messages.add_user_message(chat.id, None, "still here")
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.execute("DELETE FROM chats")
    connection.execute("DELETE FROM sqlite_schema WHERE name = 'chats'")
    connection.commit()
    connection.close()
    with History(tmp_path) as history:
        [chat] = history.chats.listed()
        assert chat.title == RESCUED_TITLE
        assert history.rescue is not None
        assert (history.rescue.saved["chats"], history.rescue.saved["messages"]) == (1, 1)
        assert history.rescue.lost["chats"] == 1
        assert [message.text for message in history.messages.in_chat(chat.id)] == ["still here"]


def test_open_history_reopens_a_replaced_file(tmp_path: Path) -> None:
    history = History(tmp_path)
    chat = history.chats.create(ChatSettings())
    fresh = tmp_path / "other"
    with History(fresh) as other:
        other.chats.create(ChatSettings(), "in the new file")
    for suffix in ("-wal", "-shm"):
        Path(f"{tmp_path / FILE_NAME}{suffix}").unlink()
    (fresh / FILE_NAME).replace(tmp_path / FILE_NAME)
    assert [one.title for one in history.chats.listed()] == ["in the new file"]
    assert chat.title == ""
    history.close()
