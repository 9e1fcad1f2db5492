"""A Markdown block that one widget draws as lines, so that its cost depends only on the length of its text."""

from abc import abstractmethod

from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget
from textual.widgets import Markdown

from tui.widgets.growing import draw_growth, size_by_layout


class DrawnBlock(Widget):
    """Base class. Subclasses implement `lines` and call `changed` when their content changes."""

    DEFAULT_CSS = "DrawnBlock { height: auto; text-wrap: nowrap; }"

    virtual_size = size_by_layout()

    def __init__(self) -> None:
        super().__init__()
        self._drawn: dict[int, list[Content]] = {}  # drawn lines by width in cells

    @abstractmethod
    def lines(self, width: int) -> list[Content]:
        """Return the lines of the block, at most `width` cells wide."""
        ...

    def changed(self) -> None:
        self._drawn.clear()
        draw_growth(self)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._lines(width))

    def render(self) -> Content:
        return Content("\n").join(self._lines(self.content_size.width))

    def action_link(self, href: str) -> None:
        """Post a message for a click on a link, as Textual's own blocks do."""
        self.post_message(Markdown.LinkClicked(self.query_ancestor(Markdown), href))

    def _lines(self, width: int) -> list[Content]:
        if width not in self._drawn:
            self._drawn = {width: self.lines(width)}
        return self._drawn[width]
