"""A column of widgets, each as high as it must be; and what is cheap about any container of text that grows."""

from collections.abc import Callable

from textual.containers import Vertical, VerticalScroll
from textual.geometry import Region, Size
from textual.layout import DockArrangeResult
from textual.reactive import Reactive
from textual.strip import Strip


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
        return alike(super().render_lines, crop)


def stay(scroll: VerticalScroll, lines: int) -> None:
    """Scroll by as many lines as what is seen was moved in the last layout. An anchor that holds has done so itself."""
    if lines and not (scroll.is_anchored and scroll.scroll_y >= scroll.max_scroll_y):
        scroll.scroll_to(y=scroll.scroll_y + lines, animate=False, force=True, immediate=True)


def alike(render: Callable[[Region], list[Strip]], crop: Region) -> list[Strip]:
    """The lines of a widget that are all as empty as the first one: only that is drawn."""
    return render(Region(crop.x, crop.y, crop.width, min(1, crop.height))) * crop.height
