"""Text that is folded to one line: a summary, or the reasoning of a reply."""

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message as Posted
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Label

from tui import figures
from tui.plain_text import head
from tui.widgets.text_fields import WordButtons, clickable

_LONGEST = 50_000  # maximum number of characters shown
_LATEST = 4000  # characters at the end of the reasoning that are shown while it grows


class Folded(Vertical):
    """Plain text below a line that folds and unfolds it. It is laid out only while it is unfolded."""

    folded = reactive(True)

    class Opened(Posted):
        """The user has opened this part of a message, and wants to read it from its start."""

        def __init__(self, part: Widget) -> None:
            super().__init__()
            self.part = part

    def __init__(self, line: str, text: str) -> None:
        super().__init__()
        self._line = Content(line)
        self._text = text

    def compose(self) -> ComposeResult:
        yield WordButtons()
        yield Label("", markup=False, classes="folded-text")

    def on_mount(self) -> None:
        self._show()

    def action_fold(self) -> None:
        self.folded = not self.folded
        if not self.folded:
            self.post_message(self.Opened(self))

    def watch_folded(self) -> None:
        self._show()

    def _show(self) -> None:
        if not (self.is_attached and self.children):  # the message may be removed before it is composed
            return
        line = Content.assemble("▸ " if self.folded else "▾ ", self._line)
        self.query_one(WordButtons).update(clickable(line, "fold"))
        body = self.query_one(".folded-text", Label)
        body.display = not self.folded
        if not self.folded:
            body.update(Content(self._shown_text()))

    def _shown_text(self) -> str:
        return head(self._text.strip(), _LONGEST)


class Reasoning(Folded):
    """The reasoning of one reply, with its duration. May grow."""

    def __init__(self, text: str, seconds: float, *, finished: bool) -> None:
        super().__init__("", text)
        self._tell(seconds, finished=finished)

    def add(self, text: str, seconds: float) -> None:
        """Append text. `seconds`: duration of the reasoning so far."""
        self._text += text
        self._tell(seconds, finished=self._finished)
        self._show()

    def finish(self, seconds: float) -> None:
        """Mark the reasoning as complete, and show its final duration."""
        self._tell(seconds, finished=True)
        self._show()

    def end(self) -> None:
        """Mark the reasoning as complete. Its duration is the one known so far."""
        if not self._finished:
            self.finish(self._seconds)

    def _tell(self, seconds: float, *, finished: bool) -> None:
        self._finished, self._seconds = finished, seconds
        # the duration is unknown for reasoning before a tool call
        how_long = f" for {figures.seconds(seconds)}" if seconds else ""
        self._line = Content(f"Thought{how_long}" if finished else "Thinking")

    def _shown_text(self) -> str:
        return super()._shown_text() if self._finished else _end(self._text.strip(), _LATEST)


def _end(text: str, most: int) -> str:
    return text if len(text) <= most else f"… {text[-most:]}"
