"""Tests for long replies: text far from the screen becomes a placeholder, and later looks as before."""

import asyncio
import random
import re

import pytest
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.pilot import Pilot

from tests.tui.pilots import at_rest
from tui.markdown import PIECE
from tui.widgets.document import Document
from tui.widgets.growing import Placeholder
from tui.widgets.reply_text import ReplyText

COUNT = 5 * PIECE // 60
TEXT = "\n\n".join(f"Paragraph {number} begins here, and **some words** more are in it." for number in range(COUNT))


class Page(App[None]):
    """Shows a text that can be scrolled."""

    # An anchor works only if the text fills the screen. With a fixed width, heights are not estimated again.
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
        """Return the numbers of the paragraphs on the screen."""
        lines = "\n".join(strip.text for strip in self.screen._compositor.render_strips())
        return [int(number) for number in re.findall(r"Paragraph (\d+) begins", lines)]


async def settled(page: Page, pilot: Pilot[None], length: int = len(TEXT)) -> None:
    """Wait until `length` characters are shown, and only text near the screen is laid out."""
    before: list[object] = []
    while True:
        await pilot.pause(0.01)
        pieces = list(page.query_one(ReplyText).children)
        shown = sum(len(piece.text) for holder in page.query(Placeholder) for piece in holder.pieces)
        shown += sum(len(document.source) for document in page.query(Document))
        empty = any(holder.region.overlaps(page.scroll.region) for holder in page.query(Placeholder))
        if pieces == before and shown == length and page.seen and not empty:
            return
        before = [*pieces]


async def read_upwards(page: Page, pilot: Pilot[None]) -> list[int]:
    """Scroll up step by step from the end, and return the numbers of the paragraphs in the order seen."""
    found: list[int] = []
    while True:
        await settled(page, pilot)
        found += [number for number in reversed(page.seen) if number not in found]
        if page.scroll.scroll_y == 0:
            return found
        page.scroll.scroll_relative(y=-11, animate=False, immediate=True)


@pytest.mark.parametrize("grows", [True, False])
def test_long_reply_is_laid_out_only_near_the_screen(grows: bool) -> None:
    async def show() -> None:
        page = Page("" if grows else TEXT)
        async with page.run_test(size=(70, 12)) as pilot:
            page.scroll.anchor()
            for start in range(0, len(TEXT) if grows else 0, 2 * PIECE):
                part = TEXT[start : start + 2 * PIECE]
                page.query_one(ReplyText).add(part)
                await settled(page, pilot, start + len(part))
            page.query_one(ReplyText).finish()
            while page.query_one(ReplyText).has_pending:
                await pilot.pause(0.01)
            await settled(page, pilot)
            assert page.seen[-1] == COUNT - 1
            height = await at_rest(pilot, lambda: page.scroll.virtual_size.height)
            assert sum(len(holder.pieces) for holder in page.query(Placeholder)) > len(page.query(Document))
            assert height == 2 * COUNT
            assert await read_upwards(page, pilot) == [*range(COUNT)][::-1]
            assert page.scroll.virtual_size.height == height
            assert page.query_one(ReplyText).children[-1].query("*")

    asyncio.run(show())


def test_folded_documents_return_at_another_width() -> None:
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
    """Return the first screen line of each numbered item."""
    lines = enumerate(strip.text for strip in page.screen._compositor.render_strips())
    return {int(found[1]): y for y, line in lines if (found := re.search(r"item (\d+)\b", line))}


def test_visible_text_does_not_move_while_text_above_unfolds() -> None:
    """Most of the text was never laid out, and its height is estimated wrongly because wrapped lines of items are
    indented.
    """
    items = [f"- item {number} " + "and some words of it " * random.randrange(8) for number in range(COUNT)]

    async def show() -> None:
        page = Page("\n".join(items))
        async with page.run_test(size=(50, 16)) as pilot:
            page.scroll.anchor()
            while COUNT - 1 not in numbered(page):
                await pilot.pause(0.01)
            assert page.query(Placeholder)
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


@pytest.mark.share(1)
@pytest.mark.parametrize("words", ["> \n" * 400, "- an item\n- another\n" * 200, "https://a.test/" + "path/" * 900])
def test_end_is_followed_while_text_above_unfolds(words: str) -> None:
    """The height of a document changes when it is laid out, because it was estimated. The view must stay at the end."""

    async def show() -> None:
        page = Page(f"{words}\n\n{TEXT}")
        async with page.run_test(size=(70, 2 * COUNT)) as pilot:
            page.scroll.anchor()
            await at_rest(pilot, lambda: [*page.query_one(ReplyText).children])
            assert page.seen[-1] == COUNT - 1
            assert page.scroll.max_scroll_y > 0
            for number in range(3):
                page.query_one(ReplyText).add(f"\n\nParagraph {number} begins anew.")
                while page.query_one(ReplyText).has_pending:
                    await pilot.pause(0.01)
                assert await at_rest(pilot, lambda: page.seen[-1]) == number

    asyncio.run(show())


def test_split_list_has_no_empty_lines() -> None:
    text = "\n".join(f"- item {number}" for number in range(COUNT * 4))

    async def show(grows: bool) -> None:
        page = Page("" if grows else text)
        async with page.run_test(size=(50, 20)) as pilot:
            reply = page.query_one(ReplyText)
            if grows:
                reply.add(text)
                reply.finish()
            while reply.has_pending:
                await pilot.pause(0.01)
            height = await at_rest(pilot, lambda: reply.size.height)
            assert len(reply.children) > 2
            assert height == COUNT * 4 + 1

    for grows in (True, False):
        asyncio.run(show(grows))


async def lines_of(text: str, documents: int) -> list[str]:
    page = Page(text)
    async with page.run_test(size=(70, 300)) as pilot:
        await at_rest(pilot, lambda: page.query_one(ReplyText).size)
        assert len(page.query(Document)) >= documents
        return [strip.text.rstrip() for strip in page.screen._compositor.render_strips()]


@pytest.mark.share(2)
@pytest.mark.parametrize(
    "begin", ["# A heading\n\nand a paragraph", "#no heading", "```\ncode\n```", "A paragraph", "> quoted"]
)
def test_piece_boundaries_are_invisible(begin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n\n".join([begin, "> said\n> so", begin, "| a |\n|---|\n| b |", begin, "- one\n- two"] * 8)
    cut = asyncio.run(lines_of(text, 2))
    monkeypatch.setattr("tui.markdown.PIECE", 10 * len(text))
    assert cut == asyncio.run(lines_of(text, 1))


@pytest.mark.share(1)
@pytest.mark.parametrize("block", ["A paragraph.\n\n", "```\ncode\n```\n", "- an item\n"])
def test_text_faster_than_layout_becomes_a_placeholder(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Words,\n\n" + block * (20 * PIECE // len(block))
    made: list[Document] = []

    class Counted(Document):
        def __init__(self, text: str = "", *, adjoined: bool = False, grows: bool = False) -> None:
            super().__init__(text, adjoined=adjoined, grows=grows)
            made.append(self)

    monkeypatch.setattr("tui.widgets.reply_text.Document", Counted)

    async def show() -> None:
        page = Page()
        async with page.run_test(size=(70, 12)) as pilot:
            page.scroll.anchor()
            reply = page.query_one(ReplyText)
            for part in (text[:PIECE], text[PIECE:], f"\n\n{TEXT}"):
                reply.add(part)
            reply.finish()
            while reply.has_pending:
                await pilot.pause(0.01)
            await settled(page, pilot, len(text) + 2 + len(TEXT))
            assert len(made) < 20
            assert await at_rest(pilot, lambda: page.seen[-1]) == COUNT - 1
            assert _text(reply) == f"{text}\n\n{TEXT}"
            page.scroll.scroll_home(animate=False, immediate=True)
            await at_rest(pilot, lambda: [*reply.children])
            assert "Words," in "".join(strip.text for strip in page.screen._compositor.render_strips())
            assert _text(reply) == f"{text}\n\n{TEXT}"

    asyncio.run(show())


def _text(reply: ReplyText) -> str:
    """Return the whole text in order, both of documents and of placeholders."""
    found = ""
    for child in reply.children:
        assert isinstance(child, Placeholder | Document)
        found += child.source if isinstance(child, Document) else "".join(piece.text for piece in child.pieces)
    return found
