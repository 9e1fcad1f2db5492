"""One message of a chat: its author, text, and cost, and the actions on it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from textual import on
from textual.actions import SkipAction
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message as Posted
from textual.widget import Widget
from textual.widgets import Label, Static

from tui import figures
from tui.attachment_sizes import AttachmentSizes
from tui.plain_text import head, model_name
from tui.types import CallId, Finish, Message, MessageId, Role, ToolCalled, ToolReturned
from tui.widgets.attached_file import AttachedFile
from tui.widgets.folded import Folded, Reasoning
from tui.widgets.growing import Column
from tui.widgets.outcome import Outcome, has_outcome
from tui.widgets.text_fields import SplitLine, clickable, word
from tui.widgets.tool_call import PermissionAsk, ToolCallLine

# finish of a reply -> word in its header
_STATES: Mapping[Finish | None, str] = {Finish.STOPPED: "stopped", Finish.EDITED: "edited"}
_LONGEST_TYPED = 20_000  # characters of a user's message that are shown; copying and editing use the whole text


class MessageHeader(SplitLine):
    """The line above a message: author and branch on the left, cost and actions on the right."""


class MessageView(Column, can_focus=True):
    """Shows one message. The view of a reply is updated while the reply grows.

    Letters are not bound, because the chat screen sends them to the prompt. Two keys are also bound to commands of that
    screen. The bindings of this view have priority, so that they apply to the focused message and the footer shows
    them.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+up", "edit", "Edit", priority=True),
        Binding("ctrl+y", "regenerate", "Retry", priority=True),
        Binding("ctrl+c", "copy", "Copy"),
        Binding("left", "branch(-1)", "Branch ‹"),
        Binding("right", "branch(1)", "Branch ›"),
        Binding("enter", "extracts", "Code, links"),
        Binding("ctrl+o", "unfold", "Details"),
        Binding("ctrl+w", "wrap", "Wrap code", show=False),
        Binding("up", "neighbor(-1)", "Message above", show=False),
        Binding("down", "neighbor(1)", "Message below", show=False),
    ]

    class Asked(Posted):
        """Base class of the messages that request an action on a chat message."""

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
        self,
        message: Message,
        siblings: tuple[MessageId, ...],
        sizes: AttachmentSizes,
        *,
        left_out: bool = False,
        summary: str = "",
    ) -> None:
        """Create the view of a message.

        `summary`: the text that is sent to the model in place of this message and the messages above.
        """
        super().__init__(classes=f"{message.role.value}{' left-out' if left_out else ''}")
        self.message = message
        self._siblings = siblings
        self._sizes = sizes
        self._left_out = left_out
        self._summary = summary

    def compose(self) -> ComposeResult:
        message = self.message
        yield MessageHeader(*self._header())
        if message.role is Role.ASSISTANT:
            yield from self._reply_parts()
        else:
            yield Static(Content(head(message.text, _LONGEST_TYPED)), classes="typed")
            for attachment in message.attachments:
                yield AttachedFile(attachment, self._sizes)
        if has_outcome(message):
            yield Outcome(message)
        if self._summary:
            yield Folded("Summary of earlier messages", self._summary)

    def _reply_parts(self) -> ComposeResult:
        from tui.widgets.reply_text import ReplyText

        message = self.message
        for step in message.steps:
            if step.reasoning:
                yield Reasoning(step.reasoning, 0.0, finished=True)
            if step.text:
                yield ReplyText(step.text)
            yield ToolCallLine.of_step(step)
        if message.reasoning:
            yield Reasoning(message.reasoning, message.reasoning_seconds, finished=bool(message.text or message.finish))
        if message.text:
            yield ReplyText(message.text)

    def _header(self) -> list[Content]:
        """Return the left part of the header, and versions of the right part from long to short."""
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
        words = Content.assemble(
            word("copy", "copy"), "  ", word("edit", "edit") if mine else word("retry", "regenerate")
        )
        costs = (Content.assemble(_cost_word(cost), "   ", words) for cost in self._costs())
        return [Content.assemble(*parts), *costs, words]

    def _costs(self) -> list[str]:
        """Return versions of the reply's cost as text, from long to short."""
        usage = self.message.usage
        words = [] if usage is None else [figures.brief_cost(usage), figures.brief_speed(usage)]
        state = _STATES.get(self.message.finish, "")
        costs = [" · ".join(filter(None, (state, one))) for one in [*words, ""]]
        return [one for one in costs if one]

    def _details(self) -> str:
        """Return the full cost of a reply, with one fact on each line."""
        return "" if self.message.usage is None else "\n".join(figures.details(self.message.usage))

    # --- while a reply is generated

    def _parts(self) -> list[Widget]:
        """Return the widgets after the last tool call, or after the header."""
        starts = [index for index, one in enumerate(self.children) if isinstance(one, MessageHeader | ToolCallLine)]
        return list(self.children[starts[-1] + 1 :]) if starts else []

    async def grow(self, text: str, reasoning_seconds: float = 0.0) -> None:
        """Append text to the answer. `reasoning_seconds`: duration of the reasoning before it."""
        from tui.widgets.reply_text import ReplyText

        if not self.children:  # not composed yet; `compose` will show this text
            self.message = replace(self.message, text=self.message.text + text)
        elif texts := [one for one in self._parts() if isinstance(one, ReplyText)]:
            texts[-1].add(text)
        else:
            self._end_reasoning(reasoning_seconds)
            await self.mount(ReplyText(text))

    def _end_reasoning(self, seconds: float) -> None:
        for part in self._parts():
            if isinstance(part, Reasoning):
                part.finish(seconds)

    def yield_to_typing(self) -> None:
        """Draw the answer only between two keys of the user."""
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
        elif found := [one for one in self._parts() if isinstance(one, Reasoning)]:
            found[-1].add(text, seconds)
        else:
            position = len(self.children) - len(self._parts())
            await self.mount(Reasoning(text, seconds, finished=False), after=position - 1)

    async def show_call(self, called: ToolCalled, reasoning_seconds: float = 0.0) -> None:
        """Append a tool call, with the question whether it may run if `asks` is set."""
        self._finish_text()
        self._end_reasoning(reasoning_seconds)
        await self.mount(ToolCallLine(called.name, called.arguments, called.call, asks=called.asks))
        if called.asks:
            await self.mount(PermissionAsk(called))

    def show_answer(self, call: CallId) -> None:
        """Remove the question about a call, and show the call as running."""
        self._remove_questions(call)
        for line in self.query(ToolCallLine):
            if line.call == call:
                line.run()

    def show_result(self, returned: ToolReturned) -> None:
        """Show the result of a tool call."""
        self._remove_questions(returned.call)
        for line in self.query(ToolCallLine):
            if line.call == returned.call:
                line.finish(returned.result, is_error=returned.is_error)

    def _remove_questions(self, call: CallId | None = None) -> None:
        """Remove the question about a tool call, or all questions."""
        for question in self.query(PermissionAsk):
            if call in (None, question.called.call):
                question.remove()

    def update_message(self, message: Message, siblings: tuple[MessageId, ...]) -> None:
        """Update the view, except for texts of the reply, which were shown as they arrived."""
        self.message, self._siblings = message, siblings
        for header in self.query(MessageHeader):
            header.show(*self._header())
        self._show_outcome()
        if message.finish is None:
            return
        self._finish_text()
        self._remove_questions()
        for line in self.query(ToolCallLine):
            if line.call is not None:
                line.stop()
        for reasoning in self.query(Reasoning):
            reasoning.end()

    def _show_outcome(self) -> None:
        shown = list(self.query(Outcome))
        for one in shown:
            if has_outcome(self.message):
                one.show(self.message)
            else:
                one.remove()
        if not shown and has_outcome(self.message) and self.children:
            self.mount(Outcome(self.message))

    # --- actions

    def action_edit(self) -> None:
        self.post_message(self.EditAsked(self.message))

    def action_regenerate(self) -> None:
        self.post_message(self.RegenerateAsked(self.message))

    def action_copy(self) -> None:
        """Copy the message. If text is selected, let the screen copy the selection instead."""
        if self.screen.get_selected_text():
            raise SkipAction
        self.post_message(self.CopyAsked(self.message))

    def action_extracts(self) -> None:
        self.post_message(self.ExtractsAsked(self.message))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "branch" or len(self._siblings) > 1

    def action_branch(self, step: int) -> None:
        self.post_message(self.BranchAsked(self.message, step))

    def action_neighbor(self, step: int) -> None:
        self.post_message(self.NeighborAsked(self.message, step))

    def action_unfold(self) -> None:
        """Hide the reasoning, tool calls, and details of this message, or show all of them if none is shown."""
        parts, has_details = list(self.query(Folded)), bool(self.query(".details"))
        are_shown = has_details or any(not one.folded for one in parts)
        for one in parts:
            one.folded = are_shown
        if parts and not are_shown:
            self.post_message(Folded.Opened(parts[0]))
        if has_details is are_shown:
            self.action_details()

    def action_wrap(self) -> None:
        """Wrap the long lines of all code blocks, or cut them off if they are wrapped."""
        from tui.widgets.code_block import CodeBlock

        blocks = list(self.query(CodeBlock))
        wrapped = not any(block.is_wrapped for block in blocks)
        for block in blocks:
            block.wrap(wrapped)

    def action_details(self) -> None:
        """Show or hide the details of the cost and of an error."""
        for outcome in self.query(Outcome):
            outcome.toggle_details()
        if shown := self.query(".details"):
            shown.remove()
        elif details := self._details():
            self.mount(Label(details, markup=False, classes="details"), after=0)
            self.post_message(Folded.Opened(self))  # the details are at its start

    @on(Folded.Opened)
    def follow_growth(self, event: Folded.Opened) -> None:
        """Keep the end of a running reply in view, although a part of it was opened."""
        if self.message.role is Role.ASSISTANT and self.message.finish is None:
            event.stop()


def _cost_word(cost: str) -> Content:
    return clickable(Content.styled(cost, "$text-muted"), "details")
