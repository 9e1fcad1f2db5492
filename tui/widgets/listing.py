"""A table whose rows are other ones from time to time. It knows rows by their keys, and not what they are about."""

from collections.abc import Mapping, Sequence
from typing import cast

from rich.text import Text
from textual.widgets import DataTable


class Listing(DataTable[Text]):
    """The cursor stays with its row, wherever that goes; where it went away, in its place."""

    def __init__(self) -> None:
        super().__init__(cursor_type="row")

    @property
    def chosen(self) -> str | None:
        """The key of the row below the cursor, which Textual puts above the first row when there is none."""
        keys = list(self.rows)
        return cast(str, keys[self.cursor_row].value) if 0 <= self.cursor_row < len(keys) else None

    def show(self, rows: Mapping[str, Sequence[Text]]) -> None:
        """Other rows, by key."""
        chosen, row = self.chosen, self.cursor_row
        self.clear()
        for key, cells in rows.items():
            self.add_row(*cells, key=key)
        self.move_cursor(row=[*rows].index(chosen) if chosen is not None and chosen in rows else row)
        # Columns are measured later: lines that are drawn before would stay as narrow as they are then.
        self.call_after_refresh(self.notify_style_update)
