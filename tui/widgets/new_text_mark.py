"""The line below the transcript that marks new text under the visible part. A click or its key goes there."""

from textual.content import Content

from tui.footer_keys import key_name
from tui.widgets.reply_status import ReplyStatus
from tui.widgets.text_fields import SplitLine, clickable

END_KEY = "ctrl+end"


class NewTextMark(SplitLine):
    """Hidden until new text arrives. While a reply is running, it shows its progress, whose own line is below."""

    DEFAULT_CSS = "NewTextMark { display: none; padding: 0 1; color: $text-accent; }"

    def __init__(self, status: ReplyStatus) -> None:
        super().__init__(clickable(Content(f"↓ new text below · {key_name(END_KEY)}"), "show_end"))
        self._status = status

    def on_mount(self) -> None:
        self.watch(self._status, "frame", self._show_progress)

    def _show_progress(self) -> None:
        if self.display:
            self.refresh()

    def hide(self) -> None:
        self.display = False

    def render(self) -> Content:
        status = self._status
        parts = [status.words(self.content_size.width), status.keys] if status.display else []
        self._rights = tuple(Content.styled(" · ".join(parts[at:]), "$text-muted") for at in range(len(parts)))
        return super().render()
