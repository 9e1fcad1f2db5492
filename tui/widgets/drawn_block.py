"""A block of Markdown that one widget draws as lines, whatever is in it: to be shown costs no more than its text."""

from abc import abstractmethod

from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget
from textual.widgets import Markdown

from tui.widgets.growing import draw_growth, size_by_layout


class DrawnBlock(Widget):
    """Subclasses say what the lines are in a width, and call `changed` when that has become other ones."""

    DEFAULT_CSS = "DrawnBlock { height: auto; text-wrap: nowrap; }"

    virtual_size = size_by_layout()

    def __init__(self) -> None:
        super().__init__()
        self._drawn: dict[int, list[Content]] = {}  # by width

    @abstractmethod
    def lines(self, width: int) -> list[Content]:
        """In so many cells."""
        ...

    def changed(self) -> None:
        self._drawn.clear()
        draw_growth(self)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._lines(width))

    def render(self) -> Content:
        return Content("\n").join(self._lines(self.content_size.width))

    def action_link(self, href: str) -> None:
        """As Textual's own blocks do."""
        self.post_message(Markdown.LinkClicked(self.query_ancestor(Markdown), href))

    def _lines(self, width: int) -> list[Content]:
        if width not in self._drawn:
            self._drawn = {width: self.lines(width)}
        return self._drawn[width]
