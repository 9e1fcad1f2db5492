"""What of a screen is drawn anew. Textual's own compositor has each widget in the smallest rectangle around all changes
draw the whole of what it shows, also what others cover; this one asks a widget for the lines in which it is seen, and
in which that has changed. A layout that is unsettled, since what is seen is still to be put back into its place, is not
drawn at all: it would be a flash.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import cast

from rich.console import RenderableType
from textual._compositor import ChopsUpdate, Compositor
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip


class RowCompositor(Compositor):
    """Knows chops: the parts that a line of the screen has, named for where they begin. Each shows one widget."""

    def __init__(self, is_unsettled: Callable[[], bool]) -> None:
        super().__init__()
        self._is_unsettled = is_unsettled
        self._changed: list[Region] | None = None  # all of the screen

    def render_update(
        self, full: bool = False, screen_stack: list[Screen[object]] | None = None, simplify: bool = False
    ) -> RenderableType | None:
        if self._is_unsettled():
            return None
        return super().render_update(full, screen_stack, simplify)

    def render_partial_update(self) -> ChopsUpdate | None:
        self._changed = list(self._dirty_regions)
        try:
            return super().render_partial_update()
        finally:
            self._changed = None

    def _render_chops(
        self, crop: Region, is_rendered_line: Callable[[int], bool]
    ) -> Sequence[Mapping[int, Strip]]:  # and None for what has not changed, whatever the base class says
        """What the chops of each line show. Widgets come from front to back: the first to have one is seen there."""
        lines: list[dict[int, Strip | None]] = [dict.fromkeys(cuts[:-1]) for cuts in self.cuts]
        wanted = self._wanted()
        for widget, (region, clip) in self.visible_widgets.items():
            seen = region.intersection(clip)
            left, right = seen.column_span
            rows = [y for y in seen.line_range if any(left <= cut < right for cut in wanted.get(y, ()))]
            if not rows:
                continue
            drawn = Region(left, rows[0], seen.width, rows[-1] + 1 - rows[0])
            strips = widget.render_lines(drawn.translate(-region.offset))
            # A widget that is resized just now may draw less than it is asked for.
            for y, strip in zip(drawn.line_range, strips, strict=False):
                still = wanted.get(y, set())
                shown = {cut: chop for cut, chop in self._chops(y, left, right, strip) if cut in still}
                lines[y].update(shown)
                still.difference_update(shown)
        return cast("Sequence[Mapping[int, Strip]]", lines)

    def _wanted(self) -> dict[int, set[int]]:
        """The chops that overlap a change, by line."""
        if self._changed is None:
            return {y: set(cuts[:-1]) for y, cuts in enumerate(self.cuts)}
        wanted: dict[int, set[int]] = {}
        for y, left, right in self._regions_to_spans(self._changed):
            chops = pairwise(self.cuts[y])
            wanted.setdefault(y, set()).update(cut for cut, end in chops if cut < right and left < end)
        return wanted

    def _chops(self, y: int, left: int, right: int, strip: Strip) -> Iterable[tuple[int, Strip]]:
        """Those of a line that the strip lies in, from column to column."""
        ends = [cut for cut in self.cuts[y] if left < cut <= right]
        return zip([left, *ends[:-1]], strip.divide([end - left for end in ends]), strict=False)
