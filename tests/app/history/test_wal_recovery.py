"""Recovery of changes that are only in the log after a process was killed."""

import os
from pathlib import Path

import pytest

from app.history.database import FILE_NAME
from app.history.history import History
from app.history.records import ChatSettings, State
from app.history.wal import read_wal
from tests.app.history.damage import ALL_TEXTS, ALL_TITLES, CHATS, INDEX, LOG, texts, titles


def test_log_of_a_killed_process_is_checkpointed(logged: Path, tmp_path: Path) -> None:
    with History(tmp_path) as history:
        assert (titles(history), history.notices) == (ALL_TITLES, ())
        assert (tmp_path / LOG).stat().st_size == 0
        assert b"question 5" in logged.read_bytes()


def test_log_is_empty_after_each_reply(tmp_path: Path) -> None:
    with History(tmp_path) as history:
        chat = history.chats.create(ChatSettings())
        asked = history.messages.add_user_message(chat.id, None, "x")
        reply = history.messages.start_reply(chat.id, asked.id, "tiny")
        history.messages.write_reply(reply.id, "y", "")
        assert (tmp_path / LOG).stat().st_size
        history.messages.write_reply(reply.id, "yes", "", state=State.WHOLE)
        assert (tmp_path / LOG).stat().st_size == 0
    assert {path.name for path in tmp_path.iterdir()} <= {FILE_NAME, "history.lock"}


@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize("index", [0.0, 0.1, 0.5, 0.97])
@pytest.mark.usefixtures("logged_and_indexed")
def test_flipped_bit_in_the_log_loses_no_message(tmp_path: Path, index: float, with_index: bool) -> None:
    if not with_index:
        (tmp_path / INDEX).unlink()
    log = bytearray((tmp_path / LOG).read_bytes())
    log[int(len(log) * index) + 7] ^= 1
    (tmp_path / LOG).write_bytes(log)
    with History(tmp_path) as history:
        assert (titles(history), texts(history)) == (ALL_TITLES, ALL_TEXTS)
        [notice] = history.notices
        assert "its log" in notice.message
        assert history.rescue is not None
        assert Path(f"{history.rescue.aside}-wal").read_bytes() == log
    with History(tmp_path) as again:
        assert (titles(again), again.notices) == (ALL_TITLES, ())


def test_damaged_last_change_loses_only_itself(logged: Path, tmp_path: Path) -> None:
    log = bytearray((tmp_path / LOG).read_bytes())
    before, asked, _, _ = [frame.index for frame in read_wal(bytes(log)).frames if frame.is_commit][-4:]
    for index in range(before + 1, asked + 1):  # simulate a power loss while the last question was written
        log[32 + index * 4120 - 3500 : 32 + index * 4120] = bytes(3500)
    (tmp_path / LOG).write_bytes(log[: 32 + asked * 4120])
    with History(tmp_path) as history:
        assert ALL_TEXTS - {f"question {CHATS - 1}", f"answer {CHATS - 1}"} <= texts(history)
        assert titles(history) == ALL_TITLES
        [notice] = history.notices
    assert "the last change in its log is damaged or incomplete" in notice.message
    assert logged.exists()


@pytest.mark.parametrize("content", [b"some text\n" * 5000, None], ids=["text", "half"])
@pytest.mark.usefixtures("logged")
def test_lost_log_is_reported(tmp_path: Path, content: bytes | None) -> None:
    log = (tmp_path / LOG).read_bytes()
    (tmp_path / LOG).write_bytes(log[: len(log) // 2] if content is None else content)
    with History(tmp_path) as history:
        assert set(ALL_TITLES[: CHATS // 2]) <= set(titles(history))
        [notice] = history.notices
    assert "changes stored only in its log" in notice.message


@pytest.mark.usefixtures("logged_and_indexed")
def test_index_reveals_a_truncated_log(tmp_path: Path) -> None:
    size = (tmp_path / LOG).stat().st_size
    os.truncate(tmp_path / LOG, size - 5 * 4120)
    with History(tmp_path) as history:
        [notice] = history.notices
    assert "changes stored only in its log" in notice.message


@pytest.mark.parametrize("is_there", [True, False])
def test_log_without_its_file_is_salvaged(logged: Path, tmp_path: Path, is_there: bool) -> None:
    logged.unlink()
    if is_there:
        logged.touch()
    with History(tmp_path) as history:
        assert "question 5" in texts(history)
        [notice] = history.notices
        assert history.rescue is not None
        assert Path(notice.remedy.removeprefix("The damaged file is kept as ").removesuffix(".")).exists()
    assert "its file is empty" in notice.message


def test_empty_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).touch()
    with History(tmp_path) as history:
        [notice] = history.notices
        assert history.chats.listed() == []
    assert "was an empty file" in notice.message
    assert "backup" in notice.remedy
    with History(tmp_path) as again:
        assert again.notices == ()
