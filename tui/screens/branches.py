"""The screen that shows the branches of a chat as a tree. Returns the message that the user chose."""

from collections.abc import Iterator

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Label, OptionList
from textual.widgets.option_list import Option

from tui import figures
from tui.branches import Branches
from tui.screens.dialog import Dialog
from tui.types import MessageId
from tui.widgets.rows import Rows

_LONGEST_LINE = 100  # maximum number of characters of a message in a row, which ends with "…" at the edge
_INDENT = "  "


class BranchesScreen(Dialog[MessageId]):
    """Shows the tree of messages. Only branches are indented; consecutive messages are at the same level."""

    CSS_PATH = "branches.tcss"
    AUTO_FOCUS = "Rows"

    def __init__(self, branches: Branches, leaf: MessageId | None) -> None:
        super().__init__()
        self._branches = branches
        self._shown = {message.id for message in branches.path(leaf)}
        self._rows = list(self._walk())

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_subtitle = "↑↓ choose · ⏎ show · esc close"
            yield Label("Branches of this chat", classes="question")
            yield Rows(*(Option(self._line(message, depth)) for message, depth in self._rows))

    def on_mount(self) -> None:
        shown = [row for row, (message, _) in enumerate(self._rows) if message in self._shown]
        self.query_one(Rows).highlighted = shown[-1] if shown else 0

    def _walk(self) -> Iterator[tuple[MessageId, int]]:
        """Yield the messages from the top of the tree to its bottom, with their depths."""
        waiting = [(child, 0) for child in reversed(self._branches.children(None))]
        while waiting:
            message, depth = waiting.pop()
            yield message, depth
            below = depth + (len(self._branches.siblings(message)) > 1)
            waiting.extend((child, below) for child in reversed(self._branches.children(message)))

    def _line(self, message: MessageId, depth: int) -> Content:
        one = self._branches[message]
        line = figures.message_line(one, _LONGEST_LINE)
        return Content.assemble(_INDENT * depth, (line, "bold" if message in self._shown else "dim"))

    @on(OptionList.OptionSelected)
    def choose(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._rows[event.option_index][0])
