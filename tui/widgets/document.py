"""One piece of a reply's Markdown, with special widgets for code, lists, and tables.

Its last block may grow. A piece is independent of its neighbors, except that it draws no empty line below itself if the
next piece adjoins.
"""

from textual.events import Mount
from textual.geometry import Region, Size
from textual.layout import DockArrangeResult
from textual.strip import Strip
from textual.widgets import Markdown

from tui.markdown import parser
from tui.widgets.code_block import CodeBlock
from tui.widgets.growing import release_reserve, render_uniform, reserve_lines, size_by_layout
from tui.widgets.markdown_internals import ListBlock, Paragraph, Table


class Document(Markdown):
    """One piece of a reply."""

    COMPONENT_CLASSES = {"em", "strong", "s", "code_inline"}  # noqa: RUF012 - looked up here by the blocks that draw themselves
    DEFAULT_CSS = """
    Document {
        &:dark > .code_inline { background: $warning 10%; color: $text-warning 95%; }
        &:light > .code_inline { background: $error 5%; color: $text-error 95%; }
        &:ansi > .code_inline { background: ansi_default !important; }
        & > .em { text-style: italic; }
        & > .strong { text-style: bold; }
        & > .s { text-style: strike; }
    }
    """

    BLOCKS = {  # noqa: RUF012 - as the base class has it
        **Markdown.BLOCKS,
        "paragraph_open": Paragraph,
        "fence": CodeBlock,
        "code_block": CodeBlock,
        "table_open": Table,
        "bullet_list_open": ListBlock,
        "ordered_list_open": ListBlock,
    }

    virtual_size = size_by_layout()

    def __init__(self, text: str = "", *, adjoined: bool = False, grows: bool = False) -> None:
        """Create the widget for `text`.

        `adjoined`: whether the next piece follows without an empty line. `grows`: whether to reserve lines for more
        text.
        """
        super().__init__(parser_factory=parser, open_links=False)
        self._first = text
        self._grows = grows
        self.adjoined = adjoined

    async def on_mount(self, event: Mount) -> None:
        """Append the first text like any later text, because Textual would not parse text of the base class again when
        it grows.
        """
        event.prevent_default()
        await self.append(self._first)
        for block in self.children[-1:] if self._grows else ():
            reserve_lines(block)
        if self.adjoined:
            self.close(adjoined=True)

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        return super().arrange(size.with_height(0), optimal)

    def render_lines(self, crop: Region) -> list[Strip]:
        return render_uniform(super().render_lines, crop)

    def close(self, *, adjoined: bool) -> None:
        """Mark the document as complete. If the next piece adjoins, remove the empty line below."""
        self.adjoined = adjoined
        release_reserve(self)
        for block in self.children[-1:] if adjoined else ():
            block.styles.margin = block.styles.margin._replace(bottom=0)

    async def grow(self, text: str) -> None:
        """Append text, which continues the last block or starts new blocks."""
        last = self.children[-1] if self.children else None
        await self.append(text)
        for block in self.children[-1:]:  # there are no children if the program is exiting
            if last is not block:
                if last is not None:
                    release_reserve(last)
                reserve_lines(block)
