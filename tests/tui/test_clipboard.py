"""Tests for copying text to the clipboard: with fake programs, with a real tmux, and with the escape sequence."""

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import ScriptedClient
from tui import clipboard
from tui.clipboard import Clipboard, Destination, pick_programs

TEXT = "def f():\n    return 'ü 漢'\n"


def fake(folder: Path, name: str, script: str = 'cat > "$0.got"') -> Path:
    """Add a fake program to `folder`. Returns the file to which the program copies its input."""
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    return folder / f"{name}.got"


def environment(folder: Path, **variables: str) -> dict[str, str]:
    return {"PATH": f"{folder}:/usr/bin:/bin", **variables}


def copied(environment: dict[str, str], text: str = TEXT) -> Destination | None:
    return asyncio.run(Clipboard(environment).copy(text))


@pytest.mark.parametrize(
    ("variables", "platform", "expected"),
    [
        ({}, "linux", []),
        ({"WAYLAND_DISPLAY": "wayland-0", "DISPLAY": ":0"}, "linux", ["wl-copy"]),
        ({"DISPLAY": ":0"}, "linux", ["xclip"]),
        ({}, "darwin", ["pbcopy"]),
        ({}, "win32", ["clip.exe"]),
        ({"WSL_DISTRO_NAME": "Debian", "WAYLAND_DISPLAY": "wayland-0"}, "linux", ["clip.exe"]),
        ({"TMUX": "socket,1,0"}, "linux", ["tmux"]),
        ({"TMUX": "socket,1,0", "DISPLAY": ":0"}, "linux", ["tmux", "xclip"]),
        ({"SSH_TTY": "/dev/pts/1", "DISPLAY": ":10"}, "linux", []),
        ({"SSH_CONNECTION": "a 1 b 22"}, "darwin", []),
        ({"SSH_TTY": "/dev/pts/1", "TMUX": "socket,1,0"}, "linux", ["tmux"]),
    ],
)
def test_session_determines_the_clipboard_programs(
    variables: dict[str, str], platform: str, expected: list[str]
) -> None:
    assert [one.command[0] for one in pick_programs(variables, platform, lambda name: True)] == expected


def test_next_clipboard_program_is_used_if_one_is_missing() -> None:
    picked = pick_programs({"DISPLAY": ":0"}, "linux", lambda name: name == "xsel")
    assert [one.command for one in picked] == [("xsel", "--clipboard", "--input")]


def test_clipboard_program_receives_the_text(tmp_path: Path) -> None:
    got = fake(tmp_path, "xclip")
    assert copied(environment(tmp_path, DISPLAY=":0")) is Destination.CLIPBOARD
    assert got.read_text(encoding="utf-8") == TEXT


def test_clip_exe_receives_utf_16(tmp_path: Path) -> None:
    got = fake(tmp_path, "clip.exe")
    assert copied(environment(tmp_path, WSL_DISTRO_NAME="Debian")) is Destination.CLIPBOARD
    assert got.read_bytes().decode("utf-16") == TEXT


def test_program_that_keeps_its_output_open_does_not_delay_the_copy(tmp_path: Path) -> None:
    fake(tmp_path, "xclip", "cat > /dev/null; sleep 30 & exit 0")
    begun = time.monotonic()
    assert copied(environment(tmp_path, DISPLAY=":0")) is Destination.CLIPBOARD
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("script", ["exit 1", "exec sleep 30", "exec 0<&-; exit 1"])
def test_program_that_fails_or_hangs_copies_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(clipboard, "SECONDS", 0.3)
    fake(tmp_path, "xclip", script)
    assert copied(environment(tmp_path, DISPLAY=":0"), "x" * 1_000_000) is None


def test_tmux_load_buffer_receives_the_text(tmp_path: Path) -> None:
    got = fake(tmp_path, "tmux", '(echo "$@"; cat) > "$0.got"')
    assert copied(environment(tmp_path, TMUX="socket,1,0")) is Destination.TMUX
    assert got.read_text(encoding="utf-8") == f"load-buffer -w -\n{TEXT}"


if shutil.which("tmux"):

    @pytest.fixture
    def tmux(tmp_path: Path) -> Iterator[dict[str, str]]:
        """Start a tmux server with default settings, and return the environment inside of it."""
        command = ["tmux", "-S", str(tmp_path / "tmux"), "-f", "/dev/null"]
        subprocess.run([*command, "new-session", "-d", "sleep 1000"], check=True)
        yield {"PATH": os.environ["PATH"], "TMUX": f"{tmp_path / 'tmux'},1,0"}
        subprocess.run([*command, "kill-server"], check=True)

    def test_text_reaches_the_buffer_of_a_real_tmux(tmux: dict[str, str]) -> None:
        assert copied(tmux) is Destination.TMUX
        shown = subprocess.run(["tmux", "show-buffer"], env=tmux, capture_output=True, check=True)
        assert shown.stdout.decode() == TEXT


def test_notification_names_the_destination_of_a_copy(tmp_path: Path) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("f4")
        await chat.until(lambda: Destination.TERMINAL.value in chat.notices())
        fake(tmp_path, "xclip")
        chat.app._clipboard_programs = Clipboard(environment(tmp_path, DISPLAY=":0"))
        chat.app.copy_to_clipboard("again")
        await chat.until(lambda: Destination.CLIPBOARD.value in chat.notices())
        assert chat.app.clipboard == "again"

    run(ScriptedClient(), flow)
