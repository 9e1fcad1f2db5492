"""What comes too late for a screen, and what is missing from one that is there."""

import pytest
from textual.css.query import NoMatches

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import ScriptedClient
from tui.failures import told
from tui.screens.search import SearchScreen


def test_an_answer_for_a_screen_that_has_gone_is_nothing_to_show() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("ctrl+f")
        await chat.until(lambda: isinstance(chat.app.screen, SearchScreen))
        screen = chat.app.screen
        with pytest.raises(NoMatches), told(screen):
            screen.query_one("#nothing")
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.app.screen is not screen)
        with told(screen):
            screen.query_one("#nothing")

    run(ScriptedClient(), flow)
