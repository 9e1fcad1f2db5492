"""A line that opens on a longer text."""

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Label

from tui.plain_text import beginning
from tui.widgets.text_fields import WordButtons, word

_LONGEST = 50_000  # characters


class Folded(Vertical):
    """Folded until somebody wants to see it; the text is plain, and laid out only while it is seen."""

    folded = reactive(True)

    def __init__(self, line: str, text: str) -> None:
        super().__init__()
        self._line = line
        self._text = text

    def compose(self) -> ComposeResult:
        yield WordButtons()
        yield Label("", markup=False, classes="folded-text")

    def on_mount(self) -> None:
        self._show()

    def action_fold(self) -> None:
        self.folded = not self.folded

    def watch_folded(self) -> None:
        self._show()

    def _show(self) -> None:
        if not (self.is_attached and self.children):  # its message may be left before it is composed
            return
        self.query_one(WordButtons).update(word(f"{'▸' if self.folded else '▾'} {self._line}", "fold"))
        body = self.query_one(".folded-text", Label)
        body.display = not self.folded
        if not self.folded:
            body.update(Content(self._shown_text()))

    def _shown_text(self) -> str:
        return beginning(self._text.strip(), _LONGEST)
