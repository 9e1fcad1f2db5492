"""Selection and focus without colors (NO_COLOR): a background becomes reverse video."""

from functools import lru_cache

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

_REVERSE = Style(reverse=True)


class ReverseBackgrounds(LineFilter):
    """Draws cells that have a background in reverse video. The terminal's default background stays."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(text, style and _reversed(style), control) for text, style, control in segments]


@lru_cache(maxsize=1024)
def _reversed(style: Style) -> Style:
    has_background = style.bgcolor is not None and not style.bgcolor.is_default
    return style + _REVERSE if has_background else style
