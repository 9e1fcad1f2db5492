"""Tests of the chat with screens as a process: what it reads from the environment and asks the terminal."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from textual.theme import Theme

from app.chat_backend.session import Opening, Session
from app.cli import ingle
from app.history.history import History
from app.history.records import ChatSettings
from app.settings.settings import Settings, load_settings
from tests.app.chat_backend.plain.test_plain_ends import command, folders
from tests.support.fake_endpoint import FakeEndpoint
from tests.support.terminal_screen import Terminal, python
from tui import themes

# a chat that waits longer for the terminal's answer, because a loaded machine answers late
PATIENT_CHAT = """
import sys
from app.cli import main
from app.process import terminal_background

terminal_background._SECONDS = 30
sys.exit(main())
"""
F4, CTRL_G, CTRL_Q = b"\x1bOS", b"\x07", b"\x11"
QUERY = b"\x1b]11;?"  # OSC 11, which asks for the background color
WHITE, BLACK = (b"\x1b]11;rgb:%b\x1b\\\x1b[?62c" % color for color in (b"ffff/ffff/ffff", b"0000/0000/0000"))


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint() as served:
        yield served


def started(endpoint: FakeEndpoint, place: Path, answer: bytes = BLACK, *options: str, **environment: str) -> Terminal:
    """Start the chat in a terminal outside of tmux and SSH. `answer`: the terminal's answer to OSC 11."""
    nowhere = dict.fromkeys(("TMUX", "SSH_CONNECTION", "SSH_TTY", "WAYLAND_DISPLAY", "DISPLAY", "COLORFGBG"), "")
    arguments = ["-c", PATIENT_CHAT, *command(endpoint)[3:], *options]
    terminal = Terminal(python(*arguments), {**folders(place), "COLORTERM": "truecolor", **nowhere, **environment})
    terminal.resize(100, 30)
    terminal.read_until(lambda output: QUERY in output)
    os.write(terminal.master, answer)
    return terminal


def end(terminal: Terminal) -> None:
    os.write(terminal.master, CTRL_Q)
    assert terminal.ended().status == 0


def test_copy_uses_the_clipboard_program_of_the_environment(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    program = tmp_path / "xclip"
    program.write_text('#!/bin/sh\ncat > "$0.got"\n', encoding="utf-8")
    program.chmod(0o755)
    terminal = started(endpoint, tmp_path, DISPLAY=":9", PATH=f"{tmp_path}:{os.environ['PATH']}")
    terminal.read_until(lambda output: b"stand-in" in output)
    os.write(terminal.master, F4)
    terminal.read_until(lambda output: b"Copied to the clipboard." in output)
    assert (tmp_path / "xclip.got").read_text(encoding="utf-8") == endpoint.url
    end(terminal)


def test_ctrl_g_opens_the_editor_of_the_variable_and_reads_the_message(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    program = tmp_path / "editor"
    program.write_text('#!/bin/sh\nprintf "from the editor" > "$1"\n', encoding="utf-8")
    program.chmod(0o755)
    terminal = started(endpoint, tmp_path, VISUAL="", EDITOR=str(program))
    terminal.read_until(lambda output: b"sk anything" in output)
    os.write(terminal.master, CTRL_G)
    terminal.read_until(lambda output: b"from the editor" in output)
    end(terminal)


@pytest.mark.share(1)
@pytest.mark.parametrize(("answer", "theme"), [(WHITE, themes.DAY), (BLACK, themes.NIGHT)])
def test_theme_follows_the_background_that_the_terminal_reports(
    endpoint: FakeEndpoint, tmp_path: Path, answer: bytes, theme: Theme
) -> None:
    terminal = started(endpoint, tmp_path, answer)
    terminal.read_until(lambda output: b"sk anything" in output)
    background = str(theme.background).lstrip("#")
    color = ";".join(str(part) for part in bytes.fromhex(background)).encode()
    assert b"48;2;" + color in terminal.output
    end(terminal)


def test_chat_can_start_as_a_private_one(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    terminal = started(endpoint, tmp_path, BLACK, "--private")
    terminal.read_until(lambda output: b"Private chat" in output)
    end(terminal)


def test_only_one_chat_is_opened_first() -> None:
    result = CliRunner().invoke(ingle, ["--private", "--continue"])
    assert result.exit_code == 2
    assert "Use one of them." in result.output


def test_farewell_repeats_the_model_and_the_endpoint(tmp_path: Path) -> None:
    model = tmp_path / "a model.gguf"
    model.touch()
    own = Session(load_settings(model=str(model)), {})
    assert own.farewell == f"Resume: ingle -c --model '{model}'    All chats: ingle --resume --model '{model}'"
    remote = Session(load_settings(), {}, "http://127.0.0.1:9/v1")
    assert remote.farewell.startswith("Resume: ingle -c --endpoint http://127.0.0.1:9/v1 ")
    assert Session(load_settings(), {}).farewell == "Resume: ingle -c    All chats: ingle --resume"


class Started(Exception):
    """The chat has started."""


@pytest.mark.parametrize("opening", [Opening.LAST, Opening.NEW])
def test_continued_chat_uses_its_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opening: Opening) -> None:
    def start(settings: Settings, *_: object) -> None:
        raise Started(settings.model)

    def started(session: Session) -> str:
        with pytest.raises(Started) as found:
            session.run_plain()
        return str(found.value)

    monkeypatch.setattr("app.chat_backend.session.TerminalClient", start)
    monkeypatch.delenv("INGLE_MODEL", raising=False)
    model = tmp_path / "own.gguf"
    settings = load_settings(state_dir=tmp_path / "state")
    with History(settings.history_dir) as history:
        chat = history.chats.create(ChatSettings()).id
        asked = history.messages.add_user_message(chat, None, "Hi.")
        history.messages.start_reply(chat, asked.id, str(model))
    session = Session(settings, {}, opening=opening)
    assert started(session) == settings.model  # the model is not on this machine
    model.touch()
    assert started(session) == (str(model) if opening is Opening.LAST else settings.model)
    chosen = load_settings(state_dir=tmp_path / "state", model="smollm2:360m")
    assert started(Session(chosen, {}, opening=opening)) == "smollm2:360m"
    assert started(Session(settings, {}, "http://127.0.0.1:9/v1", opening=opening)) == settings.model
