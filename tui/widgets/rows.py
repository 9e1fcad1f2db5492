"""A list of rows, of which the user chooses one."""

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widgets import OptionList
from textual.widgets.option_list import Option


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
