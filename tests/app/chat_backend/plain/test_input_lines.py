"""Tests for typing in the plain chat in a real terminal: editing, history, completion, and Ctrl-C."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.chat_backend.plain.test_plain_ends import command, folders
from tests.support.fake_endpoint import FakeEndpoint
from tests.support.terminal_screen import Terminal

LEFT, UP = b"\x1b[D", b"\x1b[A"
CTRL_A, CTRL_C, CTRL_D = b"\x01", b"\x03", b"\x04"


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint() as served:
        yield served


class Typing:
    """A plain chat that runs in a terminal."""

    def __init__(self, endpoint: FakeEndpoint, place: Path, **environment: str) -> None:
        self.endpoint = endpoint
        self.terminal = Terminal(
            command(endpoint, "--plain"), {**folders(place), "INPUTRC": "/dev/null", **environment}
        )
        self.wait(b"> ")

    def wait(self, *parts: bytes) -> None:
        """Wait until new output contains these parts in order, and discard that output."""

        def has_all(output: bytes) -> bool:
            at = 0
            for part in parts:
                at = output.find(part, at)
                if at < 0:
                    return False
                at += len(part)
            return True

        self.terminal.read_until(has_all)
        self.terminal.output = b""

    def press(self, *keys: bytes) -> None:
        for key in keys:
            os.write(self.terminal.master, key)

    def send(self, *keys: bytes) -> None:
        """Type a message and press Enter, and wait until the reply is printed."""
        self.press(*keys, b"\r")
        self.wait(b"Hello.", b"> ")

    def leave(self) -> int:
        self.press(CTRL_D)
        ended = self.terminal.ended()
        assert ended.attributes_are_back
        assert ended.modes == frozenset()
        return ended.status

    def asked(self) -> list[Any]:
        return [asked["messages"][-1]["content"] for asked in self.endpoint.asked]


def test_line_can_be_edited_and_earlier_lines_recalled(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    chat = Typing(endpoint, tmp_path)
    chat.send(b"wrld", LEFT, LEFT, LEFT, b"o", CTRL_A, b"Hello ")
    chat.send(UP, b"!")
    assert chat.asked() == ["Hello world", "Hello world!"]
    assert chat.leave() == 0


def test_ctrl_c_clears_a_typed_line(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    chat = Typing(endpoint, tmp_path)
    chat.press(b"half typed", CTRL_C)
    chat.wait(b"half typed^C", b"> ")
    chat.send(b"whole")
    assert chat.asked() == ["whole"]
    assert chat.leave() == 0


def test_ctrl_c_on_an_empty_line_shows_how_to_leave(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    chat = Typing(endpoint, tmp_path)
    chat.press(CTRL_C)
    chat.wait(b"Press ^c again to leave, or ^d.", b"> ")
    chat.send(b"Hi")
    chat.press(CTRL_C)
    chat.wait(b"Press ^c again", b"> ")
    chat.press(CTRL_C)
    ended = chat.terminal.ended()
    assert (ended.status, ended.attributes_are_back, ended.modes) == (128 + signal.SIGINT, True, frozenset())


def test_keys_during_a_reply_do_not_mix_with_it(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    endpoint.replies = [["One ", "two ", "three.\n"], ["Hello."]]
    endpoint.hold()
    chat = Typing(endpoint, tmp_path)
    chat.press(b"Count\r")
    while not endpoint.asked:
        chat.terminal.read_until(lambda output: b"Count" in output)
    chat.press(b"next question")
    endpoint._held.set()
    chat.terminal.read_until(lambda output: b"next question" in output.partition(b"three.")[2])
    assert b"next question" not in chat.terminal.output.partition(b"three.")[0]
    chat.wait(b"One two three.", b"> ", b"next question")
    chat.send()
    assert chat.asked() == ["Count", "next question"]
    assert chat.leave() == 0


def test_tab_completes_commands_and_paths(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    (tmp_path / "a note.txt").write_text("text", encoding="utf-8")
    chat = Typing(endpoint, tmp_path)
    chat.press(b"/att\t", f"{tmp_path}/a no\t".encode(), b"\r")
    chat.wait(b"a note.txt: ", b"attached to the next message", b"> ")
    chat.press(b"/set temp\t 0.5\r")
    chat.wait(b"temperature: 0.5", b"> ")
    assert chat.leave() == 0


def test_pasted_lines_are_one_message(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    chat = Typing(endpoint, tmp_path)
    chat.press(b"a", CTRL_C)
    chat.wait(b"^C", b"\x1b[?2004h", b"> ")  # the terminal marks pasted text only if asked to
    chat.send(b"\x1b[200~one\ntwo\x1b[201~")
    assert chat.asked() == ["one\ntwo"]
    assert chat.leave() == 0


def test_lines_pasted_during_a_reply_are_one_message(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    endpoint.replies = [["One ", "two.\n"], ["Hello."]]
    endpoint.hold()
    chat = Typing(endpoint, tmp_path)
    chat.press(b"Count\r")
    chat.terminal.read_until(lambda output: b"\x1b[?2004h" in output.partition(b"\x1b[?2004l")[2])
    while not endpoint.asked:
        time.sleep(0.01)
    chat.press(b"\x1b[200~one\ntwo\x1b[201~")
    endpoint._held.set()
    chat.wait(b"One two.", b"> ")
    chat.send()
    assert chat.asked() == ["Count", "one\ntwo"]
    assert chat.leave() == 0


def test_dumb_terminal_gets_no_escape_sequences(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    chat = Typing(endpoint, tmp_path, TERM="dumb")
    chat.press(b"Hi\r")
    chat.terminal.read_until(lambda output: b"Hello." in output and output.endswith(b"> "))
    chat.press(CTRL_D)
    assert b"\x1b" not in chat.terminal.ended().output
