"""The replies from their request to their end: applies their events, and shows those of the open chat.

The workers that read replies only post events. `ReplyFeed.take` changes the state.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from textual.message import Message as Posted
from textual.widget import Widget

from tui.client import Client, ClientError, NotLoaded
from tui.reply_progress import ReplyProgress
from tui.reply_stopper import ReplyStopper
from tui.running_replies import RunningReplies
from tui.show_errors import show_error
from tui.types import (
    NEW_CHAT,
    CallId,
    ChatId,
    EngineRestarting,
    Finish,
    Message,
    MessageId,
    Permission,
    ReplyEnd,
    ReplyEvent,
    ReplyStarted,
    ToolCalled,
)
from tui.widgets.chat_view import ChatView

LONG_REPLY = 20.0  # seconds; after a longer reply, the terminal bell rings if another window has the focus


class ReplyFeed:
    """Requests and stops replies, and follows them in all chats."""

    class Came(Posted, bubble=False):
        """An event of a reply, or the error that ended it."""

        def __init__(self, reply: ReplyProgress, event: ReplyEvent | ClientError) -> None:
            super().__init__()
            self.reply = reply
            self.event = event

    class LongReplyEnded(Posted):
        """A reply ended that took longer than LONG_REPLY."""

        def __init__(self, chat: ChatId) -> None:
            super().__init__()
            self.chat = chat

    class ModelWanted(Posted):
        """The user requested a reply, but no model is loaded, or its engine has exited."""

    def __init__(
        self,
        node: Widget,
        client: Client,
        view: ChatView,
        running: RunningReplies,
        has_model: Callable[[], bool],
        ended: Callable[[Message | None], None],
    ) -> None:
        """`has_model` returns whether a model is loaded.

        `ended` receives each reply of the open chat that has ended, or None if it did not start.
        """
        self._node = node
        self._client = client
        self._view = view
        self._running = running
        self._has_model = has_model
        self._ended = ended
        run = partial(node.run_worker, group="stop", description="stop")
        self._stopper = ReplyStopper(client.replies, running, run, self._finish, partial(show_error, node))

    def ask(self, chat: ChatId, to: MessageId) -> None:
        """Request a reply to a message, which must be the end of its branch."""
        self._running.start(chat, to)
        self._view.show_failure(chat, to)
        if not self._has_model():
            self._node.post_message(self.ModelWanted())
        self._view.post_shown()

    async def take(self, came: Came) -> None:
        """Apply an event of a reply, and show it if its chat is open."""
        reply, event = came.reply, came.event
        if not self._running.is_running(reply):
            return
        if isinstance(event, ClientError):
            await self._fail(reply, event)
            return
        reply.apply(event)
        if isinstance(event, EngineRestarting):
            self._node.post_message(self.ModelWanted())
        if reply.chat == self._view.chat.id:
            await self._show(reply, event)
        elif isinstance(event, ToolCalled) and event.asks:
            self._node.app.notify(f"{event.name} waits for your permission in another chat.", markup=False)
        if isinstance(event, ReplyEnd):
            if event.error and reply.chat != self._view.chat.id:
                show_error(self._node, ClientError(event.error.partition("\n")[0]))
            await self._finish(reply)

    async def _fail(self, reply: ReplyProgress, error: ClientError) -> None:
        self._running.fail(reply, error)
        is_reported = reply.message is None and reply.chat == self._view.chat.id  # shown below the question
        if not is_reported and (self._has_model() or not isinstance(error, NotLoaded)):
            show_error(self._node, error)
        await self._finish(reply)

    async def _show(self, reply: ReplyProgress, event: ReplyEvent) -> None:
        if isinstance(event, ReplyStarted) and reply.message is not None:
            self._view.chat.put(reply.message)
        await self._view.live.show(reply, event)
        self._view.composer.status.count_reply(reply.tokens)
        self._view.show_activity(reply.activity)

    async def _finish(self, reply: ReplyProgress) -> None:
        """Process the end of a reply."""
        view, message = self._view, reply.message
        self._running.remove(reply)
        view.show_failure(reply.chat, reply.to)
        if reply.seconds > LONG_REPLY:
            self._node.post_message(self.LongReplyEnded(reply.chat))
        if message is not None and message.text and message.finish is not Finish.FAILED:
            self._node.run_worker(self._name_chat(reply.chat), group=f"title of {reply.chat}", exclusive=True)
        if reply.chat == view.chat.id:
            view.post_shown()
            if message is not None:
                view.chat.branches.put(message)
                view.transcript.update_message(message)
            self._ended(message)

    async def _name_chat(self, chat: ChatId) -> None:
        """Give the chat a title after a reply. Errors are ignored, because the next reply tries again."""
        with suppress(ClientError):
            title = await self._client.chats.title(chat)
            if chat == self._view.chat.id:
                self._view.chat.rename(title)
            self._node.post_message(ChatView.Shown(self._view.chat))

    def answer(self, call: CallId, permission: Permission) -> None:
        """Answer the question whether a tool call may run."""
        self._client.tools.answer(call, permission)
        if (reply := self._view.current_reply) is not None:
            self._view.live.show_answer(reply, call)
        self._view.composer.area.focus()

    # --- stopping

    async def stop(self, reply: ReplyProgress) -> None:
        """Stop a reply. It ends with its usage, or at once if it has not started."""
        await self._stopper.stop(reply)
        self._show_stopping()

    async def stop_all(self) -> None:
        """Stop the replies of all chats."""
        await self._stopper.stop_all()
        self._show_stopping()

    def _show_stopping(self) -> None:
        if (reply := self._view.current_reply) is not None and reply.stopping:
            self._view.show_activity("stopping")

    def drop(self, chat: ChatId) -> None:
        """Stop the reply of a deleted chat, without showing its end."""
        if (reply := self._running.in_chat(chat)) is not None:
            self._running.remove(reply)

    async def running_titles(self) -> Sequence[str]:
        """Return the titles of the chats in which a reply is being generated. Raises ClientError."""
        if not self._running.chats:
            return []
        names = {one.id: one.name for one in await self._client.chats.summaries()}
        return [names.get(chat, NEW_CHAT) for chat in self._running.chats]
