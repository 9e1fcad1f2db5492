"""What a model thought before it answered: one line with its time, which opens on what was thought."""

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Label

from tui import figures
from tui.plain_text import beginning
from tui.widgets.word_buttons import WordButtons, word

_LATEST = 4000  # characters that are seen while more of them come
_LONGEST = 50_000  # characters


class Thoughts(Vertical):
    """Folded until somebody wants to see it; the text is plain, and laid out only while it is seen."""

    folded = reactive(True)

    def __init__(self, text: str, seconds: float, *, finished: bool) -> None:
        super().__init__()
        self._text = text
        self._seconds = seconds
        self._finished = finished

    def compose(self) -> ComposeResult:
        yield WordButtons()
        yield Label("", markup=False, classes="thoughts-text")

    def on_mount(self) -> None:
        self._show()

    def add(self, text: str, seconds: float) -> None:
        """More thoughts; `seconds` so far."""
        self._text += text
        self._seconds = seconds
        self._show()

    def finish(self, seconds: float) -> None:
        """The answer begins, or the reply has ended."""
        self._seconds, self._finished = seconds, True
        self._show()

    def action_fold(self) -> None:
        self.folded = not self.folded

    def watch_folded(self) -> None:
        self._show()

    def _show(self) -> None:
        if not (self.is_attached and self.children):  # its message may be left before it is composed
            return
        verb = "thought for" if self._finished else "thinking,"
        sign = "▸" if self.folded else "▾"
        line = f"{sign} {verb} {figures.seconds(self._seconds)}"
        self.query_one(WordButtons).update(word(line, "fold"))
        body = self.query_one(".thoughts-text", Label)
        body.display = not self.folded
        if not self.folded:
            text = self._text.strip()
            body.update(Content(beginning(text, _LONGEST) if self._finished else _end(text, _LATEST)))


def _end(text: str, most: int) -> str:
    return text if len(text) <= most else f"… {text[-most:]}"
