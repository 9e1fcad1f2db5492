"""Tests for the top bar."""

import asyncio

from textual.app import App, ComposeResult

from tui.widgets.top_bar import TopBar


class Barred(App[None]):
    def compose(self) -> ComposeResult:
        yield TopBar()


def test_top_bar_cuts_the_title_and_never_the_activity() -> None:
    async def show() -> None:
        async with Barred().run_test(size=(30, 24)) as pilot:
            bar = pilot.app.query_one(TopBar)
            bar.chat_title, bar.activity = "A title that is too long", "writing"
            shown = bar.render()
            assert shown.plain == " A title that is too… writing "
            styles = {shown.plain[span.start : span.end].strip(): span.style for span in shown.spans}
            assert styles == {"A title that is too…": "bold", "writing": "$text-accent"}

    asyncio.run(show())


def test_top_bar_shows_that_chats_are_not_saved() -> None:
    async def show() -> None:
        async with Barred().run_test(size=(30, 24)) as pilot:
            bar = pilot.app.query_one(TopBar)
            bar.chat_title, bar.is_saved = "A title that is too long", False
            assert bar.render().plain == " Not saved: A title that is…  "

    asyncio.run(show())
