"""One message of a chat: its author, text, and cost, and the actions on it."""

from dataclasses import replace
from typing import ClassVar

from textual.actions import SkipAction
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message as Posted
from textual.widgets import Label, Static

from tui import figures
from tui.plain_text import head, model_name
from tui.types import Message, MessageId, Role
from tui.widgets.folded import Folded, Reasoning
from tui.widgets.growing import Column
from tui.widgets.text_fields import WordButtons, word

_LONGEST_TYPED = 20_000  # characters of a user's message that are shown; copy and edit use all of it


class MessageHeader(WordButtons):
    """The line above a message."""


class MessageView(Column, can_focus=True):
    """One message. A reply's view is updated while the reply grows.

    Letters are not bound, because the chat screen sends them to the prompt. Two keys are also commands of that screen.
    They have priority here, so that they apply to the focused message and the footer shows them.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+up", "edit", "Edit", priority=True),
        Binding("ctrl+y", "regenerate", "Retry", priority=True),
        Binding("ctrl+c", "copy", "Copy"),
        Binding("left", "branch(-1)", "Branch ‹"),
        Binding("right", "branch(1)", "Branch ›"),
        Binding("enter", "extracts", "Code, links"),
        Binding("ctrl+o", "unfold", "Reasoning, summary", show=False),
        Binding("up", "neighbor(-1)", "Message above", show=False),
        Binding("down", "neighbor(1)", "Message below", show=False),
    ]

    class Asked(Posted):
        """Base of the requests about a message."""

        def __init__(self, message: Message) -> None:
            super().__init__()
            self.message = message

    class EditAsked(Asked):
        pass

    class RegenerateAsked(Asked):
        pass

    class CopyAsked(Asked):
        pass

    class ExtractsAsked(Asked):
        pass

    class BranchAsked(Asked):
        def __init__(self, message: Message, step: int) -> None:
            super().__init__(message)
            self.step = step

    class NeighborAsked(Asked):
        def __init__(self, message: Message, step: int) -> None:
            super().__init__(message)
            self.step = step

    def __init__(
        self, message: Message, siblings: tuple[MessageId, ...], *, left_out: bool = False, summary: str = ""
    ) -> None:
        """`summary`: the text that the model gets in place of this message and those above it."""
        super().__init__(classes=f"{message.role.value}{' left-out' if left_out else ''}")
        self.message = message
        self._siblings = siblings
        self._left_out = left_out
        self._summary = summary

    def compose(self) -> ComposeResult:
        message = self.message
        yield MessageHeader(self._header())
        if message.reasoning:
            yield Reasoning(message.reasoning, message.reasoning_seconds, finished=bool(message.text or message.finish))
        if message.role is Role.ASSISTANT:
            from tui.widgets.reply_text import ReplyText

            yield ReplyText(message.text)
        else:
            yield Static(Content(head(message.text, _LONGEST_TYPED)), classes="typed")
            for attachment in message.attachments:
                yield Label(f"+ {attachment.name} ({len(attachment.text):,} characters)", markup=False, classes="file")
        yield Label(self._cost(), markup=False, classes="cost")
        if self._summary:
            yield Folded("Summary of earlier messages", self._summary)

    def _header(self) -> Content:
        message = self.message
        mine = message.role is Role.USER
        parts: list[str | Content | tuple[str, str]] = [
            ("You" if mine else model_name(message.model) or "Model", "bold")
        ]
        if len(self._siblings) > 1:
            position = f" {self._siblings.index(message.id) + 1}/{len(self._siblings)} "
            parts += ["  ", word("‹", "branch(-1)"), position, word("›", "branch(1)")]
        if self._left_out:
            parts.append(("  no longer in context", "italic"))
        parts += ["  ", word("copy", "copy"), "  ", word("edit", "edit") if mine else word("retry", "regenerate")]
        return Content.assemble(*parts)

    def _cost(self) -> Content:
        message = self.message
        lines: list[tuple[str, str]] = []
        if message.role is Role.USER and message.error:
            lines.append((f"No reply: {message.error}", "$text-warning"))
        if message.finish in figures.FINISHES:
            reason = f": {message.error}" if message.error else ""
            lines.append((f"{figures.FINISHES[message.finish]}{reason}", "$text-warning"))
        if message.usage is not None:
            lines.append((figures.cost(message.usage), ""))
            if message.usage.miss:
                lines.append((f"cache miss: {message.usage.miss}", "$text-warning"))
        return Content("\n").join(Content.styled(text, style) for text, style in lines)

    # --- while a reply is generated

    def grow(self, text: str) -> None:
        """Append text to the answer."""
        from tui.widgets.reply_text import ReplyText

        if not self.children:  # not composed yet: `compose` will show this text
            self.message = replace(self.message, text=self.message.text + text)
        for shown in self.query(ReplyText):
            shown.add(text)

    def yield_to_typing(self) -> None:
        """Draw the answer between the user's keys."""
        from tui.widgets.reply_text import ReplyText

        for text in self.query(ReplyText):
            text.yield_to_typing()

    def _finish_text(self) -> None:
        from tui.widgets.reply_text import ReplyText

        for text in self.query(ReplyText):
            text.finish()

    async def add_reasoning(self, text: str, seconds: float) -> None:
        """Append reasoning text."""
        if not self.children:
            self.message = replace(self.message, reasoning=self.message.reasoning + text, reasoning_seconds=seconds)
        elif found := self.query(Reasoning):
            found.first().add(text, seconds)
        else:
            await self.mount(Reasoning(text, seconds, finished=False), after=0)

    def update_message(self, message: Message, siblings: tuple[MessageId, ...]) -> None:
        """Update everything except the texts, which were shown as they arrived."""
        self.message, self._siblings = message, siblings
        for header in self.query(MessageHeader):
            header.update(self._header())
        for cost in self.query(".cost").results(Label):
            cost.update(self._cost())
        if message.finish is not None:
            self._finish_text()
        if message.text or message.finish is not None:
            for reasoning in self.query(Reasoning):
                reasoning.finish(message.reasoning_seconds)

    # --- actions

    def action_edit(self) -> None:
        self.post_message(self.EditAsked(self.message))

    def action_regenerate(self) -> None:
        self.post_message(self.RegenerateAsked(self.message))

    def action_copy(self) -> None:
        """Copy the message. If text is selected, let the screen copy that instead."""
        if self.screen.get_selected_text():
            raise SkipAction
        self.post_message(self.CopyAsked(self.message))

    def action_extracts(self) -> None:
        self.post_message(self.ExtractsAsked(self.message))

    def action_branch(self, step: int) -> None:
        self.post_message(self.BranchAsked(self.message, step))

    def action_neighbor(self, step: int) -> None:
        self.post_message(self.NeighborAsked(self.message, step))

    def action_unfold(self) -> None:
        for folded in self.query(Folded):
            folded.folded = not folded.folded
