"""The status line below the prompt: model, context, settings of the chat, and whether the chat is private."""

from collections.abc import Sequence

from textual.content import Content
from textual.events import Click
from textual.message import Message
from textual.reactive import reactive
from textual.style import Style
from textual.widget import Widget

from tui import figures
from tui.engine_types import Loading
from tui.plain_text import model_name, single_line
from tui.types import ChatSettings, ContextBudget

_CELLS = 10  # width of the context bar in cells
_HIGH = 0.8  # from this fraction on, the bar has the warning color
_GAP = "   "
_COUNTED = 64  # number of tokens of a reply after which the line is updated; in a short context, 1 % of it


class StatusLine(Widget):
    """The status line. If it is too long, parts are shortened, or the last ones omitted. A click requests details."""

    class DetailsAsked(Message):
        """The user clicked the context."""

    class ModelAsked(Message):
        """The user clicked the model."""

    model: reactive[str] = reactive("")
    is_stopped: reactive[bool] = reactive(False)  # whether the engine of the loaded model has exited
    loading_model: reactive[Loading | None] = reactive(None)
    budget: reactive[ContextBudget | None] = reactive(None)  # without the reply that is being generated
    written: reactive[int] = reactive(0)  # number of tokens of this reply
    settings: reactive[ChatSettings] = reactive(ChatSettings())
    preset: reactive[str] = reactive("")  # name of the preset with these settings, or ""
    is_private: reactive[bool] = reactive(False)

    def count_reply(self, tokens: int) -> None:
        """Add `tokens` tokens of a reply to the budget, in steps, because each one draws the line."""
        limit = None if self.budget is None else self.budget.limit
        step = _COUNTED if limit is None else max(1, min(_COUNTED, limit // 100))
        self.written = tokens // step * step

    def render(self) -> Content:
        line, width = Content(""), self.size.width
        for forms in self._parts():
            space = width - len(line) - len(_GAP)
            if (part := next((form for form in forms if not line or len(form) <= space), None)) is None:
                break
            line = Content.assemble(line, _GAP if line else "", part)
        return line.truncate(width, ellipsis=True)

    def _parts(self) -> list[Sequence[Content]]:
        """Return the forms of each part, the longest first."""
        parts = [
            (self._model(),),
            (self._private(),),
            (self._preset(),),
            self._fullness(),
            (self._temperature(),),
            (self._system(),),
        ]
        return [forms for forms in parts if forms and forms[0]]

    def _model(self) -> Content:
        if self.loading_model is not None:
            return Content.styled(figures.loading(self.loading_model), "$text-accent")
        name = single_line(model_name(self.model))
        if self.is_stopped:
            return Content.styled(f"{name} stopped. Your next message starts it.", "$text-warning")
        return Content.styled(name, "bold").stylize(Style.from_meta({"part": "model"})) if name else Content("")

    def _private(self) -> Content:
        return Content.styled("private" if self.is_private else "", "$text-warning")

    def _fullness(self) -> Sequence[Content]:
        if self.budget is None:
            return ()
        budget = self.budget.grown(self.written)
        style, clickable = _style(budget), Style.from_meta({"part": "context"})
        bar = "" if budget.limit is None else f"{_bar(budget, budget.limit)} "
        long = Content.assemble((bar, style or "$primary"), (figures.budget(budget), style))
        lacking = (Content.styled(figures.budget(budget), style),) if budget.lacking else ()
        short = Content.styled(figures.budget_share(budget), style)
        return [form.stylize(clickable) for form in (long, *lacking, short)]

    def _temperature(self) -> Content:
        temperature = self.settings.sampling.temperature
        return Content("" if temperature is None else f"temp {temperature:g}")

    def _preset(self) -> Content:
        return Content(f"preset {single_line(self.preset)}" if self.preset else "")

    def _system(self) -> Content:
        return Content("system prompt" if self.settings.system.strip() and not self.preset else "")

    def on_click(self, event: Click) -> None:
        part = event.style.meta.get("part")
        if part == "context":
            self.post_message(self.DetailsAsked())
        elif part == "model":
            self.post_message(self.ModelAsked())


def _share(budget: ContextBudget, limit: int) -> float:
    return budget.used / max(1, limit)


def _style(budget: ContextBudget) -> str:
    if budget.lacking:
        return "$text-error"
    return "$text-warning" if budget.limit is not None and _share(budget, budget.limit) > _HIGH else ""


def _bar(budget: ContextBudget, limit: int) -> str:
    cells = min(_CELLS, round(_CELLS * _share(budget, limit)))
    return "▓" * cells + "░" * (_CELLS - cells)
