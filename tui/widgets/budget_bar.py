"""A bar of the context: system prompt, history, reserve for the reply, and free tokens."""

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from tui import figures
from tui.types import ContextBudget

_PARTS = (("system", "█"), ("history", "▓"), ("reserve", "▒"))  # distinguishable without colors


class BudgetBar(Widget):
    """One line. Empty until the budget is known. Without a known limit, it shows only the used tokens."""

    budget: reactive[ContextBudget | None] = reactive(None)

    def render(self) -> Content:
        budget = self.budget
        if budget is None:
            return Content("")
        words = figures.budget(budget)
        style = "$text-error" if budget.lacking else "$text-muted"
        width = self.size.width - len(words) - 1
        if budget.limit is None or width < 8:
            return Content.styled(words, style)
        return Content.assemble(self._bar(budget, budget.limit, width), (words, style))

    def _bar(self, budget: ContextBudget, limit: int, width: int) -> Content:
        counts = {"system": budget.system, "history": budget.history, "reserve": budget.reserve}
        whole = max(limit, sum(counts.values()))
        parts: list[tuple[str, str]] = []
        used, drawn = 0, 0
        for name, sign in _PARTS:
            used += counts[name]
            cells = round(width * used / whole) - drawn
            drawn += cells
            parts.append((sign * cells, self._color(name, budget)))
        return Content.assemble(*parts, ("░" * (width - drawn) + " ", "$text-disabled"))

    def _color(self, name: str, budget: ContextBudget) -> str:
        if budget.lacking:
            return "$error"
        return {"system": "$secondary", "history": "$primary", "reserve": "$panel-lighten-2"}[name]
