"""The highlighted row of a list."""

import asyncio

from textual.app import App, ComposeResult
from textual.content import Content
from textual.widgets import Button
from textual.widgets.option_list import Option

from tui.widgets.rows import Rows


class OneList(App[None]):
    def compose(self) -> ComposeResult:
        yield Rows(*(Option(Content.assemble("name ", ("state", "yellow"), (" age", "dim"))) for _ in range(2)))
        yield Button("another")


def colors(rows: Rows, line: int) -> set[tuple[str, bool]]:
    """Return the colors of the words of a line, and whether they are dim."""
    styles = [style for text, style, _ in rows.render_line(line) if text.strip() and style is not None]
    return {(str(style.color), bool(style.dim)) for style in styles}


def test_highlighted_row_with_the_focus_has_one_color() -> None:
    async def main() -> None:
        async with OneList().run_test() as pilot:
            rows = pilot.app.query_one(Rows)
            rows.focus()
            rows.highlighted = 0
            await pilot.pause()
            assert len(colors(rows, 0)) == 1
            assert len(colors(rows, 1)) > 1
            pilot.app.query_one(Button).focus()
            await pilot.pause()
            assert len(colors(rows, 0)) > 1

    asyncio.run(main())
