"""Text that grows without a layout for each change: headroom below it, columns, and empty space for unmounted pieces.

A layout costs as much as drawing all visible text, and a fast reply would need several per second.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from textual.containers import Vertical, VerticalScroll
from textual.geometry import Region, Size
from textual.layout import DockArrangeResult
from textual.reactive import Reactive
from textual.strip import Strip
from textual.widget import Widget

RESERVED_LINES = 5


def draw_growth(widget: Widget) -> None:
    """It shows more than before: draw that where it fits, and lay it out with headroom where it does not."""
    widget.clear_cached_dimensions()
    size, screen = widget.content_size, widget.app.size
    needed = widget.get_content_height(screen, screen, size.width)
    wide = widget.get_content_width(screen, screen) if widget.styles.is_auto_width else 0
    if not size or wide > size.width:
        widget.refresh(layout=True)
    elif needed > size.height:
        widget.styles.min_height = needed + widget.gutter.height + RESERVED_LINES
    widget.refresh()


def reserve_lines(block: Widget) -> None:
    """A new block will grow: lay out what draws its end with headroom at once."""
    for shown in list(block.query("DrawnBlock, .code-part"))[-1:]:
        shown.styles.min_height = shown.gutter.height + RESERVED_LINES


def release_reserve(widget: Widget) -> None:
    """It, and what is in it, grows no more."""
    for one in (widget, *widget.query()):
        if one.styles.inline.min_height is not None:
            one.clear_cached_dimensions()
            one.styles.min_height = None


def size_by_layout() -> Reactive[Size]:
    """A `virtual_size` that follows from a layout, and calls for none, nor for another drawing."""
    return Reactive(Size(0, 0), layout=False, repaint=False)


class Column(Vertical):
    """Its height follows from what is in it, which is never told how high it is itself: while it grows, the layout of
    all that stays as it is need not be made again. Nothing in it may be as high as a share of it, and borders are at
    its sides alone."""

    virtual_size = size_by_layout()

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        return super().arrange(size.with_height(0), optimal)

    def render_lines(self, crop: Region) -> list[Strip]:
        return render_uniform(super().render_lines, crop)


def keep_position(scroll: VerticalScroll, lines: int) -> None:
    """Scroll by as many lines as what is seen was moved in the last layout. An anchor that holds has done so itself."""
    if lines and not (scroll.is_anchored and scroll.scroll_y >= scroll.max_scroll_y):
        scroll.scroll_to(y=scroll.scroll_y + lines, animate=False, force=True, immediate=True)


def render_uniform(render: Callable[[Region], list[Strip]], crop: Region) -> list[Strip]:
    """The lines of a widget that are all as empty as the first one: only that is drawn."""
    return render(Region(crop.x, crop.y, crop.width, min(1, crop.height))) * crop.height


_UNKNOWN = Size(0, 0)


@dataclass(slots=True, eq=False)
class DocumentText:
    """What one document shows, or would."""

    text: str
    adjoined: bool = False  # by the next one, with no line between them
    last_size: Size = _UNKNOWN  # by that document, when it was laid out

    def height(self, width: int) -> int:
        """In another width, and of what was not laid out yet, that is an estimate."""
        if width != self.last_size.width:
            self.last_size = Size(width, sum(1 + len(line) // max(1, width) for line in self.text.splitlines()))
        return self.last_size.height


class Placeholder(Widget):
    """Empty space as high as some unmounted documents. Its layout costs the same for any number of them."""

    DEFAULT_CSS = "Placeholder { height: auto; }"

    def __init__(self, pieces: list[DocumentText]) -> None:
        super().__init__()
        self._pieces = pieces

    @property
    def pieces(self) -> list[DocumentText]:
        return self._pieces

    def set_pieces(self, pieces: list[DocumentText]) -> None:
        """Be the room of these."""
        self._pieces = pieces
        self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return sum(piece.height(width) for piece in self._pieces)

    def pieces_within(self, first: int, end: int) -> Iterator[tuple[int, DocumentText]]:
        """The pieces that lie in these of its lines, wholly or in part, and where they begin."""
        top, laid_out = 0, self._pieces if self.size.width else []
        for piece in laid_out:
            bottom = top + piece.height(self.size.width)
            if bottom > first and top < end:
                yield top, piece
            top = bottom
