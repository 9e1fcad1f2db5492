"""The Markdown of a reply, shown while it comes and afterwards.

A long text is shown as several documents, so that what is added costs as much as its last piece, not as all of it.
Every address is shown; a click on one is told as Textual's own `Markdown.LinkClicked`, and opens nothing.
"""

from time import process_time

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Markdown
from textual.widgets._markdown import MarkdownTable, MarkdownTableContent
from textual.widgets.markdown import MarkdownBlock

from tui.markdown import Pieces, parser
from tui.widgets.code_block import CodeBlock

_REST = 3  # times the CPU time of a frame: about a third of a core is used, however long the reply


class Cells(MarkdownTableContent):
    """The cells of a table, without the tooltips that would read their text as markup."""

    def compose(self) -> ComposeResult:
        for cell in super().compose():
            cell.tooltip = None
            yield cell

    async def _update_rows(self, updated_rows: list[list[Content]]) -> None:
        await super()._update_rows(updated_rows)
        for cell in self.query_children(".cell"):
            cell.tooltip = None


class Table(MarkdownTable):
    """A table whose last line may turn out to be something else."""

    def compose(self) -> ComposeResult:
        self._headers, self._rows = self._get_headers_and_rows()
        yield Cells(self._headers, self._rows)

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if isinstance(block, MarkdownTable):
            headers, rows = block._get_headers_and_rows()
            if len(rows) < len(self._rows) or len(headers) != len(self._headers):
                await MarkdownBlock._update_from_block(self, block)
                return
        await super()._update_from_block(block)


class Document(Markdown):
    """One piece of a reply."""

    BLOCKS = {  # noqa: RUF012 - as the base class has it
        **Markdown.BLOCKS,
        "fence": CodeBlock,
        "code_block": CodeBlock,
        "table_open": Table,
    }

    def __init__(self, text: str = "") -> None:
        super().__init__(text, parser_factory=parser, open_links=False)


class ReplyText(Vertical):
    """All of it."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._pieces = Pieces()
        self._first = text
        self._waiting: list[str] = []  # what is to be added; joined, where it comes faster than it can be shown
        self._showing = False

    def compose(self) -> ComposeResult:
        documents: list[str] = []
        for begins, part in self._pieces.feed(self._first):
            if begins or not documents:
                documents.append("")
            documents[-1] += part
        self._first = ""
        yield from (Document(text) for text in documents)

    def add(self, text: str) -> None:
        """Show more text behind what there is, soon."""
        self._waiting.append(text)
        if not self._showing:
            self._showing = True
            self.call_next(self._show_waiting)

    async def _show_waiting(self) -> None:
        began = process_time()
        text = "".join(self._waiting)
        self._waiting.clear()
        for begins, part in self._pieces.feed(text):
            last = None if begins or not self.children else self.children[-1]
            if isinstance(last, Document):
                await last.append(part)
            else:
                await self.mount(Document(part))
        self.call_after_refresh(self._rest, began)

    def _rest(self, began: float) -> None:
        """The frame is drawn. The next one comes once the program has idled for longer than this one took."""
        self.set_timer(_REST * (process_time() - began), self._go_on)

    def _go_on(self) -> None:
        self._showing = bool(self._waiting)
        if self._showing:
            self.call_next(self._show_waiting)
