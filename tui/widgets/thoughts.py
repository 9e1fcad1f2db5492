"""What a model thought before it answered: one line with its time, which opens on what was thought."""

from tui import figures
from tui.widgets.folded import Folded

_LATEST = 4000  # characters that are seen while more of them come


class Thoughts(Folded):
    """Of one reply; they may still grow."""

    def __init__(self, text: str, seconds: float, *, finished: bool) -> None:
        super().__init__("", text)
        self._tell(seconds, finished=finished)

    def add(self, text: str, seconds: float) -> None:
        """More thoughts; `seconds` so far."""
        self._text += text
        self._tell(seconds, finished=self._finished)
        self._show()

    def finish(self, seconds: float) -> None:
        """The answer begins, or the reply has ended."""
        self._tell(seconds, finished=True)
        self._show()

    def _tell(self, seconds: float, *, finished: bool) -> None:
        self._finished = finished
        self._line = f"{'thought for' if finished else 'thinking,'} {figures.seconds(seconds)}"

    def _shown_text(self) -> str:
        return super()._shown_text() if self._finished else _end(self._text.strip(), _LATEST)


def _end(text: str, most: int) -> str:
    return text if len(text) <= most else f"… {text[-most:]}"
