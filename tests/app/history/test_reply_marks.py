"""Replies that another process is generating, and the replies of killed processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from app.history.history import History
from app.history.records import ChatSettings
from app.history.reply_marks import ReplyMarks

REPLYING = """
import sys
from pathlib import Path
from app.history.history import History
history = History(Path(sys.argv[1]))
chat = history.chats.listed()[0].id
reply = history.messages.start_reply(chat, 1, "model")
history.mark_reply(chat, reply.id)
print(reply.id, flush=True)
sys.stdin.readline()
history.unmark_reply(reply.id)
print("ended", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def history(tmp_path: Path) -> History:
    history = History(tmp_path)
    history.messages.add_user_message(history.chats.create(ChatSettings()).id, None, "Hi")
    return history


def replying(folder: Path) -> subprocess.Popen[str]:
    """Start a process that generates a reply until it reads a line."""
    command = [sys.executable, "-c", REPLYING, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_reply_of_another_process_is_marked_until_it_ends(history: History, tmp_path: Path) -> None:
    with history, replying(tmp_path) as process:
        assert process.stdin is not None
        reply = int(line_of(process))
        for _ in range(2):  # reading a mark does not end it
            assert history.replies_elsewhere() == {1: [reply]}
        process.stdin.write("\n")
        process.stdin.flush()
        assert line_of(process) == "ended"
        assert history.replies_elsewhere() == {}


def test_reply_of_a_killed_process_is_not_marked(history: History, tmp_path: Path) -> None:
    with history, replying(tmp_path) as process:
        line_of(process)
        process.kill()
        process.wait()
        assert history.replies_elsewhere() == {}
        assert not list(tmp_path.glob("*.reply"))


def test_own_reply_is_marked_only_for_others(history: History, tmp_path: Path) -> None:
    history.mark_reply(1, 2)
    with history, History(tmp_path) as other:
        assert history.replies_elsewhere() == {}
        assert other.replies_elsewhere() == {1: [2]}
        history.unmark_reply(2)
        assert other.replies_elsewhere() == {}


def test_history_that_is_not_saved_has_no_marks(tmp_path: Path) -> None:
    with History(None) as private:
        private.mark_reply(1, 2)
        assert private.replies_elsewhere() == {}
    missing = ReplyMarks(tmp_path / "missing")
    missing.hold(1, 2)
    assert missing.of_others() == {}
