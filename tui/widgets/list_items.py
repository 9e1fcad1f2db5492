"""The items of a list in a reply. One widget draws all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content

from tui.widgets.drawn_block import DrawnBlock

_BULLET = "$text-primary"
BOXES = ("☐ ", "☑ ")  # of open and of finished tasks


@dataclass(frozen=True, slots=True)
class Item:
    """One list item: paragraphs and nested lists."""

    bullet: str
    parts: Sequence[Content | Sequence[Item]]

    @property
    def boxed(self) -> Item:
        """The item with its box as the bullet, if it is a task."""
        first, *rest = self.parts or [Content("")]
        if isinstance(first, Content) and first.plain.startswith(BOXES):
            return Item(first.plain[:2], [first[2:], *rest])
        return self


class Items(DrawnBlock):
    """Draws items, with nested lists indented."""

    DEFAULT_CSS = "Items { width: 1fr; }"

    def __init__(self, items: Sequence[Item]) -> None:
        super().__init__()
        self._items = items

    def show(self, items: Sequence[Item]) -> None:
        """Replace the items."""
        self._items = items
        self.changed()

    def lines(self, width: int) -> list[Content]:
        return _lines(self._items, width)


def _lines(items: Sequence[Item], width: int) -> list[Content]:
    lines = []
    for item in (one.boxed for one in items):
        bullet = Content.styled(item.bullet, _BULLET)
        inner_width = max(1, width - bullet.cell_length)
        inner = [line for part in item.parts for line in _lines_of(part, inner_width)] or [Content("")]
        hanging = Content(" " * bullet.cell_length)
        lines += [Content("").join([hanging if index else bullet, line]) for index, line in enumerate(inner)]
    return lines


def _lines_of(part: Content | Sequence[Item], width: int) -> list[Content]:
    if isinstance(part, Content):
        return [line.rstrip() for line in part.wrap(width)] or [Content("")]
    return _lines(part, width)
