"""A list in a reply. One widget draws it where its items are text and lists; with code or quotes in them, each part is
a widget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets._markdown import (
    MarkdownBullet,
    MarkdownList,
    MarkdownListItem,
    MarkdownOrderedListItem,
    MarkdownParagraph,
)
from textual.widgets.markdown import MarkdownBlock

from tui.widgets.drawn_block import DrawnBlock

_BULLET = "$text-primary"


@dataclass(frozen=True, slots=True)
class Item:
    """What stands behind one bullet: texts, and lists of items."""

    bullet: str
    parts: Sequence[Content | Sequence[Item]]


class ListBlock(MarkdownList):
    """With bullets or with numbers; while it grows, it is drawn anew and not mounted anew."""

    DEFAULT_CSS = """
    ListBlock { margin: 0 0 1 0; }
    ListBlock Horizontal, ListBlock Vertical { height: auto; width: 1fr; }
    """

    def compose(self) -> ComposeResult:
        items = items_of(self)
        if items is not None:
            yield Items(items)
        else:
            yield from self._mounted()
        self._blocks.clear()

    def _mounted(self) -> ComposeResult:
        for bullet, item in _with_bullets(self):
            mark = MarkdownBullet()
            mark.symbol = bullet
            yield Horizontal(mark, Vertical(*item._blocks))

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        items, shown = items_of(block), self.query_children(Items)
        if items is None or not shown:
            await super()._update_from_block(block)
            return
        for one in shown:
            one.show(items)


class Items(DrawnBlock):
    """Items, those of inner lists farther to the right."""

    DEFAULT_CSS = "Items { width: 1fr; }"

    def __init__(self, items: Sequence[Item]) -> None:
        super().__init__()
        self._items = items

    def show(self, items: Sequence[Item]) -> None:
        """Other ones."""
        self._items = items
        self.changed()

    def lines(self, width: int) -> list[Content]:
        return _lines(self._items, width)


def items_of(block: MarkdownBlock) -> list[Item] | None:
    """Of a list that has nothing in it but text and such lists; None for any other block."""
    if not isinstance(block, ListBlock):
        return None
    items = []
    for bullet, item in _with_bullets(block):
        parts = [one._content if isinstance(one, MarkdownParagraph) else items_of(one) for one in item._blocks]
        if None in parts:
            return None
        items.append(Item(bullet, [part for part in parts if part is not None]))
    return items


def _with_bullets(block: ListBlock) -> list[tuple[str, MarkdownListItem]]:
    """Numbers begin with that of the first item, and end in one column."""
    items = [item for item in block._blocks if isinstance(item, MarkdownListItem)]
    if not items or not isinstance(items[0], MarkdownOrderedListItem):
        return [(item.bullet, item) for item in items]
    numbers = [f"{number}. " for number, _ in enumerate(items, int(items[0].bullet))]
    return [(number.rjust(max(map(len, numbers)) + 1), item) for number, item in zip(numbers, items, strict=True)]


def _lines(items: Sequence[Item], width: int) -> list[Content]:
    lines = []
    for item in items:
        bullet = Content.styled(item.bullet, _BULLET)
        room = max(1, width - bullet.cell_length)
        inner = [line for part in item.parts for line in _lines_of(part, room)] or [Content("")]
        hanging = Content(" " * bullet.cell_length)
        lines += [Content("").join([hanging if place else bullet, line]) for place, line in enumerate(inner)]
    return lines


def _lines_of(part: Content | Sequence[Item], width: int) -> list[Content]:
    if isinstance(part, Content):
        return [line.rstrip() for line in part.wrap(width)] or [Content("")]
    return _lines(part, width)
