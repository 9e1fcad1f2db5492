"""A long reply: what is far from what is seen is let go of, and comes back as it was."""

import asyncio
import re

import pytest
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.pilot import Pilot

from tui.markdown import PIECE
from tui.widgets.reply_text import Document, ReplyText, Room

COUNT = 5 * PIECE // 60
TEXT = "\n\n".join(f"Paragraph {number} begins here, and **some words** more are in it." for number in range(COUNT))


class Page(App[None]):
    """A text that is scrolled."""

    # An anchor holds what fills the screen; at one width, heights are not estimated.
    CSS = "ReplyText { height: auto; min-height: 100%; } VerticalScroll { scrollbar-gutter: stable; }"

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield ReplyText(self._text)

    @property
    def scroll(self) -> VerticalScroll:
        return self.query_one(VerticalScroll)

    @property
    def seen(self) -> list[int]:
        """The paragraphs on the screen."""
        lines = "\n".join(strip.text for strip in self.screen._compositor.render_strips())
        return [int(number) for number in re.findall(r"Paragraph (\d+) begins", lines)]


async def settled(page: Page, pilot: Pilot[None], length: int = len(TEXT)) -> None:
    """So much has been shown, what is near is laid out, and the rest is not."""
    before: list[object] = []
    while True:
        await pilot.pause(0.01)
        pieces = list(page.query_one(ReplyText).children)
        shown = sum(len(room.text) for room in page.query(Room))
        shown += sum(len(document.source) for document in page.query(Document))
        empty = any(room.region.overlaps(page.scroll.region) for room in page.query(Room))
        if pieces == before and shown == length and page.seen and not empty:
            return
        before = [*pieces]


async def read_upwards(page: Page, pilot: Pilot[None]) -> list[int]:
    """All paragraphs, from the last to the first one."""
    found: list[int] = []
    while True:
        await settled(page, pilot)
        found += [number for number in reversed(page.seen) if number not in found]
        if page.scroll.scroll_y == 0:
            return found
        page.scroll.scroll_relative(y=-11, animate=False, immediate=True)


@pytest.mark.parametrize("grows", [True, False])
def test_a_long_reply_is_laid_out_where_it_is_seen(grows: bool) -> None:
    async def show() -> None:
        page = Page("" if grows else TEXT)
        async with page.run_test(size=(70, 12)) as pilot:
            page.scroll.anchor()
            for start in range(0, len(TEXT) if grows else 0, 2 * PIECE):
                part = TEXT[start : start + 2 * PIECE]
                page.query_one(ReplyText).add(part)
                await settled(page, pilot, start + len(part))
            await settled(page, pilot)
            assert page.seen[-1] == COUNT - 1
            height = page.scroll.virtual_size.height
            assert len(page.query(Room)) > len(page.query(Document))
            assert height == 2 * COUNT
            assert await read_upwards(page, pilot) == [*range(COUNT)][::-1]
            assert page.scroll.virtual_size.height == height
            assert page.query_one(ReplyText).children[-1].query("*")  # it may still grow

    asyncio.run(show())


def test_what_was_let_go_of_comes_back_in_another_width() -> None:
    async def show() -> None:
        page = Page(TEXT)
        async with page.run_test(size=(70, 12)) as pilot:
            page.scroll.anchor()
            await settled(page, pilot)
            await pilot.resize_terminal(40, 12)
            page.scroll.scroll_home(animate=False, immediate=True)
            await settled(page, pilot)
            assert page.seen[0] == 0
            page.scroll.scroll_end(animate=False, immediate=True)
            await settled(page, pilot)
            assert page.seen[-1] == COUNT - 1

    asyncio.run(show())
