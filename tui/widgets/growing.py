"""Text that grows without a layout for each change: reserved lines below the text, columns, and placeholders.

The cost of a layout is that of drawing all visible text, and a fast reply would need several layouts per second.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from textual.containers import Vertical, VerticalScroll
from textual.geometry import Region, Size
from textual.layout import DockArrangeResult
from textual.reactive import Reactive
from textual.strip import Strip
from textual.widget import Widget

_RESERVE = 6  # the reserved lines are the screen's height divided by this


def reserved_lines(widget: Widget) -> int:
    """Return the number of lines to reserve below a widget that grows."""
    return max(2, widget.app.size.height // _RESERVE)


def draw_growth(widget: Widget) -> None:
    """Draw a widget whose content has grown.

    If the content no longer fits, lay the widget out again with reserved lines below the content.
    """
    widget.clear_cached_dimensions()
    size, screen = widget.content_size, widget.app.size
    needed = widget.get_content_height(screen, screen, size.width)
    wide = widget.get_content_width(screen, screen) if widget.styles.is_auto_width else 0
    if not size or wide > size.width:
        widget.refresh(layout=True)
    elif needed > size.height:
        widget.styles.min_height = needed + widget.gutter.height + reserved_lines(widget)
    widget.refresh()


def reserve_lines(block: Widget) -> None:
    """Reserve lines below the last part of a new block, because that part will grow."""
    for shown in list(block.query("DrawnBlock, .code-part"))[-1:] or [block]:
        shown.styles.min_height = shown.gutter.height + reserved_lines(shown)


def release_reserve(widget: Widget) -> None:
    """Remove the reserved lines of a widget and its children, which no longer grow."""
    for one in (widget, *widget.query()):
        if one.styles.inline.min_height is not None:
            one.clear_cached_dimensions()
            one.styles.min_height = None


def size_by_layout() -> Reactive[Size]:
    """Return a `virtual_size` property that triggers neither a layout nor a repaint when it changes."""
    return Reactive(Size(0, 0), layout=False, repaint=False)


class Column(Vertical):
    """A column that is as high as its contents.

    The contents are laid out with height 0. While the column grows, the layout of unchanged children stays valid.
    Children must not use a fraction of the column's height, and only side borders are allowed.
    """

    virtual_size = size_by_layout()

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        return super().arrange(size.with_height(0), optimal)

    def render_lines(self, crop: Region) -> list[Strip]:
        return render_uniform(super().render_lines, crop)


def keep_position(scroll: VerticalScroll, lines: int) -> None:
    """Scroll by the lines that the last layout moved the visible text, unless an active anchor already did."""
    if lines and not (scroll.is_anchored and scroll.scroll_y >= scroll.max_scroll_y):
        scroll.scroll_to(y=scroll.scroll_y + lines, animate=False, force=True, immediate=True)


def render_uniform(render: Callable[[Region], list[Strip]], crop: Region) -> list[Strip]:
    """Return the lines of a widget with only empty lines. Draws the first line and repeats it."""
    return render(Region(crop.x, crop.y, crop.width, min(1, crop.height))) * crop.height


_UNKNOWN = Size(0, 0)


@dataclass(slots=True, eq=False)
class DocumentText:
    """The text of one document, which may be mounted or not."""

    text: str
    adjoined: bool = False  # whether the next document follows without an empty line
    last_size: Size = _UNKNOWN  # size of the document when it was last laid out

    def height(self, width: int) -> int:
        """Return the height in lines. For a new width, or before the first layout, the height is an estimate."""
        if width != self.last_size.width:
            self.last_size = Size(width, sum(1 + len(line) // max(1, width) for line in self.text.splitlines()))
        return self.last_size.height


class Placeholder(Widget):
    """Empty space as high as the unmounted documents that it replaces. The cost of its layout is independent of their
    number.
    """

    DEFAULT_CSS = "Placeholder { height: auto; }"

    virtual_size = size_by_layout()

    def __init__(self, pieces: list[DocumentText]) -> None:
        super().__init__()
        self._pieces = pieces

    @property
    def pieces(self) -> list[DocumentText]:
        return self._pieces

    def set_pieces(self, pieces: list[DocumentText]) -> None:
        """Set the documents that this widget replaces. It is as high as all of them together."""
        self._pieces = pieces
        self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return sum(piece.height(width) for piece in self._pieces)

    def pieces_within(self, first: int, end: int) -> Iterator[tuple[int, DocumentText]]:
        """Yield the documents that overlap the lines from `first` to `end` (exclusive), each with its first line."""
        top, laid_out = 0, self._pieces if self.size.width else []
        for piece in laid_out:
            bottom = top + piece.height(self.size.width)
            if bottom > first and top < end:
                yield top, piece
            top = bottom
