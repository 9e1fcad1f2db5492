"""Tests for writing a message in the user's editor: with scripts as editors, and with a real terminal."""

import gc
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.terminal_screen import Terminal, python
from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import WAIT, ScriptedClient
from tui.client import ClientError
from tui.editor import pick_editor
from tui.types import TextDelta


def script(folder: Path, commands: str) -> str:
    """Write a shell script that acts as the editor; "$1" is the file to edit. Returns its command."""
    program = folder / "my editor"
    program.write_text(f"#!/bin/sh\n{commands}\n", encoding="utf-8")
    program.chmod(0o755)
    return shlex.quote(str(program))


def use(chat: Chatting, editor: str) -> None:
    chat.screen.dialogs.editor = editor


@pytest.mark.parametrize(
    ("chosen", "platform", "installed", "command"),
    [
        ("code --wait", "linux", "nano", ["code", "--wait"]),
        ("'my editor' -x", "darwin", "", ["my editor", "-x"]),
        ("", "linux", "nano vi", ["nano"]),
        (" ", "linux", "", ["vi"]),
        ("", "win32", "", ["notepad"]),
        ("C:\\bin\\edit.exe /w", "win32", "", ["C:\\bin\\edit.exe", "/w"]),
    ],
)
def test_configured_editor_or_a_common_one_is_chosen(
    chosen: str, platform: str, installed: str, command: Sequence[str]
) -> None:
    assert list(pick_editor(chosen, platform, installed.split().__contains__)) == command


@pytest.mark.parametrize("keys", [["ctrl+g"], ["/editor", "enter"]])
def test_saved_text_becomes_the_draft(keys: list[str], tmp_path: Path) -> None:
    async def flow(chat: Chatting) -> None:
        use(chat, script(tmp_path, 'cat "$1" > "$0.seen"; printf "first\\nsecond ü\\n" > "$1"'))
        if keys == ["ctrl+g"]:
            await chat.type("a draft", enter=False)
            await chat.pilot.press(*keys)
        else:
            await chat.type(keys[0])
        await chat.until(lambda: chat.composer.area.text == "first\nsecond ü")
        assert (tmp_path / "my editor.seen").read_text() == ("a draft" if keys == ["ctrl+g"] else "")
        assert chat.composer.area.cursor_at_end_of_text
        assert chat.app.focused is chat.composer.area
        await chat.pilot.press("enter")
        await chat.until(lambda: chat.texts() == ["first\nsecond ü", "Hello."])

    run(ScriptedClient(), flow)


@pytest.mark.parametrize(
    ("commands", "reason"),
    [
        ('echo lost > "$1"; exit 3', "The editor ended with status 3."),
        ('printf "\\377" > "$1"', "The file message.md is not text."),
        ('rm "$1"', "There is no file /"),
        ("", "The editor could not be started: nowhere at all: No such file or directory."),
    ],
)
def test_failing_editor_leaves_the_draft_unchanged(commands: str, reason: str, tmp_path: Path) -> None:
    async def flow(chat: Chatting) -> None:
        use(chat, script(tmp_path, commands) if commands else "nowhere at all")
        await chat.type("a draft", enter=False)
        await chat.pilot.press("ctrl+g")
        await chat.until(lambda: any(reason in notice for notice in chat.notices()))
        assert chat.composer.area.text == "a draft"

    run(ScriptedClient(), flow)


def test_message_that_waits_after_a_failed_reply_is_not_edited(tmp_path: Path) -> None:
    client = ScriptedClient([TextDelta("begun"), WAIT, ClientError("The engine is gone.")])

    async def flow(chat: Chatting) -> None:
        use(chat, script(tmp_path, 'until [ -e "$0.ends" ]; do sleep 0.05; done; echo edited > "$1"'))
        await chat.type("one")
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.type("queued")
        await chat.type("a draft", enter=False)
        await chat.pilot.press("ctrl+g")
        client.replies.gate.set()
        await chat.until(lambda: chat.conversation.current_reply is None)
        (tmp_path / "my editor.ends").touch()
        await chat.until(lambda: chat.composer.area.text == "edited")
        assert chat.label("#queue").startswith("next: queued\n")

    run(client, flow)


def test_private_draft_is_not_written_to_a_file(tmp_path: Path) -> None:
    async def flow(chat: Chatting) -> None:
        use(chat, script(tmp_path, 'touch "$0.seen"'))
        await chat.conversation.open_new(private=True)
        await chat.type("a secret", enter=False)
        await chat.pilot.press("ctrl+g")
        await chat.until(chat.notices)
        assert not (tmp_path / "my editor.seen").exists()

    run(ScriptedClient(), flow)


@pytest.mark.parametrize("on_signal", ["", "trap '' TERM"], ids=["ends", "ignores the signal"])
def test_editor_ends_with_the_chat(on_signal: str, tmp_path: Path) -> None:
    started = tmp_path / "my editor.started"

    async def flow(chat: Chatting) -> None:
        use(
            chat,
            script(tmp_path, f'{on_signal}\necho $$ > "$0.pid"; mv "$0.pid" "$0.started"; read forever < "$0.pipe"'),
        )
        os.mkfifo(tmp_path / "my editor.pipe")
        await chat.pilot.press("ctrl+g")
        await chat.until(started.exists)

    run(ScriptedClient(), flow)
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    gc.collect()  # reports a process that is left to the garbage collector


PROGRAM = """
import asyncio, sys
from tests.tui.scripted_client import ScriptedClient
from tui.app import ChatApp
from tui.types import MessageId, ReplyStarted, TextDelta

client = ScriptedClient()
client.engine.loads.set()

async def reply(chat, to):
    yield ReplyStarted(MessageId("reply"), "")
    while True:
        yield TextDelta("word ")
        await asyncio.sleep(0.05)

client.replies.reply = reply
app = ChatApp(client, editor=sys.argv[1])
app.run()
print("left", client.chats.sent, client.chats.drafts)
"""


def test_editor_owns_the_terminal_during_a_reply(tmp_path: Path) -> None:
    commands = """
        trap 'echo interrupted; interrupted=1' INT
        sleep 0.5
        echo "editor here"
        until [ "$interrupted" ]; do sleep 0.05; done
        sleep 3
        read typed
        echo "heard $typed"
        echo "$typed" > "$1"
    """
    editor = script(tmp_path, commands)
    terminal = Terminal(python("-c", PROGRAM, editor), {})
    terminal.resize(80, 24)
    terminal.read_until(lambda output: b"sk anything" in output)
    terminal.type("go\r")
    terminal.read_until(lambda output: b"word" in output)
    terminal.type("\x07")
    terminal.read_until(lambda output: b"editor here" in output)
    shown = len(terminal.output)
    terminal.type("\x03")  # interrupts the loop of the editor
    terminal.read_until(lambda output: b"interrupted" in output)
    terminal.type("from the editor\n")
    terminal.read_until(lambda output: b"\x1b[?1049h" in output[shown:])
    terminal.read_until(lambda output: b"from the editor" in output[output.rindex(b"\x1b[?1049h") :])
    # wait until the whole screen is drawn
    terminal.read_until(lambda output: b"Models" in output[output.rindex(b"\x1b[?1049h") :])
    during = terminal.output[shown : terminal.output.rindex(b"\x1b[?1049h")]
    assert b"word" not in during
    assert b"heard from the editor" in during
    terminal.type("\x11")
    ended = terminal.ended()
    assert (ended.status, ended.modes, ended.attributes_are_back) == (0, frozenset(), True)
    assert b"'chat-1': 'from the editor'" in ended.output


def test_editor_that_is_not_installed_gives_the_terminal_back() -> None:
    terminal = Terminal(python("-c", PROGRAM, "no-such-editor"), {})
    terminal.resize(80, 24)
    terminal.read_until(lambda output: b"sk anything" in output)
    terminal.type("a draft\x07")
    terminal.read_until(lambda output: b"could not be" in output)
    assert terminal.output.count(b"\x1b[?1049h") == terminal.output.count(b"\x1b[?1049l") + 1
    terminal.type("\x11")
    ended = terminal.ended()
    assert (ended.status, ended.modes, ended.attributes_are_back) == (0, frozenset(), True)
    assert b"a draft" in ended.output
