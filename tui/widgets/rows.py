"""A list of rows, of which the user chooses one, and the columns of suggestions in such a list."""

from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual.content import Content
from textual.strip import Strip
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from tui.completion import Suggestion

_MOST_LABEL = 40  # maximum width of the first column in cells


class Rows(OptionList):
    """A list that draws its highlighted row in one color while it has the focus.

    The colors of a row's parts, and dim text, would be hard to read on the background of the highlight.
    """

    def __init__(self, *rows: Option) -> None:
        super().__init__(*rows, markup=False)

    def render_line(self, y: int) -> Strip:
        strip = super().render_line(y)
        if not self.has_focus or self.highlighted is None:
            return strip
        style = self.get_visual_style("option-list--option", "option-list--option-highlighted").rich_style
        plain = Style(color=style.color, dim=False)
        return Strip(
            [
                Segment(text, own + plain if own and own.meta.get("option") == self.highlighted else own, control)
                for text, own, control in strip
            ],
            strip.cell_length,
        )


def lines_of(suggestions: Sequence[Suggestion]) -> list[Content]:
    """Return a line for each suggestion, with its label, its help, and its keys in columns."""
    width = min(_MOST_LABEL, max((len(one.label) for one in suggestions), default=0)) + 2
    return [_line(one, width) for one in suggestions]


def _line(one: Suggestion, width: int) -> Content:
    if not one.help and not one.keys:
        return Content(one.label)
    return Content.assemble((one.label.ljust(width), "bold"), f"{one.help}  ", (one.keys, "$text-accent"))
