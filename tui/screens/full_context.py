"""The screen that asks how to trim a full context. It previews which messages would be left out."""

import asyncio

from textual import on, work
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Label, OptionList
from textual.widgets.option_list import Option

from tui import figures
from tui.branches import Branches
from tui.client import Context
from tui.plain_text import capitalized
from tui.screens.dialog import Dialog
from tui.show_errors import show_errors
from tui.types import ChatId, ContextBudget, FullContext, MessageId, TrimPlan
from tui.widgets.rows import Rows

_CHOICES = {
    FullContext.SUMMARIZE: "Replace the oldest messages with a summary",
    FullContext.DROP_OLDEST: "Drop the oldest messages",
}
_VERBS = {FullContext.SUMMARIZE: "summarizing", FullContext.DROP_OLDEST: "dropping"}
_STOP = "Cancel"
_POLL_SECONDS = 1.5  # seconds between two polls for changes by other windows


class FullContextScreen(Dialog[TrimPlan]):
    """Returns the chosen plan, or None. Messages that are left out stay visible in the chat.

    If another window makes room for the message, the plan is empty.
    """

    AUTO_FOCUS = ""  # Textual would scroll the choices to the center, and the question out of a small terminal

    def __init__(
        self,
        context: Context,
        chat: ChatId,
        leaf: MessageId | None,
        branches: Branches,
        typed: str = "",
        budget: ContextBudget | None = None,
    ) -> None:
        """Prepare the choice for a chat. `typed`: the new message that must fit.

        `budget` is set if the message does not fit yet.
        """
        super().__init__()
        self._port, self._chat, self._leaf = context, chat, leaf
        self._branches = branches
        self._typed, self._budget = typed, budget
        self._plans: dict[FullContext, TrimPlan] = {}

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", can_focus=False) as dialog:
            dialog.border_subtitle = "↑↓ choose · ⏎ apply · esc cancel"
            yield Label("The context is full" if self._budget else "Free up context", classes="question")
            if self._budget is not None:
                yield Label(self._about(self._budget), markup=False, classes="about")
            choices = [Option(text, id=how.value) for how, text in _CHOICES.items()]
            yield Rows(*choices, Option(_STOP, id=FullContext.STOP.value))
            yield Label("", id="goes", markup=False)

    def _about(self, budget: ContextBudget) -> str:
        """Describe the budget with the new message, which the status line does not count."""
        return f"With your message: {figures.budget(budget)}" if self._typed else capitalized(figures.budget(budget))

    def on_mount(self) -> None:
        self.set_focus(self.query_one(Rows), scroll_visible=False)
        self.follow()

    @work
    async def follow(self) -> None:
        """Plan, and plan again when another window has changed the context."""
        seen: ContextBudget | None = None
        with show_errors(self):
            while True:
                budget = await self._port.budget(self._chat, self._leaf, self._typed)
                if budget != seen:
                    seen = budget
                    await self._plan(budget)
                await asyncio.sleep(_POLL_SECONDS)

    async def _plan(self, budget: ContextBudget) -> None:
        if self._budget is not None:
            if not budget.lacking:
                self.dismiss(TrimPlan(FullContext.DROP_OLDEST, (), 0))  # another window has made room
                return
            self._budget = budget
            self.query_one(".about", Label).update(self._about(budget))
        for how in _CHOICES:
            self._plans[how] = await self._port.plan(self._chat, self._leaf, how, self._typed)
        self._show(FullContext(self._chosen()))

    def _chosen(self) -> str:
        options = self.query_one(OptionList)
        return options.get_option_at_index(options.highlighted or 0).id or FullContext.STOP.value

    @on(OptionList.OptionHighlighted)
    def preview(self, event: OptionList.OptionHighlighted) -> None:
        self._show(FullContext(event.option.id))

    def _show(self, how: FullContext) -> None:
        plan = self._plans.get(how)
        self.query_one("#goes", Label).update(self._goes(plan) if plan else Content(""))

    def _helps(self, plan: TrimPlan) -> bool:
        return plan.tokens > 0 if self._budget is None else plan.suffices(self._budget)

    def _goes(self, plan: TrimPlan) -> Content:
        if not self._helps(plan):
            return Content.styled(self._too_little(plan), "bold")
        lines = [Content.styled(f"Frees {plan.tokens:,} tokens by {_VERBS[plan.how]}:", "bold")]
        lines += [Content(figures.message_line(self._branches[name], 60)) for name in plan.messages]
        return Content("\n").join(lines)

    def _too_little(self, plan: TrimPlan) -> str:
        if self._budget is None:
            return "There are no earlier messages to leave out: the last ones stay."
        return f"This frees {max(0, plan.tokens):,} of the {self._budget.lacking:,} tokens needed."

    @on(OptionList.OptionSelected)
    def choose(self, event: OptionList.OptionSelected) -> None:
        how = FullContext(event.option.id)
        if how is FullContext.STOP:
            self.dismiss(None)
        elif how in self._plans and self._helps(self._plans[how]):
            self.dismiss(self._plans[how])
