"""Repair of damaged histories, and the report of what was lost."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from app.history.database import FILE_NAME
from app.history.history import History
from app.history.records import ChatSettings, HistoryDamaged
from tests.app.history.damage import ALL_TEXTS, ALL_TITLES, CHATS, LOG, execute, flip, texts, titles

Harm = Callable[[Path], None]


def statement(*sql: str) -> Harm:
    return lambda file: execute(file, *sql)


def flips(*edits: tuple[bytes, int, int]) -> Harm:
    def harm(file: Path) -> None:
        for edit in edits:
            flip(file, *edit)

    return harm


def set_schema(sql: str) -> Harm:
    return statement("PRAGMA writable_schema = ON", sql)


# Kind of damage -> a function that causes it, and a part of the reported reason. Every chat stays readable.
READABLE: dict[str, tuple[Harm, str]] = {
    "the name of a column": (flips((b"text TEXT NOT NULL, att", 1, 0)), "the definition of messages"),
    "a statement that is no UTF-8": (
        flips((b"CREATE TABLE chats (", 39, 6), (b"NOT NULL, is_title", 1, 7)),
        "SQLite cannot use it. ",  # SQLite's own message is left out, because it is not UTF-8
    ),
    "the version of the format for writers": (flips((b"SQLite format 3", 18, 0)), "the header"),
    "the size of pages": (flips((b"SQLite format 3", 16, 3)), "the header"),
    "the magic": (flips((b"SQLite format 3", 4, 1)), "the header"),
    "the version of the tables": (flips((b"SQLite format 3", 63, 4)), "it has two versions"),
    "an entry of the index of messages": (
        set_schema("UPDATE sqlite_schema SET rootpage = 3 WHERE name = 'messages_by_chat'"),
        "",
    ),
    "the last id that was given": (statement("UPDATE sqlite_sequence SET seq = 9223372036854775807"), "its ids"),
    "the name of a table in the list of last ids": (
        statement("UPDATE sqlite_sequence SET name = 'massages' WHERE name = 'messages'"),
        "its ids",
    ),
    "the index of words": (statement("UPDATE words_data SET block = x'00' WHERE id = 10"), "SQLite cannot use it"),
    "another program's trigger": (
        statement("CREATE TRIGGER evil AFTER INSERT ON messages BEGIN DELETE FROM messages WHERE id < new.id; END"),
        "it has a trigger that is not Inglenook's, evil",
    ),
    "another program's view": (
        statement("CREATE VIEW all_texts AS SELECT text FROM messages"),
        "it has a view that is not",
    ),
    "a trigger that does something else": (
        statement(
            "DROP TRIGGER words_of_gone",
            "CREATE TRIGGER words_of_gone AFTER INSERT ON messages BEGIN DELETE FROM chats; END",
        ),
        "the definition of words_of_gone",
    ),
    "a missing trigger": (statement("DROP TRIGGER words_of_new"), "tables are missing"),
    "a missing index": (statement("DROP INDEX messages_by_chat"), "tables are missing"),
    "settings that are no JSON": (statement("UPDATE chats SET settings = '{no json'"), "rows have changed"),
    "texts that are blobs": (statement("UPDATE messages SET text = CAST(text AS BLOB)"), "rows have changed"),
    "times that are texts": (statement("UPDATE chats SET created = 'yesterday'"), "rows have changed"),
    "rows of no type, without digests": (
        statement("UPDATE messages SET usage = CAST('[' AS BLOB), digest = NULL"),
        "rows have changed",
    ),
}


@pytest.mark.parametrize("what", READABLE)
def test_damage_is_repaired_and_reported(filled: Path, tmp_path: Path, what: str) -> None:
    harm, reason = READABLE[what]
    harm(filled)
    damaged = filled.read_bytes()
    waits: list[str] = []
    with History(tmp_path, waits.append) as history:
        assert (titles(history), texts(history)) == (ALL_TITLES, ALL_TEXTS)
        history.messages.add_user_message(history.chats.create(ChatSettings(), "chat 99").id, None, "and it goes on")
        assert (titles(history), texts(history)) == ([*ALL_TITLES, "chat 99"], {*ALL_TEXTS, "and it"})
        assert history.search.find("lorem")
        [notice] = history.notices
        assert history.rescue is not None
        assert history.rescue.aside is not None
        assert history.rescue.aside.read_bytes()[200:] == damaged[200:]
    assert waits == ["The chat history is damaged. Recovering the readable chats."]
    assert f"was damaged: {reason}" in notice.message
    assert f"Saved: {CHATS} chats and {2 * CHATS} messages. Lost: nothing known." in notice.message
    assert notice.remedy == f"The damaged file is kept as {history.rescue.aside}."
    with History(tmp_path) as again:
        assert (again.notices, again.rescue) == ((), None)
        assert "and it" in texts(again)


def test_changed_texts_and_titles_are_reported(filled: Path, tmp_path: Path) -> None:
    flip(filled, b"userquestion 2 lorem", 16, 0)
    flip(filled, b"chat 4{", 5, 1)
    with History(tmp_path) as history:
        [notice] = history.notices
        assert titles(history) == ["chat 0", "chat 1", "chat 2", "chat 3", "chat 5", "chat 6"]
        assert "question 2" in texts(history)
    assert "Partly damaged: 1 chat, 1 message. Check: “chat 2”, “chat 6”." in notice.message


@pytest.mark.parametrize("bit", [1, 2], ids=["another chat", "no chat"])
def test_damaged_message_stays_in_its_chat(filled: Path, tmp_path: Path, bit: int) -> None:
    flip(filled, b"userquestion 2 lorem", -1, bit)  # flips a bit of the chat id, which is 3
    with History(tmp_path) as history:
        assert [message.text.split()[0] for message in history.messages.in_chat(3)] == ["question", "answer"]
        assert (titles(history), texts(history)) == (ALL_TITLES, ALL_TEXTS)


def test_drafts_of_all_windows_are_saved(filled: Path, tmp_path: Path) -> None:
    with History(tmp_path) as first, History(tmp_path) as second:
        for window, text in ((first, "typed in the first"), (second, "typed in the second")):
            window.new_draft()
            window.save_new_draft(text)
    flip(filled, b"userquestion 2 lorem", 16, 0)
    with History(tmp_path) as history:
        assert history.rescue is not None
        assert history.rescue.saved["drafts"] == 2
        assert history.new_draft() == "typed in the first"
        assert "typed in the second" in [chat.beginning for chat in history.chats.listed()]
    with History(tmp_path) as again:
        assert (again.notices, again.rescue) == ((), None)


def test_window_draft_without_digest_is_saved(filled: Path, tmp_path: Path) -> None:
    execute(filled, "INSERT INTO drafts (chat, text, changed) VALUES (-1, 'typed', 1.0)")
    with History(tmp_path) as history:
        assert (history.notices, history.rescue) == ((), None)
        history.new_draft()
        assert "typed" in [chat.beginning for chat in history.chats.listed()]


@pytest.mark.parametrize("start", [b"", b"\r\0\0\xff\xff"], ids=["of any kind", "of a table, with 65,535 rows"])
def test_lost_messages_are_counted(filled: Path, tmp_path: Path, start: bytes) -> None:
    content = bytearray(filled.read_bytes())
    page = content.index(b"userquestion 3 lorem") // 4096 * 4096
    content[page : page + 4096] = start + os.urandom(4096 - len(start))
    filled.write_bytes(content)
    with History(tmp_path) as history:
        [notice] = history.notices
        kept = texts(history)
        assert titles(history) == ALL_TITLES
    lost = len(ALL_TEXTS - kept)
    assert "question 3" not in kept
    assert f"Lost: {lost} message{'s' if lost > 1 else ''}." in notice.message
    assert "Check: “chat" in notice.message


def test_row_missing_from_its_page_header_is_found(filled: Path, tmp_path: Path) -> None:
    content = bytearray(filled.read_bytes())
    page = content.index(b"userquestion 3 lorem") // 4096 * 4096
    content[page + 3 : page + 5] = (0).to_bytes(2, "big")  # overwrites the number of rows in the page header
    filled.write_bytes(content)
    with History(tmp_path) as history:
        assert history.rescue is not None
        assert not any((*history.rescue.lost.values(), *history.rescue.changed.values()))
        assert texts(history) == ALL_TEXTS


@pytest.mark.usefixtures("logged")
def test_killed_repair_is_finished_by_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = bytearray((tmp_path / LOG).read_bytes())
    log[5000] ^= 1
    (tmp_path / LOG).write_bytes(log)
    real = os.replace

    class Killed(BaseException):
        """Raised in place of a SIGKILL."""

    for survived in range(3):
        calls: list[str] = []

        def replace(source: str, target: str, survived: int = survived, calls: list[str] = calls) -> None:
            if len(calls) == survived:
                raise Killed
            calls.append(target)
            real(source, target)

        # a killed process does not remove its files
        monkeypatch.setattr("app.history.rescue._remove", lambda path: None)
        monkeypatch.setattr(os, "replace", replace)
        if survived < 2:
            with pytest.raises(Killed):
                History(tmp_path)
        monkeypatch.undo()
    with History(tmp_path) as history:
        assert (titles(history), texts(history)) == (ALL_TITLES, ALL_TEXTS)


def test_damage_is_not_repaired_while_the_history_is_open_elsewhere(filled: Path, tmp_path: Path) -> None:
    with History(tmp_path) as other:
        flip(filled, b"userquestion 2 lorem", 16, 0)
        with History(tmp_path) as history:
            assert (titles(history), len(texts(history))) == (ALL_TITLES, len(ALL_TEXTS))
            history.messages.add_user_message(history.chats.create(ChatSettings()).id, None, "not saved")
            unsaved, damaged = history.notices
            assert (unsaved.is_saved, damaged.is_saved) == (False, False)
        assert titles(other) == ALL_TITLES
        assert not list(tmp_path.glob("*damaged*"))
    assert "Nothing is saved: the chat history is damaged, and other chats have it open." in unsaved.message
    assert "Close the other chats" in unsaved.remedy
    assert "Partly damaged: 1 message." in damaged.message
    with History(tmp_path) as again:
        assert "Partly damaged: 1 message." in again.notices[0].message
        assert len(list(tmp_path.glob("*damaged*"))) == 1


def test_marks_of_killed_processes_are_ignored(filled: Path, tmp_path: Path) -> None:
    (tmp_path / "4321-0.open").touch()
    flip(filled, b"userquestion 2 lorem", 16, 0)
    with History(tmp_path) as history:
        assert history.rescue is not None
        assert len(list(tmp_path.glob("*.open"))) == 1
    assert not list(tmp_path.glob("*.open"))


def read_and_write(history: History) -> None:
    for chat in history.chats.listed():
        history.messages.in_chat(chat.id)
        history.messages.add_user_message(chat.id, None, "one more")


@pytest.mark.parametrize("sql", ["UPDATE messages SET text = 'b' || text", "UPDATE words_data SET block = x'00'"])
def test_damage_found_while_open_is_repaired_and_reported(filled: Path, tmp_path: Path, sql: str) -> None:
    with History(tmp_path) as history:
        heard: list[str] = []
        assert history.subscribe(lambda notice: heard.append(notice.message)) == []
        execute(filled, sql)
        with pytest.raises(HistoryDamaged, match="was damaged"):
            read_and_write(history)
        assert len(texts(history)) >= len(ALL_TEXTS)
        history.messages.add_user_message(history.chats.listed()[0].id, None, "and more")
        [told] = heard
        assert "The chat history was damaged" in told
        assert f"Saved: {CHATS} chats" in told


@pytest.mark.usefixtures("logged")
def test_symlinked_history_is_opened_with_its_log(tmp_path: Path) -> None:
    (tmp_path / LOG).write_bytes(b"some text\n" * 900)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / FILE_NAME).symlink_to(tmp_path / FILE_NAME)
    with History(tmp_path / "here") as history:
        assert "changes stored only in its log" in history.notices[0].message
    assert (tmp_path / "here" / FILE_NAME).is_symlink()
