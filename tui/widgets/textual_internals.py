"""The private interface of Textual that the chat's screen and its Markdown build on, in one module.

A list and a table are one widget each, instead of one widget per item and per cell: BENCHMARKS.md says what that saves.
tests/tui/widgets/test_textual_internals.py fails when a version of Textual changes a name that is used here.
"""

from __future__ import annotations

from collections.abc import Mapping

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets._markdown import (
    MarkdownBullet,
    MarkdownList,
    MarkdownListItem,
    MarkdownOrderedListItem,
    MarkdownParagraph,
    MarkdownTable,
    MarkdownTH,
)
from textual.widgets.markdown import MarkdownBlock, MarkdownFence

from tui.widgets.list_items import Item, Items
from tui.widgets.table_cells import Cells, Side

_SIDES: Mapping[str, Side] = {"text-align:center": "center", "text-align:right": "right"}  # left is the default


class SteadyScreen(Screen[None]):
    """A screen that skips frames while `is_unsettled`: a layout whose contents move right after it would flash."""

    @property
    def is_unsettled(self) -> bool:
        return False

    def _compositor_refresh(self) -> None:
        if not self.is_unsettled:
            super()._compositor_refresh()


class ListBlock(MarkdownList):
    """A list with bullets or numbers. One widget draws it if its items are text and lists; with code or quotes in them,
    each part is a widget."""

    DEFAULT_CSS = """
    ListBlock { margin: 0 0 1 0; }
    ListBlock Horizontal, ListBlock Vertical { height: auto; width: 1fr; }
    """

    def compose(self) -> ComposeResult:
        items = _items_of(self)
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
        items, shown = _items_of(block), self.query_children(Items)
        if items is None or not shown:
            await super()._update_from_block(block)
            return
        for one in shown:
            one.show(items)


def _items_of(block: MarkdownBlock) -> list[Item] | None:
    """The items of a list that has only text and such lists in it; None for any other block."""
    if not isinstance(block, ListBlock):
        return None
    items = []
    for bullet, item in _with_bullets(block):
        parts = [one._content if isinstance(one, MarkdownParagraph) else _items_of(one) for one in item._blocks]
        if None in parts:
            return None
        items.append(Item(bullet, [part for part in parts if part is not None]))
    return items


def _with_bullets(block: ListBlock) -> list[tuple[str, MarkdownListItem]]:
    """Numbers start with that of the first item and are aligned to the right."""
    items = [item for item in block._blocks if isinstance(item, MarkdownListItem)]
    if not items or not isinstance(items[0], MarkdownOrderedListItem):
        return [(item.bullet, item) for item in items]
    numbers = [f"{number}. " for number, _ in enumerate(items, int(items[0].bullet))]
    return [(number.rjust(max(map(len, numbers)) + 1), item) for number, item in zip(numbers, items, strict=True)]


class Table(MarkdownTable):
    """A table, drawn by one widget. Its last line may turn out to be something else."""

    def compose(self) -> ComposeResult:
        self._headers, self._rows = self._get_headers_and_rows()
        yield Cells(self._headers, self._rows, _sides(self))

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if not isinstance(block, MarkdownTable):
            await MarkdownBlock._update_from_block(self, block)
            return
        self._headers, self._rows = block._get_headers_and_rows()
        for cells in self.query(Cells):
            cells.show(self._headers, self._rows, _sides(block))


def _sides(block: MarkdownBlock) -> list[Side]:
    """The alignment of each column, as the header's cells state it."""
    if isinstance(block, MarkdownTH):
        return [_SIDES.get(str(block._token.attrs.get("style")), "left")]
    return [side for inner in block._blocks for side in _sides(inner)]


class Fence(MarkdownFence):
    """Code that may grow. Subclasses show `code` in `lexer`'s colors."""

    def show_code(self, content: Content) -> None:
        """The code has changed, or its colors have; `content` is all of it."""
        raise NotImplementedError

    def show_language(self) -> None:
        """`lexer` has changed."""
        raise NotImplementedError

    def set_content(self, content: Content) -> None:
        self._content = content
        self.show_code(content)

    def _copy_context(self, block: MarkdownBlock) -> None:
        before = self.lexer
        super()._copy_context(block)
        if self.lexer != before:
            self.show_language()
