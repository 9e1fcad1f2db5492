"""Tests for the dialog that chooses a command or a theme, and for the names of themes."""

import pytest

from tests.tui.pilots import Chatting, at_rest, run
from tests.tui.scripted_client import ScriptedClient
from tui.commands import COMMANDS
from tui.screens.choice import ChoiceScreen
from tui.screens.help import HelpScreen
from tui.themes import find_theme
from tui.widgets.rows import Rows

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


def rows(chat: Chatting) -> list[str]:
    """Return the rows of the open dialog, without the spaces between their columns."""
    found = chat.app.screen.query_one(Rows)
    return [" ".join(str(found.get_option_at_index(index).prompt).split()) for index in range(found.option_count)]


async def opened(chat: Chatting) -> None:
    await chat.until(lambda: isinstance(chat.app.screen, ChoiceScreen) and chat.app.screen.is_mounted)
    assert any("↑↓ choose" in line for line in await at_rest(chat.pilot, chat.lines))


def test_list_shows_own_themes_first_and_marks_the_one_in_use() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("/theme high-contrast")
        await opened(chat)
        assert chat.label(".question") == "No theme high-contrast. Choose one of the list."
        assert chat.notices() == []
        shown = ["hearth-dark dark, in use", "hearth-light light", "hearth-contrast dark", "ansi-dark dark"]
        assert rows(chat)[:4] == shown
        await chat.pilot.press("down", "enter")
        await chat.until(lambda: chat.app.theme == "hearth-light")
        await chat.type("/theme contrast")
        await chat.until(lambda: chat.app.theme == "hearth-contrast")

    run(ScriptedClient(), flow, size=(60, 15))


def test_theme_in_use_is_highlighted_and_typing_filters() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("/theme")
        await opened(chat)
        highlighted = chat.app.screen.query_one(Rows).highlighted
        assert highlighted is not None
        assert rows(chat)[highlighted].startswith("nord ")
        await chat.pilot.press(*"nothing-like-it", "enter")
        assert rows(chat) == []
        await chat.pilot.press(*["backspace"] * 15, *"gruv", "enter")
        await chat.until(lambda: chat.app.theme == "gruvbox")

    run(ScriptedClient(), flow, theme="nord")


def test_palette_offers_all_commands_in_the_chat_and_fewer_on_a_page() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("ctrl+backslash")
        await opened(chat)
        assert len(rows(chat)) == len(COMMANDS)
        await chat.pilot.press("pagedown", "pageup", *"hel", "enter")
        await chat.until(lambda: isinstance(chat.app.screen, HelpScreen))
        await chat.pilot.press("ctrl+backslash")
        await opened(chat)
        assert {row.split()[0] for row in rows(chat)} >= {"/models", "/theme", "/quit"}
        assert "/attach PATH" not in " ".join(rows(chat))

    run(ScriptedClient(), flow)
