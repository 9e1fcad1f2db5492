"""A dialog in which the user filters a list and chooses one of its rows, such as a command or a theme."""

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Input, Label, OptionList
from textual.widgets.option_list import Option

from tui.completion import Suggestion, match
from tui.screens.dialog import Dialog
from tui.widgets.rows import Rows, lines_of
from tui.widgets.text_fields import LineField


class ChoiceScreen(Dialog[str]):
    """Returns the name of the chosen row. The filter keeps the focus."""

    CSS_PATH = "choice.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move('cursor_up')", show=False),
        Binding("down", "move('cursor_down')", show=False),
        Binding("pageup", "move('page_up')", show=False),
        Binding("pagedown", "move('page_down')", show=False),
    ]

    def __init__(self, question: str, rows: Sequence[Suggestion], current: str = "") -> None:
        """Create the dialog. `current`: the name of the row to highlight first; "": the first row."""
        super().__init__()
        self._question = question
        self._rows = self._shown = rows
        self._current = current

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_subtitle = "↑↓ choose · ⏎ accept · esc close"
            yield Label(self._question, classes="question")
            yield LineField(placeholder="Type to filter")
            yield Rows()

    def on_mount(self) -> None:
        self._show(self._rows)

    @on(Input.Changed)
    def filter(self, event: Input.Changed) -> None:
        self._show(match(event.value.strip(), self._rows))

    def _show(self, shown: Sequence[Suggestion]) -> None:
        self._shown = shown
        rows = self.query_one(Rows)
        rows.set_options(Option(line) for line in lines_of(shown))
        names = [one.name for one in shown]
        if shown:
            rows.highlighted = names.index(self._current) if self._current in names else 0

    async def action_move(self, action: str) -> None:
        """Move the list's cursor while the filter keeps the focus."""
        rows = self.query_one(Rows)
        if rows.scrollable_content_region:  # Textual's page keys raise in a list that is 0 lines high
            await self.app.run_action(action, rows)

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def choose(self) -> None:
        highlighted = self.query_one(Rows).highlighted
        if highlighted is not None and self._shown:
            self.dismiss(self._shown[highlighted].name)
