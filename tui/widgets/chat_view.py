"""The open chat on the screen: opens chats, shows their branches, and adds the messages of other windows."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from textual.message import Message as Posted
from textual.widget import Widget

from tui.attachment_sizes import AttachmentSizes
from tui.client import Client, ClientError
from tui.drafts import Prompt
from tui.footer_keys import key_name
from tui.open_chat import OpenChat, name_preset, settings_of_new_chats
from tui.reply_progress import ReplyProgress
from tui.running_replies import RunningReplies
from tui.show_errors import show_errors
from tui.types import Chat, ChatId, ChatSettings, Message, MessageId
from tui.widgets.composer import Composer
from tui.widgets.live_reply import LiveReply
from tui.widgets.transcript import Transcript

_BRIEF = 3.0  # seconds to show a hint; short, because the user continues to type


class ChatView:
    """The state of the open chat, and the widgets that show it. The client stores each change before it is shown."""

    class Shown(Posted):
        """Another chat is open, or the open chat was renamed."""

        def __init__(self, chat: OpenChat) -> None:
            super().__init__()
            self.chat = chat

    class Activity(Posted):
        """The activity of the open chat's reply has changed; empty if there is no reply."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(
        self, node: Widget, client: Client, sizes: AttachmentSizes, running: RunningReplies, activity: Callable[[], str]
    ) -> None:
        """Create the widgets. `node` will contain them. `activity` returns the activity of the open chat, or ""."""
        self._node = node
        self._chats = client.chats
        self._running = running
        self._find_activity = activity
        self.transcript = Transcript(sizes)
        self.composer = Composer(client, sizes)
        self.live = LiveReply(self.transcript, self.composer)
        self.chat = OpenChat()
        self._activity = ""  # the text of the last Activity message
        self._switching = asyncio.Lock()  # held while a chat is opened: only one at a time

    @property
    def current_reply(self) -> ReplyProgress | None:
        """The reply that is being generated in the open chat, or None."""
        return self._running.in_chat(self.chat.id)

    # --- opening a chat

    async def open(self, chat: ChatId, at: MessageId | None = None) -> None:
        """Open a chat, and show the end of its branch or the message `at`."""
        async with self._leaving() as left:
            found = await self._chats.open(chat)
            opened = OpenChat.of(found)
            for question, why in self._running.unanswered(chat).items():
                opened.set_failure(question, why)
            running = self._running.in_chat(chat)
            if running is not None and (message := running.snapshot()) is not None:
                opened.put(message)
            if at is not None:
                opened.leaf = opened.branches.newest_leaf(at)
            await self._save_left_draft(left)
            await self.show(opened, at)
            if running is not None:
                await self.live.show_calls(running)
            self.composer.show_draft(self.composer.drafts.with_files(chat, found.draft))

    async def open_new(self, *, private: bool = False) -> None:
        """Open a new chat with the settings of new chats."""
        async with self._leaving() as left:
            settings = await settings_of_new_chats(self._chats)
            if await self._save_left_draft(left):
                self._node.app.notify("Draft saved to the chat list.", timeout=_BRIEF, markup=False)
            await self.show(OpenChat(settings=settings, private=private), None)
            self.composer.show_draft(Prompt())

    @asynccontextmanager
    async def _leaving(self) -> AsyncGenerator[Prompt, None]:
        """Leave the open chat, and yield its draft. The body opens another chat.

        If the body fails, show the error and stay in the chat.
        """
        async with self._switching:
            left = await self.composer.leave()
            with show_errors(self._node):
                yield left
            if self.composer.is_leaving:
                self.composer.show_draft(left)
                self.composer.take_back_queue()

    async def _save_left_draft(self, left: Prompt) -> bool:
        """When the user leaves a new chat, save its draft as a chat in the list. Returns whether it had one."""
        if self.chat.id is None and left != Prompt():
            await self.composer.drafts.save_as_chat(self.chat, left)
            return True
        return False

    async def configure(self, chat: OpenChat, settings: ChatSettings) -> None:
        """Change the settings of a chat. The user may have left it since the dialog was opened."""
        with show_errors(self._node):
            if chat.id is not None:
                await self._chats.configure(chat.id, settings)
            chat.settings = settings
            self.composer.show_settings()
            await self._show_preset()

    # --- showing it

    async def show(self, chat: OpenChat, at: MessageId | None) -> None:
        """Show the current branch of a chat, which becomes the open one, at its end or at the message `at`."""
        self.chat = chat
        self._node.set_class(chat.id is None, "empty")
        await self.transcript.show(chat.path(), chat.branches.siblings, left_out=chat.left_out, at=at)
        self.composer.switch_chat(chat)
        self.post_shown()
        await self._show_preset()

    async def _show_preset(self) -> None:
        """Show the name of the preset that has the settings of the open chat."""
        self.composer.status.preset = ""
        if self.chat.settings != ChatSettings():
            with suppress(ClientError):  # the settings dialog, which lists the presets, reports it
                self.composer.status.preset = name_preset(await self._chats.presets(), self.chat.settings)

    async def show_branch(self, leaf: MessageId, at: MessageId) -> None:
        """Show another branch of the open chat. The engine may still have it in its cache."""
        chat = self.chat
        if chat.id is None:
            return
        with show_errors(self._node):
            await self._chats.show_branch(chat.id, leaf)
            chat.leaf = leaf
            if chat is self.chat:
                await self.show(chat, at)

    async def show_trimmed(self, changed: Chat) -> None:
        """Show which messages of a chat are no longer sent to the model."""
        if self.chat.id == changed.summary.id:
            self.chat.leave_out(changed)
            await self.show(self.chat, None)

    def show_failure(self, chat: ChatId, to: MessageId) -> None:
        """Show the reason why a message has no reply, or remove it."""
        if chat == self.chat.id and to in self.chat.branches:
            why = self._running.unanswered(chat).get(to, "")
            self.transcript.update_message(self.chat.set_failure(to, why))

    def post_shown(self) -> None:
        """Notify the screen that the open chat, its title, or its activity may have changed."""
        self._node.set_class(self.chat.id is None, "empty")
        self._node.post_message(self.Shown(self.chat))
        self.show_activity(self._find_activity())

    def show_activity(self, text: str) -> None:
        """Show the activity of the open chat below its last message, and notify the screen."""
        self.transcript.status.follow(self.current_reply, text)
        if text != self._activity:
            self._activity = text
            self._node.post_message(self.Activity(text))

    # --- other windows

    async def merge_other_windows(self) -> None:
        """Add messages that another window has stored in the open chat. Those after the shown branch are shown."""
        chat = self.chat
        if chat.id is None:
            return
        with suppress(ClientError):  # the next action of the user reports the error
            found = await self._chats.open(chat.id)
            if chat is self.chat and self.current_reply is None:
                new = {message.id for message in found.messages if message.id not in chat.branches}
                await self._show_merged(chat, chat.merge(found.messages))
                if chat is self.chat and not all(map(chat.shows, new)):
                    keys = f"{key_name('ctrl+t')} shows its branches."
                    self._node.app.notify(f"This chat was continued in another window. {keys}", markup=False)

    async def _show_merged(self, chat: OpenChat, changed: Sequence[Message]) -> None:
        ids = {message.id for message in changed}
        for message in chat.path():
            if message.id in ids:
                await self.transcript.replace_message(message)
            else:
                self.transcript.update_message(message)  # shows new numbers of branches
        end = None if chat.leaf is None else chat.branches.newest_leaf(chat.leaf)
        for message in chat.branches.path(end):
            if message.id in ids and chat is self.chat and message.parent == chat.leaf:
                chat.leaf = message.id
                await self.transcript.append(message)
        if chat is self.chat and changed:
            self.composer.measure()
