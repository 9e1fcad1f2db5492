"""Room in the context of the open chat: made before a message is sent, or when the user asks for it."""

from textual.widget import Widget

from tui.client import Client
from tui.open_chat import OpenChat
from tui.screens.full_context import FullContextScreen
from tui.show_errors import show_errors
from tui.trimming import ContextTrimmer
from tui.types import ChatId, ContextBudget, MessageId, TrimPlan
from tui.widgets.chat_view import ChatView


class ContextRoom:
    """Trims chats, and shows what it does in the open one."""

    def __init__(self, node: Widget, client: Client, view: ChatView) -> None:
        self._node = node
        self._client = client
        self._view = view
        self._trimmer = ContextTrimmer(client.context, self._choose, view.show_trimmed, self._show_activity)

    @property
    def is_trimming(self) -> bool:
        """Whether the open chat is being trimmed."""
        return self._trimmer.is_trimming(self._view.chat.id)

    @property
    def activity(self) -> str:
        """Description of the work on the open chat; empty if there is none that takes time."""
        return self._trimmer.activity(self._view.chat.id)

    def stop(self) -> bool:
        """Stop trimming the open chat. Returns whether a trim was in progress."""
        return self._trimmer.stop(self._view.chat.id)

    async def ensure(self, chat: OpenChat, leaf: MessageId | None, typed: str) -> bool:
        """Whether `typed` and a reply fit after `leaf`, after trimming if necessary. Raises ClientError if they cannot.

        True if no model is ready: the message is shown at once, and its reply waits for the model.
        """
        is_ready = await self._client.engine.is_ready()
        return not is_ready or await self._trimmer.ensure_room(chat.id, leaf, typed, chat.settings.full_context)

    async def trim(self) -> None:
        """Let the user choose which messages of the open chat to leave out."""
        chat = self._view.chat
        if chat.id is not None and chat.leaf is not None:
            with show_errors(self._node):
                if (plan := await self._choose(chat.id, chat.leaf)) is not None:
                    await self._trimmer.trim(chat.id, plan)

    async def _choose(
        self, chat: ChatId, leaf: MessageId | None, typed: str = "", budget: ContextBudget | None = None
    ) -> TrimPlan | None:
        """Ask the user which messages to leave out, and return the plan."""
        dialog = FullContextScreen(self._client.context, chat, leaf, self._view.chat.branches, typed, budget)
        return await self._node.app.push_screen_wait(dialog)

    def _show_activity(self, chat: ChatId) -> None:
        if chat == self._view.chat.id:
            if self.activity:
                self._node.call_later(self._view.transcript.show_end)  # the activity is shown below the last message
            self._view.composer.show_held(is_held=self.is_trimming)
            self._view.show_activity(self.activity)
            self._node.refresh_bindings()
