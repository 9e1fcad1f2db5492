"""Tests for the choice of a theme: its name in a command, and the list of themes."""

import pytest
from textual.command import CommandList, CommandPalette

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import ScriptedClient
from tui.theme_list import find_theme

NAMES = ["ansi-dark", "hearth-dark", "hearth-light", "hearth-contrast", "solarized-light", "nord"]


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("nord", "nord"),
        ("light", "hearth-light"),
        ("Contrast", "hearth-contrast"),
        ("hearth", None),
        ("solarized", None),
        ("", None),
    ],
)
def test_theme_is_found_by_its_name_or_part_of_an_own_name(typed: str, found: str | None) -> None:
    assert find_theme(typed, NAMES) == found


def test_list_shows_own_themes_first_and_marks_the_one_in_use() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("/theme high-contrast")
        await chat.until(lambda: isinstance(chat.app.screen, CommandPalette))
        assert chat.notices() == ["No theme high-contrast. Choose one of the list."]
        rows = chat.app.screen.query_one(CommandList)
        await chat.until(lambda: rows.option_count > 3)
        shown = [str(rows.get_option_at_index(index).prompt).strip() for index in range(4)]
        assert shown == ["hearth-dark  in use", "hearth-light", "hearth-contrast", "ansi-dark"]
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.app.screen is chat.screen)
        await chat.type("/theme light")
        await chat.until(lambda: chat.app.theme == "hearth-light")

    run(ScriptedClient(), flow, size=(120, 40))
