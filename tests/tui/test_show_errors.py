"""Tests for results that arrive after the user has closed their screen."""

import pytest
from textual.css.query import NoMatches

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import ScriptedClient
from tui.screens.search import SearchScreen
from tui.show_errors import show_errors


def test_query_for_a_closed_screen_raises_no_error() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("ctrl+f")
        await chat.until(lambda: isinstance(chat.app.screen, SearchScreen))
        screen = chat.app.screen
        with pytest.raises(NoMatches), show_errors(screen):
            screen.query_one("#nothing")
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.app.screen is not screen)
        with show_errors(screen):
            screen.query_one("#nothing")

    run(ScriptedClient(), flow)
