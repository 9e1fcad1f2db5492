"""The top bar: the title of the chat, and the activity of its reply."""

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from tui.plain_text import single_line


class TopBar(Widget):
    """The top bar in one line. If it is too long, the title is shortened."""

    chat_title: reactive[str] = reactive("New chat")
    activity: reactive[str] = reactive("")  # activity of the open chat's reply
    is_saved: reactive[bool] = reactive(True)
    has_notifications: reactive[bool] = reactive(False)  # whether notifications may cover the right half

    def render(self) -> Content:
        title = single_line(self.chat_title) if self.is_saved else f"Not saved: {single_line(self.chat_title)}"
        right = self.activity
        space = self.size.width - 2 - len(right)
        free = min(space, self.size.width // 2 - 1) if self.has_notifications else space
        left = title if len(title) < free else title[: max(0, free - 2)] + "…"
        return Content.assemble(" ", (left.ljust(space), "bold"), (right, "$text-accent"), " ")
