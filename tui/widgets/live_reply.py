"""The running reply of the open chat in the transcript: its text, its tool calls, and the questions about them."""

from tui.drafts import Prompt
from tui.reply_progress import ReplyProgress
from tui.types import CallId, ReasoningDelta, ReplyEvent, ReplyStarted, TextDelta, ToolCalled, ToolReturned
from tui.widgets.composer import Composer
from tui.widgets.message_view import MessageView
from tui.widgets.tool_call import PermissionAsk
from tui.widgets.transcript import Transcript


class LiveReply:
    """Shows events of a reply in its view. The view may be unmounted; later, it is mounted with the stored text."""

    def __init__(self, transcript: Transcript, composer: Composer) -> None:
        self._transcript = transcript
        self._composer = composer

    def _view(self, reply: ReplyProgress) -> MessageView | None:
        return self._transcript.view(reply.message.id) if reply.message else None

    async def show(self, reply: ReplyProgress, event: ReplyEvent) -> None:
        """Show an event that was applied to the reply. The first event mounts its view."""
        if isinstance(event, ReplyStarted) and reply.message is not None:
            await self._transcript.append(reply.message, scrolls=False)
        if isinstance(event, TextDelta | ReasoningDelta | ToolCalled):
            self._transcript.note_new_text()
        if (view := self._view(reply)) is None:
            return
        if isinstance(event, TextDelta):
            await view.grow(event.text, reply.reasoning_seconds)
        elif isinstance(event, ReasoningDelta):
            await view.add_reasoning(event.text, reply.reasoning_seconds)
        elif isinstance(event, ToolCalled):
            await view.show_call(event, reply.reasoning_seconds)
            self._focus_question()
        elif isinstance(event, ToolReturned):
            view.show_result(event)

    async def show_calls(self, reply: ReplyProgress) -> None:
        """Show the tool calls of a running reply after its chat was opened."""
        if (view := self._view(reply)) is not None:
            for called in list(reply.calls.values()):
                await view.show_call(called, reply.reasoning_seconds)
        self._focus_question()

    def show_answer(self, reply: ReplyProgress, call: CallId) -> None:
        """Show that the question about a call was answered."""
        reply.note_answer(call)
        if (view := self._view(reply)) is not None:
            view.show_answer(call)

    def yield_to_typing(self, reply: ReplyProgress) -> None:
        """Draw typed text before the reply, because the user waits for it."""
        if (view := self._view(reply)) is not None:
            view.yield_to_typing()

    def choose_answer(self, *, scrolls: bool = True) -> None:
        """Focus the question about a tool call."""
        for question in self._transcript.query(PermissionAsk):
            question.query_one("OptionList").focus(scroll_visible=scrolls)

    def _focus_question(self) -> None:
        """Focus the question about a tool call, unless the user is typing."""
        area = self._composer.area
        if self._composer.prompt == Prompt() and area.screen.focused in (None, area):
            self.choose_answer(scrolls=False)
