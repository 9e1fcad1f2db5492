"""The messages of the user from the prompt to the request for a reply: queued, stored, shown, and asked again."""

from contextlib import suppress

from textual.widget import Widget

from tui.client import Client, ClientError
from tui.drafts import Prompt
from tui.open_chat import OpenChat
from tui.show_errors import show_errors
from tui.types import Finish, Message, MessageId, Role
from tui.widgets.chat_view import ChatView
from tui.widgets.context_room import ContextRoom
from tui.widgets.reply_feed import ReplyFeed


class Outbox:
    """Sends one message at a time to the open chat, and queues those that the user sends meanwhile."""

    def __init__(self, node: Widget, client: Client, view: ChatView, room: ContextRoom, feed: ReplyFeed) -> None:
        self._client = client
        self._node = node
        self._view = view
        self._composer = view.composer
        self._room = room
        self._feed = feed
        self._asking_again = False

    @property
    def is_busy(self) -> bool:
        """Whether a message or reply is in progress in the open chat, or another chat is being opened."""
        is_under_way = self._view.current_reply is not None or self._composer.sending is not None or self._asking_again
        return is_under_way or self._composer.is_leaving

    def submit(self, prompt: Prompt) -> None:
        """Send a message now, or queue it after the current reply."""
        if self.is_busy:
            self._composer.queue(prompt)
        else:
            self.send(prompt)

    def send(self, prompt: Prompt) -> None:
        """Send a message now."""
        self._composer.sending = prompt
        self._composer.pause_queue(is_paused=False)
        self._node.run_worker(self._deliver(prompt), group="send", description="send")

    def send_next(self) -> None:
        """Send the next queued message, unless another one is in progress or being edited."""
        if (
            not self.is_busy
            and self._composer.edited is None
            and (waiting := self._composer.next_in_queue()) is not None
        ):
            self.send(waiting)

    def go_on(self, reply: Message | None) -> None:
        """Continue after the reply of the open chat. If it failed or was stopped, the user decides about the queue."""
        if reply is None or reply.finish in (Finish.FAILED, Finish.STOPPED):
            self._composer.pause_queue(is_paused=True)
        else:
            self.send_next()
        self._composer.measure()

    async def _deliver(self, prompt: Prompt) -> None:
        """Store a message, show it, and request a reply. If the message cannot be sent, put it back into the prompt."""
        chat, edited = self._view.chat, self._composer.take_edited()
        message: Message | None = None
        with show_errors(self._node):
            message = await self._store(chat, prompt, edited)
        if message is not None:
            await self._show(chat, message)
            if message.role is Role.USER and chat.id is not None:
                self._feed.ask(chat.id, message.id)
            await self._composer.sent(chat)
        elif edited is not None and chat is self._view.chat:
            self._composer.sending = None
            self._composer.edit(edited, prompt)
        else:
            await self._composer.restore_unsent(chat, prompt)

    async def _store(self, chat: OpenChat, prompt: Prompt, edited: Message | None) -> Message | None:
        """Store the message and return it, or None if the user decided not to send it."""
        chats = self._client.chats
        if chat.id is None:
            # before the chat is created: a message that cannot fit creates no chat
            await self._room.ensure(chat, None, prompt.all_text)
            chat.summary = (await chats.create(chat.settings, private=chat.private)).summary
            await self._composer.drafts.clear_new(chat)
            self._view.post_shown()
            name = chat.summary.id
        else:
            name = chat.id
        if edited is not None and edited.role is Role.ASSISTANT:
            return await chats.rewrite(name, edited.id, prompt.text)
        parent = chat.leaf if edited is None else edited.parent
        if not await self._room.ensure(chat, parent, prompt.all_text):
            return None
        return await chats.add(name, parent, prompt.text, prompt.attachments)

    async def _show(self, chat: OpenChat, message: Message) -> None:
        """Show a new message, unless the user has opened another chat."""
        if chat is self._view.chat:
            await self._view.transcript.truncate_after(message.parent)
            chat.put(message)
        if chat is self._view.chat:
            await self._view.transcript.append(message)

    def ask_again(self, to: MessageId) -> None:
        """Request another reply to a message, as a sibling of the existing ones."""
        self._asking_again = True
        self._composer.pause_queue(is_paused=False)
        self._node.run_worker(self._ask_again(to), group="send", description="send")

    async def _ask_again(self, to: MessageId) -> None:
        chat, has_room = self._view.chat, True
        self._view.show_activity("waiting for the model")  # if the engine has stopped, it restarts now
        with suppress(ClientError):  # the request fails for the same reason, and shows it below the message
            has_room = await self._room.ensure(chat, to, "")
        self._asking_again = False
        self._view.show_activity("")
        if chat is self._view.chat and has_room:
            await self._view.transcript.truncate_after(to)
            chat.leaf = to
            self._composer.measure()  # the replaced reply is not sent
        if chat.id is not None and has_room:
            self._feed.ask(chat.id, to)
        else:
            self._composer.pause_queue(is_paused=True)
