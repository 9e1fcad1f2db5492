"""Tests for tables in replies: all cells can be read at any width, and a table may grow or become another block."""

import asyncio
import random

from rich.cells import cell_len
from textual.app import App

from tests.tui.document_page import DocumentPage
from tui.widgets.document import Document
from tui.widgets.table_cells import Cells, shared

WORDS = ("a", "fire", "warmth", "漢字", "👨", "inglenook", "é")


def table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def lines_of(page: App[None]) -> list[str]:
    return str(page.query_one(Cells).render()).split("\n")


def cells_of(lines: list[str], columns: int) -> list[list[str]]:
    """Return the words of each column, collected over all lines of the table."""
    texts = [[part.strip() for part in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    return [[row[column] for row in texts if row[column]] for column in range(columns)]


def test_rows_are_separated_if_one_has_several_lines() -> None:
    async def rules(rows: list[list[str]]) -> int:
        page = DocumentPage(table(rows))
        async with page.run_test(size=(24, 30)) as pilot:
            await pilot.pause()
            return sum(line.startswith("├") for line in lines_of(page))

    short = [["a", "b"], ["c", "d"], ["e", "f"]]
    assert asyncio.run(rules(short)) == 1
    assert asyncio.run(rules([*short, ["a long text that is wrapped", "h"]])) == 3


def test_emoji_with_a_disputed_width_do_not_move_borders() -> None:
    async def lines() -> list[str]:
        page = DocumentPage(table([["\u2764\ufe0f", "b"], ["**\u26a0\ufe0f**", "1\ufe0f\u20e3"]]))
        async with page.run_test(size=(24, 30)) as pilot:
            await pilot.pause()
            return lines_of(page)

    shown = asyncio.run(lines())
    assert not any("\ufe0f" in line for line in shown)
    assert shown[1] == "│ \u2764   │ b   │"


def test_all_cells_are_readable_at_any_width() -> None:
    async def show(width: int) -> None:
        columns = random.randrange(1, 5)
        rows = [[" ".join(random.choices(WORDS, k=random.randrange(1, 9))) for _ in range(columns)] for _ in range(6)]
        page = DocumentPage(table(rows))
        async with page.run_test(size=(width, 30)) as pilot:
            await pilot.pause()
            lines, cells = lines_of(page), page.query_one(Cells)
            assert {cell_len(line) for line in lines} == {cells.size.width}
            assert cells.size.height == len(lines)
            shown = cells_of(lines, columns)
            for column in range(columns):
                said = "".join(row[column] for row in rows).replace(" ", "")
                assert "".join(shown[column]).replace(" ", "") == said
            assert cells.size.width <= width - 2

    for width in (40, 60, 120):
        asyncio.run(show(width))


def test_columns_are_aligned_as_their_header_states() -> None:
    async def show() -> None:
        page = DocumentPage(
            "| name | tokens | at | of |\n|---|--:|:-:|:--|\n| a | 7 | x | y |\n| longer | 12,345 | middle | z |"
        )
        async with page.run_test(size=(60, 30)) as pilot:
            await pilot.pause()
            assert lines_of(page)[3] == "│ a      │      7 │   x    │ y   │"
            assert lines_of(page)[4] == "│ longer │ 12,345 │ middle │ z   │"

    asyncio.run(show())


def test_narrow_table_is_as_wide_as_its_words() -> None:
    async def show() -> None:
        page = DocumentPage(table([["a", "b"], ["one", "seat by the fire"]]))
        async with page.run_test(size=(80, 20)) as pilot:
            await pilot.pause()
            assert lines_of(page) == [
                "┌─────┬──────────────────┐",
                "│ a   │ b                │",
                "├─────┼──────────────────┤",
                "│ one │ seat by the fire │",
                "└─────┴──────────────────┘",
            ]

    asyncio.run(show())


def test_table_that_grows_by_single_characters_looks_complete() -> None:
    async def show() -> None:
        text = table([["a", "b"], ["one", "**two**"], ["three", "four"]])
        page = DocumentPage("")
        async with page.run_test(size=(80, 20)) as pilot:
            document = page.query_one(Document)
            for letter in text:
                await document.append(letter)
            await pilot.pause()
            assert lines_of(page)[-2] == "│ three │ four │"
            assert lines_of(page)[3] == "│ one   │ two  │"
            await document.append("\n\nand a line")
            await pilot.pause()
            assert len(page.query(Cells)) == 1

    asyncio.run(show())


def test_link_in_a_cell_can_be_clicked() -> None:
    async def show() -> None:
        page = DocumentPage(table([["a"], ["[seat](https://example.org/x)"]]))
        async with page.run_test(size=(80, 20)) as pilot:
            await pilot.pause()
            await pilot.click(Cells, offset=(3, 3))
            await pilot.pause()
            assert page.clicked == ["https://example.org/x"]

    asyncio.run(show())


def test_wide_columns_share_the_remaining_width() -> None:
    assert shared([5, 10, 4], [3, 3, 3], 30) == [5, 10, 4]
    assert shared([5, 100, 4], [3, 3, 3], 30) == [5, 21, 4]
    assert shared([50, 100, 4], [3, 3, 3], 30) == [13, 13, 4]
    assert shared([50, 50], [9, 9], 2) == [3, 3]
    assert shared([], [], 9) == []


def test_words_are_split_only_if_the_longest_do_not_fit() -> None:
    assert shared([19, 18, 18], [19, 7, 5], 48) == [19, 15, 14]
    assert shared([19, 18, 18], [19, 17, 17], 48) == [16, 16, 16]
