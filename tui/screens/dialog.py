"""Screens over the chat: dialogs that ask, and the base of all that are closed with Escape."""

from typing import ClassVar, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.dom import DOMNode
from textual.screen import ModalScreen, Screen
from textual.widgets import Button, Input, Label

from tui.client import Models
from tui.engine_types import ModelInfo
from tui.large_downloads import describe_download, needs_confirmation
from tui.plain_text import sanitize
from tui.widgets.text_fields import LineField

Answer = TypeVar("Answer")


class OverChat(Screen[Answer]):
    """What all of them share."""

    def dismiss(self, result: Answer | None = None) -> AwaitComplete:
        """Once: an answer that was typed or clicked twice would close what lies below, too. And not before the screen
        is composed, which would then look for parts that are not there."""
        if not self.is_mounted:
            self.call_later(self._dismiss_now, result)
            return AwaitComplete()
        return super().dismiss(result) if self.is_active else AwaitComplete()

    def _dismiss_now(self, result: Answer | None) -> None:
        self.dismiss(result)  # not returned: a screen cannot await in its own turn that it is closed


class Page(OverChat[Answer]):
    """One that only shows something: another one takes its place."""


class Dialog(OverChat[Answer | None], ModalScreen[Answer | None]):
    """What all of them share."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel")]


async def confirm(node: DOMNode, question: str, about: str, yes: str) -> bool:
    """Whether the person says yes. For workers only."""
    return await node.app.push_screen_wait(Confirm(question, about, yes)) or False


async def ask(node: DOMNode, question: str, text: str = "", hint: str = "") -> str:
    """What the person types; empty for nothing. For workers only."""
    return await node.app.push_screen_wait(Ask(question, text, hint)) or ""


async def may_fetch(node: DOMNode, models: Models, model: ModelInfo, verdict: str = "") -> bool:
    """Whether a model may be fetched, which the user is asked if it is large, or of no use here. For workers only.

    `verdict`: whether it fits, in words, if that is known. Raises ClientError.
    """
    free = await models.free_disk()
    if not needs_confirmation(model, free):
        return True
    return await confirm(node, "Download this model?", describe_download(model, free, verdict), "Download")


class Confirm(Dialog[bool]):
    """A question, what it is about in full, and two buttons; the harmless one is focused."""

    AUTO_FOCUS = "#no"

    def __init__(self, question: str, about: str, yes: str) -> None:
        super().__init__()
        self._question, self._about, self._yes = question, about, yes

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Label(sanitize(self._question), markup=False, classes="question")
            yield Label(sanitize(self._about), markup=False, classes="about")
            with Horizontal(classes="buttons"):
                yield Button("Cancel", id="no")
                yield Button(self._yes, id="yes", variant="warning")

    @on(Button.Pressed)
    def answer(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")


class Ask(Dialog[str]):
    """A line of text."""

    def __init__(self, question: str, text: str = "", hint: str = "") -> None:
        super().__init__()
        self._question, self._text, self._hint = question, text, hint

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Label(sanitize(self._question), markup=False, classes="question")
            yield LineField(sanitize(self._text), placeholder=self._hint)

    @on(Input.Submitted)
    def answer(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)
