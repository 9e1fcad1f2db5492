"""The top bar: chat title, activity, model or loading progress, and the engine's address."""

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from tui import figures
from tui.engine_types import Loading
from tui.plain_text import model_name, single_line


class TopBar(Widget):
    """One line. If space is short, the address is left out and the title is cut."""

    chat_title: reactive[str] = reactive("New chat")
    model: reactive[str] = reactive("")
    loading_model: reactive[Loading | None] = reactive(None)
    activity: reactive[str] = reactive("")  # of the current reply
    address: reactive[str] = reactive("")
    is_saved: reactive[bool] = reactive(True)

    def render(self) -> Content:
        right = "  ".join(part for part in (self._model(), self.address) if part)
        left = single_line(self.chat_title) if self.is_saved else f"Not saved: {single_line(self.chat_title)}"
        if self.activity:
            left = f"{left}  {self.activity}"
        width = self.size.width - 2
        if len(left) + len(right) + 2 > width and self.address:
            right = self._model()
        space = width - len(right)
        left = left if len(left) < space else left[: max(0, space - 2)] + "…"
        return Content.assemble(" ", (left.ljust(space), "bold"), (right, "$text-muted"), " ")

    def _model(self) -> str:
        loading = self.loading_model
        return single_line(model_name(self.model)) if loading is None else figures.loading(loading)
