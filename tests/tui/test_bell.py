"""Tests for the terminal's bell at the end of a reply."""

import pytest

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import USAGE, WAIT, ScriptedClient
from tui.types import Finish, ReplyEnd, TextDelta


@pytest.mark.parametrize(("longest", "has_focus", "rings"), [(-1.0, False, 1), (-1.0, True, 0), (60.0, False, 0)])
def test_bell_rings_after_a_long_reply_without_focus(
    longest: float, has_focus: bool, rings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tui.widgets.conversation.LONG_REPLY", longest)
    rung: list[int] = []

    async def flow(chat: Chatting) -> None:
        monkeypatch.setattr(chat.app, "bell", lambda: rung.append(1))
        await chat.type("one")
        await chat.until(lambda: len(chat.views()) == 2)
        chat.app.app_focus = has_focus  # set after the keys, because keys also set it to True
        chat.client.replies.gate.set()
        await chat.until(lambda: chat.conversation.current_reply is None)
        assert len(rung) == rings

    run(ScriptedClient([TextDelta("begun"), WAIT, ReplyEnd(Finish.COMPLETE, USAGE)]), flow)
