"""One piece of a reply's Markdown: blocks that the base class makes of it, each by the widget that shows it best.

It may grow at its end, and then its last block does. Knows nothing of what stands before or behind it, but for whether
the next one adjoins it.
"""

from textual.events import Mount
from textual.geometry import Region, Size
from textual.layout import DockArrangeResult
from textual.strip import Strip
from textual.widgets import Markdown

from tui.markdown import parser
from tui.widgets.code_block import CodeBlock
from tui.widgets.growing import release_reserve, render_uniform, reserve_lines, size_by_layout
from tui.widgets.textual_internals import ListBlock, Table


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
        "fence": CodeBlock,
        "code_block": CodeBlock,
        "table_open": Table,
        "bullet_list_open": ListBlock,
        "ordered_list_open": ListBlock,
    }

    virtual_size = size_by_layout()

    def __init__(self, text: str = "", *, adjoined: bool = False) -> None:
        """`adjoined`: by the next one, with no line between them."""
        super().__init__(parser_factory=parser, open_links=False)
        self._first = text
        self.adjoined = adjoined

    async def on_mount(self, event: Mount) -> None:
        """Appended, even the first text: what the base class shows at first, it would not read again as it grows."""
        event.prevent_default()
        await self.append(self._first)
        if self.adjoined:
            self.close(adjoined=True)

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        return super().arrange(size.with_height(0), optimal)

    def render_lines(self, crop: Region) -> list[Strip]:
        return render_uniform(super().render_lines, crop)

    def close(self, *, adjoined: bool) -> None:
        """Nothing will be added; and no empty line stands below it where the next one adjoins."""
        self.adjoined = adjoined
        release_reserve(self)
        for block in self.children[-1:] if adjoined else ():
            block.styles.margin = block.styles.margin._replace(bottom=0)

    async def grow(self, text: str) -> None:
        """More of it, in the last block or behind it."""
        last = self.children[-1] if self.children else None
        await self.append(text)
        for block in self.children[-1:]:  # there is none when the program ends meanwhile
            if last is not block:
                if last is not None:
                    release_reserve(last)
                reserve_lines(block)
