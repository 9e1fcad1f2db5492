"""Tests for the color of muted text."""

import asyncio

import pytest
from textual.app import App
from textual.color import Color
from textual.theme import BUILTIN_THEMES

from tests.tui.scripted_client import ScriptedClient
from tui import themes
from tui.app import ChatApp

NAMED = [themes.NIGHT.name, themes.DAY.name, *(name for name, theme in BUILTIN_THEMES.items() if not theme.ansi)]


@pytest.mark.share(5)
@pytest.mark.parametrize("name", NAMED)
def test_muted_text_has_less_contrast_than_text(name: str) -> None:
    async def go() -> None:
        app = ChatApp(ScriptedClient(), theme=name)
        async with app.run_test():
            variables = app.theme_variables
            background, text = (Color.parse(variables[key]) for key in ("background", "foreground"))
            for key in ("text-muted", "text-disabled"):
                muted = Color.parse(variables[key])
                assert muted.a == 1.0
                assert not muted.auto
                assert abs(muted.brightness - background.brightness) < abs(text.brightness - background.brightness)

    asyncio.run(go())


def test_terminal_colors_are_kept() -> None:
    variables = App[None]().get_css_variables()
    assert themes.muted_colors({**variables, "background": "ansi_default", "foreground": "ansi_default"}) == {}
