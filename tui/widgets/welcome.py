"""The view of an empty chat: loading progress, a recommended model, the last chat, and the most useful keys."""

import time
from collections.abc import Iterator
from dataclasses import replace

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message

from tui import figures
from tui.client import ClientError
from tui.engine_types import Loading, Recommendation
from tui.plain_text import capitalized, model_name, shortened, single_line, start
from tui.types import ChatSummary
from tui.widgets.text_fields import WordButtons, word

_WIDEST = 72  # maximum width of a line in cells
_BAR = 40  # maximum width of the progress bar in cells
_TIPS = (("/", "commands"), ("F2", "models"), ("F7", "search"), ("F1", "help"))


class Welcome(Vertical):
    """The view of an empty chat, shown instead of the transcript until the first message is sent."""

    class RetryAsked(Message):
        """The user wants to load the model again."""

    class ContinueAsked(Message):
        """The user wants to open the last chat."""

        def __init__(self, chat: ChatSummary) -> None:
            super().__init__()
            self.chat = chat

    def __init__(self) -> None:
        super().__init__()
        self._model = ""
        self._loading: Loading | None = None
        self._problem: ClientError | None = None
        self._has_models = True  # whether the user can choose another model after a failure
        self._better: Recommendation | None = None
        self._last: ChatSummary | None = None

    def compose(self) -> ComposeResult:
        yield WordButtons(id="welcome")

    def on_resize(self) -> None:
        self._draw()

    def show_loading(self, now: Loading) -> None:
        self._loading, self._problem = now, None
        self._draw()

    def show_loaded(self, model: str) -> None:
        """Show that `model` is loaded. "": loading failed."""
        self._model, self._loading = model, None
        self._draw()

    def show_failure(self, problem: ClientError, *, has_models: bool) -> None:
        """Show why loading failed. `has_models`: whether the user can choose another model."""
        self._problem, self._loading, self._has_models = problem, None, has_models
        self._draw()

    def recommend(self, better: Recommendation) -> None:
        self._better = better
        self._draw()

    def offer(self, last: ChatSummary | None) -> None:
        """Offer to continue a chat. None: remove the offer."""
        self._last = last
        self._draw()

    def enter(self) -> None:
        """Handle Enter in an empty prompt: retry a failed load, or continue the last chat."""
        if self._problem is not None:
            self.action_retry()
        elif self._last is not None:
            self.action_continue()

    def action_retry(self) -> None:
        self.post_message(self.RetryAsked())

    def action_continue(self) -> None:
        if self._last is not None:
            self.post_message(self.ContinueAsked(self._last))

    async def action_models(self) -> None:
        await self.app.run_action("models", self.app)

    # --- the lines

    def _draw(self) -> None:
        for label in self.query(WordButtons):  # there is no label before it is composed
            parts = [list(part) for part in (self._about_model(), self._offers(), self._tips())]
            blank = [Content("")] if sum(len(part) + 1 for part in parts) <= self.size.height else []
            lines = [line for part in parts if part for line in (*part, *blank)]
            label.styles.width = self._width() + 2  # with the padding; the left edge is fixed while texts change
            label.update(Content("\n").join(lines))

    def _width(self) -> int:
        return max(20, min(_WIDEST, self.size.width - 4))

    def _about_model(self) -> Iterator[Content]:
        if self._problem is not None:
            yield from self._failure(self._problem)
        elif self._loading is not None:
            yield from self._progress(self._loading)
        elif self._model:
            name = shortened(single_line(model_name(self._model)), self._width() - 10)
            yield Content.assemble((name, "bold"), " is ready.")

    def _failure(self, problem: ClientError) -> Iterator[Content]:
        yield Content.styled(f"✗ {capitalized(single_line(problem.message))}", "bold $text-error")
        if problem.remedy:
            yield Content(single_line(problem.remedy))
        retry = Content.assemble(word("Retry", "retry"), (" [⏎]", "dim"))
        choose = Content.assemble("   ", word("Choose a model", "models"), (" [F2]", "dim"))
        yield Content.assemble(retry, choose) if self._has_models else retry

    def _progress(self, now: Loading) -> Iterator[Content]:
        name = model_name(now.model)
        yield Content.assemble("Getting ready: ", (shortened(single_line(name), self._width() - 15), "bold"))
        if now.fraction is not None:
            width = min(_BAR, self._width() - 6)
            done = round(width * now.fraction)
            yield Content.assemble(
                ("━" * done, "$primary"), ("━" * (width - done), "dim"), f" {figures.share(now.fraction):>5}"
            )
        stage = f"{now.stage} ".replace(f" {now.model} ", " ").replace(f" {name} ", " ").rstrip()
        shown = replace(now, stage=stage).stage_and_amount
        yield Content.styled(capitalized(single_line(shown)), "dim")
        yield Content("You can already type. Your message is sent when the model is ready.")

    def _offers(self) -> Iterator[Content]:
        if self._better is not None:
            better = self._better
            about = f" {word_verdict(better.verdict)}   "
            yield Content.assemble(
                "This machine can run ", (single_line(better.model), "bold"), about, word("Get it", "models"), " [F2]"
            )
        if self._last is not None:
            age = figures.age(self._last.updated, time.time())
            title = start(self._last.name, self._width() - 26)
            key = " [⏎]" if self._problem is None else ""  # Enter loads a model again after a failure
            yield Content.assemble(word(f"Continue: {title}", "continue"), (f" · {age}{key}", "dim"))

    def _tips(self) -> Iterator[Content]:
        yield Content("    ").join([Content.assemble((key, "bold"), (f" {what}", "dim")) for key, what in _TIPS])


def word_verdict(verdict: str) -> str:
    """Return the first part of a verdict in parentheses: "(fits: 32k context)"."""
    return f"({single_line(verdict.partition(';')[0])})"
