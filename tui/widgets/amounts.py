"""Bars of amounts, one below the other: how much of each memory is used."""

from collections.abc import Sequence

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from tui import figures
from tui.engine_nouns import Amount
from tui.plain_text import single_line

_WORDS = 20  # cells: " 600 MB of 1.0 GB" and longer


class Amounts(Widget):
    """A title, and a line for each amount."""

    amounts: reactive[Sequence[Amount]] = reactive((), layout=True)

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def render(self) -> Content:
        lines = [Content.styled(self._title, "bold"), *(self._line(amount) for amount in self.amounts)]
        return Content("\n").join(lines)

    def _line(self, amount: Amount) -> Content:
        name = single_line(amount.name)[:10].ljust(11)
        words = figures.size(amount.used)
        if amount.total:
            words += f" of {figures.size(amount.total)}"
        width = max(0, self.size.width - len(name) - _WORDS) if amount.total else 0
        filled = round(width * min(1, amount.used / amount.total)) if amount.total else 0
        return Content.assemble(
            name, ("█" * filled, "$primary"), ("░" * (width - filled), "$text-disabled"), f" {words}"
        )
