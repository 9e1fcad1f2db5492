"""The cells of a table in a reply. One widget draws all of them, so that a row costs no more than its text."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from rich.cells import cell_len
from textual.content import Content
from textual.geometry import Size

from tui.widgets.drawn_block import DrawnBlock

_NARROWEST = 3  # minimum width of a column in cells
_FRAME = "$foreground 30%"

Side: TypeAlias = Literal["left", "center", "right"]


class Cells(DrawnBlock):
    """The header and the rows. Columns are as wide as their text if possible, else they share the width."""

    DEFAULT_CSS = "Cells { width: auto; max-width: 100%; }"

    def __init__(self, header: Sequence[Content], rows: Sequence[Sequence[Content]], sides: Sequence[Side]) -> None:
        super().__init__()
        self._header, self._rows, self._sides = header, rows, sides

    def show(self, header: Sequence[Content], rows: Sequence[Sequence[Content]], sides: Sequence[Side]) -> None:
        """Replace the cells."""
        self._header, self._rows, self._sides = header, rows, sides
        self.changed()

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return min(container.width, sum(self._widths(container.width)) + _around(len(self._header)))

    def _widths(self, width: int) -> list[int]:
        """Return the widths of the columns for a table of at most `width` cells."""
        columns = [
            [line for cell in column for line in cell.split("\n")]
            for column in zip(self._header, *(_filled(row, len(self._header)) for row in self._rows), strict=True)
        ]
        wanted = [max([_NARROWEST, *(line.cell_length for line in lines)]) for lines in columns]
        words = [
            max([_NARROWEST, *(cell_len(word) for line in lines for word in line.plain.split())]) for lines in columns
        ]
        return shared(wanted, words, width - _around(len(columns)))

    def lines(self, width: int) -> list[Content]:
        widths = self._widths(width)
        rules = [
            Content.styled(left + cross.join("─" * (wide + 2) for wide in widths) + right, _FRAME)
            for left, cross, right in ("┌┬┐", "├┼┤", "└┴┘")
        ]
        columns = list(zip(widths, self._sides, strict=True))
        head = _row([cell.stylize("bold $primary") for cell in self._header], columns)
        rows = [_row(_filled(row, len(columns)), columns) for row in self._rows]
        # a row of several lines would run into the next one
        gap = [rules[1]] if any(len(row) > 1 for row in rows) else []
        body = [line for index, row in enumerate(rows) for line in (*(gap if index else ()), *row)]
        return [rules[0], *head, *([rules[1], *body] if body else []), rules[2]]


def shared(wanted: Sequence[int], words: Sequence[int], width: int) -> list[int]:
    """Reduce column widths to a total of `width` cells if possible.

    Columns are at least as wide as their longest words, `words`, if all of these fit. Narrow columns keep their width,
    and the others share the rest.
    """
    widths = list(words) if sum(words) <= width else [_NARROWEST] * len(words)
    left = width - sum(widths)
    lacking = [want - least for want, least in zip(wanted, widths, strict=True)]
    for rank, column in enumerate(sorted(range(len(wanted)), key=lacking.__getitem__)):
        more = min(lacking[column], max(0, left // (len(wanted) - rank)))
        widths[column] += more
        left -= more
    return widths


def _around(columns: int) -> int:
    """Return the width in cells of borders and padding."""
    return 3 * columns + 1


def _filled(row: Sequence[Content], columns: int) -> list[Content]:
    """Return a row with exactly `columns` cells. The last row may be incomplete while the reply grows."""
    return [*row, *[Content("")] * columns][:columns]


def _row(cells: Sequence[Content], columns: Sequence[tuple[int, Side]]) -> list[Content]:
    """Return the drawn lines of one row."""
    wrapped = [cell.wrap(width) or [Content("")] for cell, (width, _) in zip(cells, columns, strict=True)]
    bar = Content.styled("│", _FRAME)
    lines = []
    for index in range(max(map(len, wrapped))):
        parts = [bar]
        for lines_of_cell, (width, side) in zip(wrapped, columns, strict=True):
            part = lines_of_cell[index].rstrip() if index < len(lines_of_cell) else Content("")
            parts += [Content(" "), _aligned(part, width, side), Content(" "), bar]
        lines.append(Content("").join(parts))
    return lines


def _aligned(part: Content, width: int, side: Side) -> Content:
    spare = max(0, width - part.cell_length)
    left = {"left": 0, "center": spare // 2, "right": spare}[side]
    return part.pad_left(left).pad_right(spare - left)
