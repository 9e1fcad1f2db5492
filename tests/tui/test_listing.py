"""Tests for a table whose rows can be replaced."""

import asyncio

import pytest
from rich.text import Text
from textual.app import App, ComposeResult
from textual.pilot import Pilot

from tui.widgets.listing import Listing


class Listed(App[None]):
    CSS = "Listing { height: 1fr; }"

    def compose(self) -> ComposeResult:
        yield Listing()


def rows(*keys: str) -> dict[str, list[Text]]:
    return {key: [Text(key)] for key in keys}


async def settle(pilot: Pilot[None]) -> None:
    for _ in range(3):
        await pilot.pause()


def test_cursor_stays_on_its_row() -> None:
    async def flow() -> None:
        async with Listed().run_test() as pilot:
            look(pilot.app.query_one(Listing))

    def look(listing: Listing) -> None:
        listing.add_columns("C")
        assert listing.chosen is None
        listing.show(rows("a", "b", "c"))
        listing.move_cursor(row=1)
        assert listing.chosen == "b"
        listing.show(rows("c", "d", "e", "b"))
        assert listing.chosen == "b"
        listing.show(rows("c", "d"))
        assert listing.chosen == "d"  # the last row
        listing.show({})
        assert listing.chosen is None

    asyncio.run(flow())


@pytest.mark.parametrize("action", ["cursor_up", "cursor_down", "page_up", "page_down", "scroll_top", "scroll_bottom"])
def test_no_row_is_chosen_in_an_empty_table(action: str) -> None:
    async def flow() -> None:
        async with Listed().run_test() as pilot:
            listing = pilot.app.query_one(Listing)
            listing.add_columns("C")
            await settle(pilot)
            await listing.run_action(action)
            assert listing.chosen is None
            listing.show(rows("a", "b"))
            assert listing.chosen == "a"

    asyncio.run(flow())


def test_rows_are_redrawn_after_columns_are_measured() -> None:
    async def flow() -> None:
        async with Listed().run_test() as pilot:
            listing = pilot.app.query_one(Listing)
            listing.add_columns("C")
            await settle(pilot)
            listing.show(rows("a row wider than its column's name"))
            assert "wider" not in listing.render_line(1).text
            await settle(pilot)
            assert listing.render_line(1).text.strip() == "a row wider than its column's name"

    asyncio.run(flow())
