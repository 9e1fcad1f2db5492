"""Base classes of the screens above the chat (dialogs and pages), and questions that workers ask."""

from collections.abc import Sequence
from typing import ClassVar, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.dom import DOMNode
from textual.screen import ModalScreen, Screen
from textual.widgets import Button, Input, Label

from tui.client import ClientError, Models
from tui.engine_types import ModelInfo
from tui.footer_keys import key_name
from tui.large_downloads import describe_download, needs_confirmation
from tui.plain_text import sanitize
from tui.widgets.text_fields import LineField
from tui.widgets.textual_internals import close_notifications

Answer = TypeVar("Answer")


class OverChat(Screen[Answer]):
    """A screen above the chat that returns an answer."""

    def on_mount(self) -> None:
        close_notifications(self.app)  # they would cover the screen, and the user has moved on

    def dismiss(self, result: Answer | None = None) -> AwaitComplete:
        """Close the screen once. If it is not composed yet, wait until then.

        Closing it earlier would query widgets that do not exist yet. A second call would close the screen below.
        """
        if not self.is_mounted:
            self.call_later(self._dismiss_now, result)
            return AwaitComplete()
        return super().dismiss(result) if self.is_active else AwaitComplete()

    def _dismiss_now(self, result: Answer | None) -> None:
        self.dismiss(result)  # not awaited: a screen cannot wait for its own removal


class Page(OverChat[Answer]):
    """A screen that returns no answer. Opening another page replaces it."""


class Dialog(OverChat[Answer | None], ModalScreen[Answer | None]):
    """A modal screen that Escape closes without an answer."""

    VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]  # noqa: RUF012 - as the base class has it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Cancel"),
        # priority: keys that are typed right after Tab must reach the next field
        Binding("tab", "app.focus_next", show=False, priority=True),
        Binding("shift+tab", "app.focus_previous", show=False, priority=True),
    ]


async def confirm(node: DOMNode, question: str, about: str, yes: str) -> bool:
    """Ask a question and return whether the user agrees. Call it only from workers."""
    return await node.app.push_screen_wait(Confirm(question, about, yes)) or False


async def ask(node: DOMNode, question: str, text: str = "", hint: str = "") -> str:
    """Ask for a line of text and return it; empty if canceled. Call it only from workers."""
    return await node.app.push_screen_wait(Ask(question, text, hint)) or ""


async def may_fetch(node: DOMNode, models: Models, model: ModelInfo, verdict: str = "") -> bool:
    """Return whether a model may be downloaded. Asks the user if it is large or does not fit. Call it only from
    workers.

    `verdict`: describes whether the model fits, if known. Raises ClientError, also if no model can be downloaded.
    """
    if reason := models.offline_reason():
        raise ClientError(
            f"{model.name} is not installed, and {reason}", "Turn offline mode off, or use an installed model."
        )
    free = await models.free_disk()
    if not needs_confirmation(model, free):
        return True
    return await confirm(node, "Download this model?", describe_download(model, free, verdict), "Download")


class Confirm(Dialog[bool]):
    """A question with a text and two buttons. The button that does no harm has the focus."""

    AUTO_FOCUS = "#no"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("left,right", "app.focus_next", "Choose", show=False)]

    def __init__(self, question: str, about: str, yes: str, no: str = "Cancel") -> None:
        super().__init__()
        self._question, self._about, self._yes, self._no = question, about, yes, no

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_subtitle = "←→ choose · ⏎ answer · esc cancel"
            yield Label(sanitize(self._question), markup=False, classes="question")
            with VerticalScroll(classes="reading", can_focus=False):
                yield Label(sanitize(self._about), markup=False, classes="about")
            with Horizontal(classes="buttons"):
                yield Button(self._no, id="no")
                yield Button(self._yes, id="yes")

    @on(Button.Pressed)
    def answer(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")


def replies_in_the_way(chats: Sequence[str], model: str) -> Confirm:
    """Return the question whether to stop the replies of these chats, so that `model` can be loaded now."""
    reply, them = ("A reply is", "it") if len(chats) == 1 else (f"{len(chats)} replies are", "them")
    waiting = f"If you wait, the model is loaded when the engine is free. {key_name('escape')} keeps the current model."
    about = f"{', '.join(chats)}\n\n{waiting}"
    return Confirm(f"{reply} running. Stop {them} and load {model}?", about, "Stop and load", "Wait")


class Ask(Dialog[str]):
    """A question that the user answers with a line of text."""

    def __init__(self, question: str, text: str = "", hint: str = "") -> None:
        super().__init__()
        self._question, self._text, self._hint = question, text, hint

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_subtitle = "⏎ accept · esc cancel"
            yield Label(sanitize(self._question), markup=False, classes="question")
            yield LineField(sanitize(self._text), placeholder=self._hint)

    @on(Input.Submitted)
    def answer(self, event: Input.Submitted) -> None:
        if answer := event.value.strip():
            self.dismiss(answer)
        else:
            event.input.placeholder = f"Type something, or press {key_name('escape')} to cancel."
