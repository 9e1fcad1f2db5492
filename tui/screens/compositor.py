"""What of a screen is drawn anew. Textual's own compositor has each widget of the screen draw all of its lines, however
little has changed; this one asks for the lines that overlap what has changed, of the widgets that do.
"""

from collections.abc import Iterable

from textual._compositor import Compositor
from textual.geometry import Region
from textual.strip import Strip


class RowCompositor(Compositor):
    """Knows rows: of those in which something has changed, a widget is drawn in its full width."""

    def _get_renders(self, crop: Region | None = None) -> Iterable[tuple[Region, Region, list[Strip]]]:
        """Of each widget: its region, what is seen of that, and the strips of this. `crop`: what has changed; None:
        everything."""
        changed = self.size.region if crop is None else crop
        rows = Region(0, changed.y, self.size.width, changed.height)
        for widget, (region, clip) in self.visible_widgets.items():
            seen = region.intersection(clip).intersection(rows)
            if seen and changed.overlaps(seen):
                yield region, seen, widget.render_lines(seen.translate(-region.offset))
