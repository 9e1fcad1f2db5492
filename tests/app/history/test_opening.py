"""Opening a history that is blocked, too new, or unwritable, and the notices that the user gets."""

import errno
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from app.history import opening
from app.history.database import FILE_NAME
from app.history.history import History
from app.history.records import ChatSettings, HistoryTooNew, HistoryUnavailable
from app.history.schema import COLUMNS, VERSION
from app.private_database import write_ahead
from tests.app.history.damage import ALL_TEXTS, ALL_TITLES, INDEX, LOG, execute, flip, texts, titles

# -- obstacles


def make_socket(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as listening:
        os.chdir(path.parent)  # the path of a socket has a short length limit
        listening.bind(path.name)


@pytest.mark.parametrize("name", [FILE_NAME, LOG, INDEX, "history.lock"])
@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "a pipe"), (Path.mkdir, "a folder"), (make_socket, "a socket")])
def test_pipes_folders_and_sockets_are_rejected_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, make: Callable[[Path], None], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / name)
    with pytest.raises(HistoryUnavailable, match=f"{name} is {kind}"):
        History(tmp_path)


LOCKER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
for statement in sys.argv[2:]:
    connection.execute(statement).fetchall()
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "statements", [("BEGIN EXCLUSIVE",), ("PRAGMA locking_mode = EXCLUSIVE", "BEGIN EXCLUSIVE", "COMMIT")]
)
def test_opening_waits_for_a_locked_history_and_reports_it(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statements: tuple[str, ...]
) -> None:
    monkeypatch.setattr(opening, "_SOON_SECONDS", 0.0)
    monkeypatch.setattr(opening, "_LOCKED_SECONDS", 2.0)  # longer than the first attempt
    command = [sys.executable, "-c", LOCKER, str(filled), *statements]
    waits: list[str] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as locker:
        assert locker.stdin is not None
        assert locker.stdout is not None
        locker.stdout.readline()
        with pytest.raises(HistoryUnavailable, match="another program has the chat history locked"):
            History(tmp_path, waits.append)
        monkeypatch.setattr(opening, "_LOCKED_SECONDS", 60.0)

        def unlock(sentence: str) -> None:
            waits.append(sentence)
            locker.stdin.close()  # type: ignore[union-attr]  # the locker ends

        with History(tmp_path, unlock) as history:
            assert (titles(history), history.notices) == (ALL_TITLES, ())
    assert len(waits) == 2
    assert all("Another program has the chat history locked. Waiting" in sentence for sentence in waits)


@pytest.mark.usefixtures("filled")
def test_repair_by_another_process_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    monkeypatch.setattr(opening, "_SOON_SECONDS", 0.1)
    lock = FileLock(tmp_path / "history.lock", thread_local=False)
    lock.acquire()
    waits: list[str] = []

    def end(sentence: str) -> None:
        waits.append(sentence)
        lock.release()

    with History(tmp_path, end) as history:
        assert titles(history) == ALL_TITLES
    assert waits == ["Another ingle is opening or repairing the chat history. Waiting for it; Ctrl-C cancels."]


# -- versions


def test_log_of_a_newer_program_is_left_unchanged(filled: Path, tmp_path: Path) -> None:
    execute(filled, f"PRAGMA user_version = {VERSION + 1}", "UPDATE about SET version = version + 1")
    (tmp_path / LOG).write_bytes(b"some text\n" * 900)
    before = {path.name: path.read_bytes() for path in (filled, tmp_path / LOG)}
    with pytest.raises(HistoryTooNew, match=f"version {VERSION + 1}"):
        History(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def make_first_version(file: Path) -> None:
    execute(file, *(f"ALTER TABLE {table} DROP COLUMN digest" for table in COLUMNS))
    execute(file, "UPDATE about SET version = 1", "PRAGMA user_version = 1")


def test_first_version_is_migrated_to_digests(filled: Path, tmp_path: Path) -> None:
    make_first_version(filled)
    with History(tmp_path) as history:
        assert (titles(history), texts(history), history.notices) == (ALL_TITLES, ALL_TEXTS, ())
    flip(filled, b"userquestion 2 lorem", 16, 0)
    with History(tmp_path) as history:
        assert "Partly damaged: 1 message." in history.notices[0].message


def test_damaged_history_of_the_first_version_is_repaired(filled: Path, tmp_path: Path) -> None:
    make_first_version(filled)
    flip(filled, b"text TEXT NOT NULL, att", 1, 0)
    with History(tmp_path) as history:
        assert (titles(history), texts(history)) == (ALL_TITLES, ALL_TEXTS)
        assert "Lost: nothing known." in history.notices[0].message


def test_rows_of_another_program_are_signed(filled: Path, tmp_path: Path) -> None:
    execute(filled, "UPDATE messages SET text = 'by hand', digest = NULL WHERE text LIKE 'question 2%'", "ANALYZE")
    with History(tmp_path) as history:
        assert "by hand" in texts(history)
        assert history.notices == ()
    flip(filled, b"userby hand", 4, 0)
    with History(tmp_path) as history:
        assert "Partly damaged: 1 message." in history.notices[0].message


# -- no write is possible


def full(*_: object, **__: object) -> None:
    problem = sqlite3.OperationalError("database or disk is full")
    problem.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise problem


def read_only(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), "history.lock")


@pytest.mark.parametrize(
    ("seam", "failure", "reason"),
    [
        ("app.history.connections.write_ahead", full, "the disk is full"),
        ("app.history.opening.mark_open", read_only, "history.lock cannot be written (Read-only file system)"),
        ("filelock.FileLock.acquire", read_only, "history.lock cannot be written (Read-only file system)"),
    ],
)
@pytest.mark.usefixtures("logged")
def test_unwritable_history_is_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seam: str, failure: Callable[..., None], reason: str
) -> None:
    with monkeypatch.context() as patched:
        if failure is full:  # opening in memory must still succeed, because it needs no disk
            real = write_ahead
            patched.setattr(seam, lambda connection, how: full() if _has_file(connection) else real(connection, how))
        else:
            patched.setattr(seam, failure)
        with History(tmp_path) as history:
            assert (titles(history), texts(history)) == (ALL_TITLES, ALL_TEXTS)
            chat = history.chats.create(ChatSettings(), "chat 9")
            history.messages.add_user_message(chat.id, None, "in memory")
            assert [message.text for message in history.messages.in_chat(chat.id)] == ["in memory"]
            [notice] = history.notices
    assert (notice.message, notice.is_saved) == (f"Nothing is saved: {reason}.", False)
    assert "Old chats can be read" in notice.remedy or "old chats can be read" in notice.remedy
    with History(tmp_path) as again:
        assert (titles(again), again.notices) == (ALL_TITLES, ())


def _has_file(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("PRAGMA database_list").fetchone()[2])


@pytest.mark.usefixtures("filled")
def test_saving_resumes_when_the_disk_has_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.history.opening.mark_open", read_only)
    history = History(tmp_path)
    heard: list[str] = []
    [notice] = history.subscribe(lambda notice: heard.append(notice.message))
    assert not notice.is_saved
    history.messages.add_user_message(history.chats.create(ChatSettings(), "chat 7").id, None, "in memory")
    monkeypatch.undo()
    monkeypatch.setattr("app.history.database._AGAIN_SECONDS", 0.0)
    history._database._retry_at = time.monotonic()
    history.messages.add_user_message(history.chats.create(ChatSettings(), "chat 8").id, None, "on disk")
    assert heard == ["Chats are saved again."]
    with History(tmp_path) as other:
        assert titles(other) == [*ALL_TITLES, "chat 7", "chat 8"]
        assert {"in memory", "on disk"} < texts(other)
        assert other.search.find("memory")
    history.close()
    with History(tmp_path) as again:
        assert again.notices == ()


@pytest.mark.usefixtures("filled")
def test_changes_of_other_processes_are_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("app.history.opening.mark_open", read_only)
        history = History(tmp_path)
    with History(tmp_path) as other:
        other.chats.create(ChatSettings(), "chat 8")
    history.chats.create(ChatSettings(), "chat 7")
    history.close()
    with History(tmp_path) as again:
        assert titles(again) == [*ALL_TITLES, "chat 8"]
