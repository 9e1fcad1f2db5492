"""A column of widgets, each as high as it must be."""

from textual.containers import Vertical
from textual.geometry import Size
from textual.layout import DockArrangeResult


class Column(Vertical):
    """Its height follows from what is in it, which is never told how high it is itself: while it grows, the layout of
    all that stays as it is need not be made again. Nothing in it may be as high as a share of it."""

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        return super().arrange(size.with_height(0), optimal)
