"""All uses of private names of Textual by the Markdown widgets.

A list and a table are one widget each, instead of one widget for each item and cell: BENCHMARKS.md states the savings.
The other private names are in tui/widgets/textual_internals.py, because a chat starts without Markdown widgets.
tests/tui/test_textual_internals.py fails if a version of Textual changes a name that is used in these modules.
"""

from __future__ import annotations

from collections.abc import Mapping

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
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

from tui.widgets.growing import draw_growth, size_by_layout
from tui.widgets.list_items import Item, Items
from tui.widgets.table_cells import Cells, Side

# other columns are aligned to the left
_SIDES: Mapping[str, Side] = {"text-align:center": "center", "text-align:right": "right"}


class Paragraph(MarkdownParagraph):
    """A paragraph that grows without a layout until its reserved lines are full."""

    virtual_size = size_by_layout()

    def set_content(self, content: Content) -> None:
        self._content = content
        self.update(content, layout=False)
        if self.is_attached:
            draw_growth(self)


class ListBlock(MarkdownList):
    """A list with bullets or numbers. One widget draws it if its items contain only text and lists. If they contain
    code or quotes, each part is a widget.
    """

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
    """Return the items of a list that contains only text and such lists. None if it contains other blocks."""
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
    """Return the items with their bullets. Numbers start at that of the first item and are right-aligned."""
    items = [item for item in block._blocks if isinstance(item, MarkdownListItem)]
    if not items or not isinstance(items[0], MarkdownOrderedListItem):
        return [(item.bullet, item) for item in items]
    numbers = [f"{number}. " for number, _ in enumerate(items, int(items[0].bullet))]
    return [(number.rjust(max(map(len, numbers)) + 1), item) for number, item in zip(numbers, items, strict=True)]


class Table(MarkdownTable):
    """A table that one widget draws. While it grows, its last line may turn out to be another block."""

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
    """Return the alignment of each column, from the header's cells."""
    if isinstance(block, MarkdownTH):
        return [_SIDES.get(str(block._token.attrs.get("style")), "left")]
    return [side for inner in block._blocks for side in _sides(inner)]


class Fence(MarkdownFence):
    """A code block that may grow. Subclasses show `code` in the colors of `lexer`."""

    def show_code(self, content: Content) -> None:
        """Show the code. Called when the code or its colors have changed. `content`: the whole highlighted code."""
        raise NotImplementedError

    def show_language(self) -> None:
        """Show the language. Called when `lexer` has changed."""
        raise NotImplementedError

    def set_content(self, content: Content) -> None:
        self._content = content
        self.show_code(content)

    def _copy_context(self, block: MarkdownBlock) -> None:
        before = self.lexer
        super()._copy_context(block)
        if self.lexer != before:
            self.show_language()
