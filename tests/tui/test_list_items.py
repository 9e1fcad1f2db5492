"""Tests for lists in replies, which one widget draws, while they grow and afterwards."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from textual.pilot import Pilot

from tests.tui.document_page import DocumentPage
from tui.widgets.code_block import CodeBlock
from tui.widgets.document import Document
from tui.widgets.list_items import Items

Look = Callable[[DocumentPage, Pilot[None]], Awaitable[None]]


def lines_of(page: DocumentPage) -> list[str]:
    return [line.rstrip() for line in page.query_one(Items).render().plain.split("\n")]


def run(text: str, look: Look, width: int = 40) -> None:
    async def show() -> None:
        page = DocumentPage(text)
        async with page.run_test(size=(width, 30)) as pilot:
            await pilot.pause()
            await look(page, pilot)

    asyncio.run(show())


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("- one\n- two\n", ["• one", "• two"]),
        ("9. nine\n1. ten\n   - inner\n     1. most\n", ["  9. nine", " 10. ten", "     • inner", "        1. most"]),
        ("* some words that are wrapped\n", ["• some words that", "  are wrapped"]),
        ("* one\n\n  two\n* \n", ["• one", "  two", "•"]),
        ("- [ ] some words that are wrapped\n- [x] done\n", ["☐ some words that", "  are wrapped", "☑ done"]),
        ("- 漢字漢字漢字漢字漢字\n", ["• 漢字漢字漢字漢字", "  漢字"]),
    ],
)
def test_bullets_and_text_of_an_item_are_on_one_line(text: str, lines: list[str]) -> None:
    async def look(page: DocumentPage, _: Pilot[None]) -> None:
        assert lines_of(page) == lines
        assert page.query_one(Items).size.height == len(lines)

    run(text, look, width=24)


def test_growing_list_mounts_no_widgets() -> None:
    async def look(page: DocumentPage, pilot: Pilot[None]) -> None:
        document, shown = page.query_one(Document), page.query_one(Items)
        for part in ("e\n", "- two **wo", "rds**\n", "  - inner\n", "- three"):
            await document.append(part)
        await pilot.pause()
        assert page.query_one(Items) is shown
        assert lines_of(page) == ["• one", "• two words", "  ▪ inner", "• three"]
        await document.append("\n\n  ```py\n  code\n")
        await pilot.pause()
        assert not shown.is_attached
        assert len(page.query(Items)) == 1  # the nested list; the parts of the outer list are now separate widgets
        assert page.query_one(CodeBlock).code == "code"
        await document.append("  ```\n- four\n")
        await pilot.pause()
        assert page.query_one(CodeBlock).code == "code"

    run("- on", look)


def test_links_in_items_can_be_clicked() -> None:
    async def look(page: DocumentPage, pilot: Pilot[None]) -> None:
        await pilot.click(Items, offset=(5, 0))
        await pilot.pause()
        assert page.clicked == ["https://a.example"]

    run("- <https://a.example>\n", look)


def test_list_can_become_another_block() -> None:
    async def look(page: DocumentPage, pilot: Pilot[None]) -> None:
        await page.query_one(Document).append("--\n")
        await pilot.pause()
        assert not page.query(Items)

    run("-", look)
