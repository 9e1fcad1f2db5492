"""Drafts of new chats when several windows use one history."""

import subprocess
import sys
from pathlib import Path

from app.history.history import History
from app.history.records import ChatSettings
from app.history.windows import Window

KILLED = """
import os, sys
from pathlib import Path
from app.history.history import History
History(Path(sys.argv[1])).save_new_draft(sys.argv[2])
os.kill(os.getpid(), 9)
"""


def test_window_gets_the_lowest_free_number(tmp_path: Path) -> None:
    first, second = Window(tmp_path), Window(tmp_path)
    assert [first.number, second.number, first.number] == [0, 1, 0]
    with second.reserve(0) as is_free:
        assert not is_free
    first.close()
    with second.reserve(0) as is_free:
        assert is_free
        assert Window(tmp_path).number == 2
    assert Window(tmp_path).number == 0
    assert Window(None).number == 0


def test_draft_of_a_new_chat_stays_in_its_window(tmp_path: Path) -> None:
    first = History(tmp_path)
    first.save_new_draft("typed in the first")
    second = History(tmp_path)
    assert second.new_draft() == ""
    second.save_new_draft("typed in the second")
    assert first.new_draft() == "typed in the first"
    assert first.chats.listed() == []
    first.close()
    with History(tmp_path) as again:
        assert again.new_draft() == "typed in the first"
    assert second.new_draft() == "typed in the second"
    second.close()


def test_drafts_of_closed_windows_become_chats(tmp_path: Path) -> None:
    first, second = History(tmp_path), History(tmp_path)
    for window, text in ((first, "one"), (second, "two\nlines")):
        window.new_draft()
        window.save_new_draft(text)
    second.close()
    first.close()
    with History(tmp_path) as again:
        assert again.new_draft() == "one"
        [chat] = again.chats.listed()
        assert (chat.beginning, chat.num_messages) == ("two\nlines", 0)
        assert again.inputs.draft(chat.id) == "two\nlines"
        assert again.new_draft() == "one"
        assert len(again.chats.listed()) == 1
    with History(tmp_path) as again:
        assert again.notices == ()
        assert again.inputs.draft(chat.id) == "two\nlines"


def test_draft_survives_a_killed_window(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), "half a sentence"], check=False)
    with History(tmp_path) as history:
        assert history.new_draft() == "half a sentence"


def test_empty_chat_is_not_listed(tmp_path: Path) -> None:
    with History(tmp_path) as history:
        empty, draft, pinned, named = (history.chats.create(ChatSettings()).id for _ in range(4))
        history.inputs.save_draft("half a", draft)
        history.chats.pin(pinned, pinned=True)
        history.chats.rename(named, "Mine")
        assert [chat.id for chat in history.chats.listed()] == [pinned, named, draft]
        history.messages.add_user_message(empty, None, "said")
        assert [chat.beginning for chat in history.chats.listed()] == ["", "said", "", "half a"]


def test_deleting_a_chat_erases_its_draft_and_keeps_those_of_open_windows(tmp_path: Path) -> None:
    with History(tmp_path) as history:
        chat = history.chats.create(ChatSettings())
        history.inputs.save_draft("unwanted", chat.id)
        history.delete(chat.id)
        other = History(tmp_path)
        history.new_draft()
        other.save_new_draft("wanted")
    other.close()
    with History(tmp_path) as again:
        again.new_draft()
        assert [chat.beginning for chat in again.chats.listed()] == ["wanted"]
    assert b"unwanted" not in b"".join(path.read_bytes() for path in tmp_path.glob("history.sqlite*"))
