"""A table whose rows can be replaced. Rows are identified by keys."""

from collections.abc import Mapping, Sequence
from typing import cast

from rich.text import Text
from textual.widgets import DataTable


class Listing(DataTable[Text]):
    """A table that keeps the cursor on its row when the rows are replaced. If the row was removed, the cursor keeps its
    position.
    """

    def __init__(self) -> None:
        super().__init__(cursor_type="row")

    @property
    def chosen(self) -> str | None:
        """The key of the row under the cursor, or None. Without rows, Textual puts the cursor above the first row."""
        keys = list(self.rows)
        return cast(str, keys[self.cursor_row].value) if 0 <= self.cursor_row < len(keys) else None

    def show(self, rows: Mapping[str, Sequence[Text]]) -> None:
        """Replace all rows. `rows`: the cells of each row, by key."""
        chosen, row = self.chosen, self.cursor_row
        self.clear()
        for key, cells in rows.items():
            self.add_row(*cells, key=key)
        self.move_cursor(row=[*rows].index(chosen) if chosen is not None and chosen in rows else row)
        # Textual measures columns later. Draw again then: lines drawn before that are too narrow.
        self.call_after_refresh(self.notify_style_update)
