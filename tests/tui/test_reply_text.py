"""A long reply: what is far from what is seen is let go of, and comes back as it was."""

import asyncio
import random
import re

import pytest
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.pilot import Pilot

from tests.tui.pilots import at_rest
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


def numbered(page: Page) -> dict[int, int]:
    """The line of the screen in which each item begins."""
    lines = enumerate(strip.text for strip in page.screen._compositor.render_strips())
    return {int(found[1]): y for y, line in lines if (found := re.search(r"item (\d+)\b", line))}


def test_what_is_read_stays_where_it_is_while_what_is_above_comes_back() -> None:
    """Most of it was never laid out: that it is a list, whose lines hang, is not known to what estimates its height."""
    items = [f"- item {number} " + "and some words of it " * random.randrange(8) for number in range(COUNT)]

    async def show() -> None:
        page = Page("\n".join(items))
        async with page.run_test(size=(50, 16)) as pilot:
            page.scroll.anchor()
            while COUNT - 1 not in numbered(page):
                await pilot.pause(0.01)
            assert page.query(Room)
            found = {*numbered(page)}
            while page.scroll.scroll_y > 0:
                before = numbered(page)
                page.scroll.scroll_relative(y=-3, animate=False, immediate=True)
                after, _ = await at_rest(pilot, lambda: (numbered(page), [*page.query_one(ReplyText).children]))
                moved = {after[number] - before[number] for number in before.keys() & after.keys()}
                assert len(moved & {1, 2, 3}) == len(moved) == 1
                found |= after.keys()
            assert found == {*range(COUNT)}

    asyncio.run(show())


def test_a_list_that_is_cut_has_no_empty_line_in_it() -> None:
    text = "\n".join(f"- item {number}" for number in range(COUNT * 4))

    async def show(grows: bool) -> None:
        page = Page("" if grows else text)
        async with page.run_test(size=(50, 20)) as pilot:
            reply = page.query_one(ReplyText)
            if grows:
                reply.add(text)
                reply.finish()
            while reply._waiting or reply._is_busy:
                await pilot.pause(0.01)
            height = await at_rest(pilot, lambda: reply.size.height)
            assert len(reply.children) > 2
            assert height == COUNT * 4 + 1

    for grows in (True, False):
        asyncio.run(show(grows))
