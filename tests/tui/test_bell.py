"""Tests for the bell and the notification at the end of a long reply, and for the title of the window."""

import pytest

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import USAGE, WAIT, ScriptedClient
from tui.terminal_window import TerminalWindow
from tui.types import Finish, ReplyEnd, TextDelta


@pytest.mark.parametrize(("longest", "has_focus", "rings"), [(-1.0, False, 1), (-1.0, True, 0), (60.0, False, 0)])
def test_bell_rings_after_a_long_reply_without_focus(
    longest: float, has_focus: bool, rings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tui.widgets.reply_feed.LONG_REPLY", longest)
    rung: list[int] = []

    async def flow(chat: Chatting) -> None:
        monkeypatch.setattr(chat.app, "bell", lambda: rung.append(1))
        await chat.type("one")
        await chat.until(lambda: len(chat.views()) == 2)
        chat.app.app_focus = has_focus  # set after the keys, because keys also set it to True
        chat.client.replies.gate.set()
        await chat.until(lambda: chat.conversation.current_reply is None)
        await chat.pilot.pause()
        assert len(rung) == rings

    run(ScriptedClient([TextDelta("begun"), WAIT, ReplyEnd(Finish.COMPLETE, USAGE)]), flow)


@pytest.mark.parametrize("is_private", [False, True])
def test_window_has_the_title_of_the_chat(is_private: bool) -> None:
    written: list[str] = []

    async def flow(chat: Chatting) -> None:
        chat.screen.heading.window = window = TerminalWindow(written.append, {"TERM": "xterm-kitty"})
        await chat.conversation.open_new(private=is_private)
        await chat.say("one")
        await chat.until(lambda: "A title" in chat.conversation.chat.title)
        title = "Private chat" if is_private else "A title of the client"
        await chat.until(lambda: written[-1].endswith(f"\x1b]2;{title} · ingle\x07"))
        assert written[0].startswith("\x1b[22;2t")
        window.restore_title()
        assert written[-1] == "\x1b[23;2t"
        assert sum("\x1b[22;2t" in one for one in written) == 1

    run(ScriptedClient(), flow)


@pytest.mark.parametrize(
    ("environment", "has_title", "notifies"),
    [
        ({}, False, False),
        ({"TERM": "linux"}, False, False),
        ({"TERM": "xterm-256color"}, True, False),
        ({"TERM": "tmux-256color", "TERM_PROGRAM": "tmux"}, True, False),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, True, True),
        ({"TERM": "xterm-ghostty"}, True, True),
    ],
)
def test_sequences_are_sent_to_terminals_that_know_them(
    environment: dict[str, str], has_title: bool, notifies: bool
) -> None:
    written: list[str] = []
    window = TerminalWindow(written.append, environment)
    window.show_title("A chat\x1b]2;other\x07")
    assert bool(written) is has_title
    assert "".join(written).count("\x1b]") == has_title
    written.clear()
    window.notify("Reply finished: A\nchat")
    assert written == ["\x1b]9;ingle: Reply finished: A chat\x07"] * notifies


def test_bell_setting_silences_the_notification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.widgets.reply_feed.LONG_REPLY", -1.0)
    written: list[str] = []

    async def flow(chat: Chatting) -> None:
        for rings in (True, False):
            window = TerminalWindow(written.append, {"TERM_PROGRAM": "ghostty"}, rings=rings)
            chat.screen.heading.window = window
            await chat.type("one")
            await chat.until(lambda: chat.conversation.current_reply is not None)
            chat.app.app_focus = False
            chat.client.replies.gate.set()
            await chat.until(lambda: chat.conversation.current_reply is None)
            await chat.pilot.pause()
        assert len(written) == 1
        assert "Reply finished" in written[0]

    run(ScriptedClient([TextDelta("begun"), WAIT, ReplyEnd(Finish.COMPLETE, USAGE)]), flow)
