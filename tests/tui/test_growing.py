"""Tests for growing text: it needs few layouts, is shown immediately, and leaves no reserved lines at the end."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from textual._compositor import Compositor, ReflowResult
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.pilot import Pilot
from textual.widget import Widget

from tests.tui.pilots import at_rest
from tui.widgets.growing import reserved_lines
from tui.widgets.reply_text import ReplyText

WORDS = "The seat beside the fire was **warm**, and nobody wished to leave it for `anything` else."
LONG = " ".join([WORDS] * 12)
BLOCKS = {
    "paragraphs": f"{LONG}\n\n{WORDS}\n\n{LONG}",
    "list": "\n".join(f"- {WORDS}\n    - {number} inner" for number in range(6)),
    "table": "| a | b |\n|---|---|\n" + "\n".join(f"| {row} | {'wide ' * row} |" for row in range(7)),
    "code": "```python\n" + "\n".join(f"{'wide' * row} = {row}" for row in range(9)) + "\n```",
    "all": f"# Heading\n\n{LONG}\n\n1. {WORDS}\n2. {WORDS}\n\n> {WORDS}\n\n```\nx\n```\n\n| a |\n|---|\n| b |\n\nEnd.",
}


@pytest.fixture(autouse=True)
def drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.widgets.reply_text._LONGEST_REST", 0.001)


class Page(App[None]):
    # Reserve space for the scroll bar, so that the text has the same width with and without it.
    CSS = "ReplyText { height: auto; } VerticalScroll { scrollbar-gutter: stable; }"

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll() as scroll:
            yield ReplyText(self._text)
        scroll.anchor()

    @property
    def reply(self) -> ReplyText:
        return self.query_one(ReplyText)

    @property
    def lines(self) -> list[str]:
        return [strip.text.rstrip() for strip in self.screen._compositor.render_strips()]


async def shown(page: Page, pilot: Pilot[None]) -> None:
    """Wait until all text that was added is laid out."""
    while page.reply.has_pending:
        await asyncio.sleep(0.002)
    await pilot.pause()


async def whole(text: str, width: int) -> list[str]:
    page = Page(text)
    async with page.run_test(size=(width, 60)) as pilot:
        return await at_rest(pilot, lambda: page.lines)


@pytest.mark.share(2, "begun")
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_grown_text_looks_like_complete_text(name: str, begun: bool) -> None:
    text, width = BLOCKS[name], random.randrange(40, 90)
    first = random.randrange(1, len(text)) if begun else 0

    async def show() -> None:
        page = Page(text[:first])
        async with page.run_test(size=(width, 60)) as pilot:
            rest = text[first:]
            while rest:
                part, rest = rest[: (size := random.randrange(1, 90))], rest[size:]
                page.reply.add(part)
                await shown(page, pilot)
            page.reply.finish()
            assert await at_rest(pilot, lambda: page.lines) == await whole(text, width)

    asyncio.run(show())


@pytest.mark.parametrize("begin", ["- ", "Words "])
def test_growing_text_is_shown_at_once_with_few_layouts(begin: str) -> None:
    async def show() -> None:
        page = Page(begin)
        async with page.run_test(size=(60, 60)) as pilot:
            with counted_layouts() as layouts:
                for number, word in enumerate(LONG.split()[:70]):
                    page.reply.add(f"{word} {number} ")
                    await shown(page, pilot)
                    assert str(number) in " ".join(page.lines)
            height = len([line for line in page.lines if line])
            assert 0 < len(layouts) <= 3 + 2 * height / reserved_lines(page.reply) < number / 8

    asyncio.run(show())


def test_first_lines_of_a_paragraph_need_one_layout() -> None:
    async def show() -> None:
        page = Page("Words")
        async with page.run_test(size=(60, 20)) as pilot:
            await shown(page, pilot)
            for number in range(40):  # several documents
                page.reply.add(f"\n\n{number} {WORDS[:40]}")
                await shown(page, pilot)
                await at_rest(pilot, lambda: [*page.reply.children])
                with counted_layouts() as layouts:
                    page.reply.add(f" {WORDS}")
                    await shown(page, pilot)
                assert not layouts, number

    asyncio.run(show())


def test_complete_text_has_no_reserved_lines() -> None:
    async def show() -> None:
        page = Page("- ")
        async with page.run_test(size=(60, 60)) as pilot:
            page.reply.add(WORDS)
            await shown(page, pilot)
            page.reply.add(f" {WORDS}\n- {WORDS}")
            await shown(page, pilot)
            grown = page.reply.virtual_region.height
            page.reply.add(" And")
            page.reply.finish()  # the text is complete, but not all of it is shown
            await shown(page, pilot)
            # one more for the empty line at the end
            assert page.reply.virtual_region.height == len([line for line in page.lines if line]) + 1
            assert page.reply.virtual_region.height < grown

    asyncio.run(show())


@contextmanager
def counted_layouts() -> Iterator[list[Compositor]]:
    """Yield a list that gets one entry for each layout of a screen."""
    counted: list[Compositor] = []
    with pytest.MonkeyPatch.context() as patch:
        reflow = Compositor.reflow

        def counting(self: Compositor, parent: Widget, size: Size) -> ReflowResult:
            counted.append(self)
            return reflow(self, parent, size)

        patch.setattr(Compositor, "reflow", counting)
        yield counted
