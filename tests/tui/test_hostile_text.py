"""Tests with hostile text: it raises no exception, and no escape sequence reaches the terminal."""

import asyncio
import random
import re

from textual.app import App, ComposeResult
from textual.containers import VerticalScroll

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import USAGE, ScriptedClient
from tui.client import ClientError
from tui.types import Finish, ReasoningDelta, ReplyEnd, TextDelta
from tui.widgets.list_items import Items
from tui.widgets.reply_text import ReplyText

PARTS = (
    "[/]", "[b]", "[@click=app.quit]x[/]", "```", "```py\n", "~~~", "\n", "\n\n", "| a | b |\n", "|---|---|\n",
    "| 1 |\n", "1", "1. ", "- ", "  - ", "# ", "> ", "***", "`", "![x](y)", "[x](javascript:y)", "<div>", "</",
    "&#27;", "&#8238;", "&#x9b;", "\t", "\\", "http://", "www.", "x@y.z", "word ", "é漢👨\u200d👩", "$y$", "[^1]",
    "[x]: y\n", "---\n", "===\n", "*", "_", "\x1b[31m", "\x9b2J", "\u202e", "\x07", "\x1b]52;c;eA==\x07",
)  # fmt: skip


class Page(App[None]):
    """Shows a growing text."""

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield ReplyText()


def test_hostile_text_in_any_parts_raises_no_error() -> None:
    async def grow(pieces: list[str]) -> None:
        app = Page()
        async with app.run_test(size=(60, 20)) as pilot:
            page = app.query_one(ReplyText)
            for piece in pieces:
                page.add(TextDelta(piece).text)
                await asyncio.sleep(0.005)
            await pilot.pause()
            shown = "".join(strip.text for strip in app.screen._compositor.render_strips())
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown)

    asyncio.run(grow(["".join(random.choices(PARTS, k=6)) for _ in range(40)]))


def test_table_row_that_becomes_a_list_raises_no_error() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("table")
        await chat.until(lambda: [one.render().plain for one in chat.views()[1].query(Items)] == [" 1. now a list"])

    rows = ["| a | b |\n|---|---|\n| 1 | 2 |\n", "1", ". now a list"]
    steps = [step for row in rows for step in (TextDelta(row), ReasoningDelta(""))]
    run(ScriptedClient([*steps, ReplyEnd(Finish.COMPLETE, USAGE)]), flow)


def test_texts_from_the_backend_have_no_control_characters() -> None:
    bad, good = "a\x1b]0;owned\x07\u202e", "a␛]0;owned␇‹U+202E›"
    assert TextDelta(bad) == TextDelta(good)
    assert ReasoningDelta(bad).text == good
    assert ReplyEnd(Finish.FAILED, USAGE, error=bad).error == good


def test_markup_in_names_titles_and_errors_is_plain_text() -> None:
    bad = "[/] [b]x \x1b]0;owned\x07 \u202e"
    client = ScriptedClient(
        [ReasoningDelta(bad), TextDelta(bad), ReplyEnd(Finish.FAILED, USAGE, error=bad)], [ClientError(bad, bad)]
    )
    client.keep(bad, bad, bad)

    async def flow(chat: Chatting) -> None:
        await chat.say(bad)
        await chat.pilot.press("shift+tab", "ctrl+o")
        await chat.type("/search x")
        await chat.until(lambda: chat.app.screen.query("#found") and "result" in chat.label("#found"))
        await chat.pilot.press("escape", "ctrl+b")
        await chat.pilot.pause()
        shown = chat.app.export_screenshot()
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "␛" in shown

    run(client, flow)
