"""The open chat as a widget: hands what the user does to the part that does it, and knows which keys work now.

The path of a message: `Outbox.submit` stores and shows it, `ReplyFeed.ask` requests the reply, `ReplyFeed.take` applies
the reply's events, and `Outbox.go_on` sends the next queued message. `ChatView` shows all of it.
"""

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import TextArea
from textual.worker import Worker

from tui.attachment_sizes import AttachmentSizes
from tui.client import Client
from tui.drafts import Prompt
from tui.footer_keys import key_name
from tui.open_chat import OpenChat
from tui.reply_progress import ReplyProgress
from tui.running_replies import RunningReplies
from tui.types import ChatId, ChatSettings, Message, MessageId, Permission, Role
from tui.widgets.attached_file import AttachedFile
from tui.widgets.chat_view import ChatView
from tui.widgets.context_room import ContextRoom
from tui.widgets.escape_key import EscapeKey
from tui.widgets.message_view import MessageView
from tui.widgets.new_text_mark import END_KEY
from tui.widgets.outbox import Outbox
from tui.widgets.prompt_area import PromptArea
from tui.widgets.reply_feed import ReplyFeed
from tui.widgets.tool_call import ALLOW_KEY, CHOOSE_KEY, PermissionAsk
from tui.widgets.welcome import Welcome


class Conversation(Vertical):
    """The transcript and the composer of the open chat."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(ALLOW_KEY, "allow_call", "Allow once", show=False, priority=True),
        Binding(CHOOSE_KEY, "choose_answer", "Choose", show=False, priority=True),
        Binding("ctrl+o", "unfold_last", "Details", show=False),
        Binding("ctrl+home", "show_start", "Start of the chat", show=False),
        Binding(END_KEY, "show_end", "End of the chat", show=False),
    ]

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.model = ""  # the loaded model; empty until one is loaded
        self.welcome = Welcome()
        self._sizes = AttachmentSizes(client.replies)
        self._replies = RunningReplies(
            client.replies, self._stream, lambda *came: self.post_message(ReplyFeed.Came(*came))
        )
        self._view = ChatView(self, client, self._sizes, self._replies, lambda: self._activity)
        self.transcript, self.composer = self._view.transcript, self._view.composer
        self._room = ContextRoom(self, client, self._view)
        self._feed = ReplyFeed(self, client, self._view, self._replies, lambda: bool(self.model), self._go_on)
        self.outbox = Outbox(self, client, self._view, self._room, self._feed)
        self._escape = EscapeKey(self._view, self.action_edit_last)

    def _stream(self, stream: Callable[[], Coroutine[None, None, None]]) -> Worker[None]:
        return self.run_worker(stream, group="reply", description="reply")

    def compose(self) -> ComposeResult:
        yield self.transcript
        yield self.transcript.mark
        yield self.welcome
        yield self.composer

    async def on_mount(self) -> None:
        await self._view.show(self.chat, None)

    # --- the open chat

    @property
    def chat(self) -> OpenChat:
        return self._view.chat

    @property
    def current_reply(self) -> ReplyProgress | None:
        """The reply that is being generated in the open chat, or None."""
        return self._view.current_reply

    @property
    def shows_why_no_reply(self) -> bool:
        """Whether the error of a model that cannot be loaded is, or soon will be, below the last message."""
        last = next(reversed(self.chat.path()), None)
        return self.current_reply is not None or (last is not None and bool(last.error))

    @property
    def running_chats(self) -> Collection[ChatId]:
        """The chats in which a reply is being generated."""
        return self._replies.chats

    @property
    def _activity(self) -> str:
        return self._room.activity if self.current_reply is None else self.current_reply.activity

    async def open(self, chat: ChatId, at: MessageId | None = None) -> None:
        """Open a chat, and show the end of its branch or the message `at`. A message sent meanwhile goes to it."""
        await self._view.open(chat, at)
        self.outbox.send_next()

    async def open_new(self, *, private: bool = False) -> None:
        """Open a new chat with the settings of new chats. A message sent meanwhile goes to it."""
        await self._view.open_new(private=private)
        self.outbox.send_next()

    async def leave_deleted(self, chat: ChatId) -> None:
        """Stop the reply of a deleted chat. If the chat is open, open a new one."""
        self._feed.drop(chat)
        if chat == self.chat.id:
            await self.open_new()

    async def merge_other_windows(self) -> None:
        """Show the messages that another window has stored in the open chat, unless one is being sent here."""
        if not self.outbox.is_busy:
            await self._view.merge_other_windows()

    async def configure(self, chat: OpenChat, settings: ChatSettings) -> None:
        """Change the settings of a chat. The user may have left it since the dialog was opened."""
        await self._view.configure(chat, settings)

    def use_model(self, model: str) -> None:
        """Use a loaded model from now on; "" if none is loaded."""
        if model != self.model:
            self.model = model
            self._sizes.forget()
            self.composer.attached.count()
            for file in self.query(AttachedFile):
                file.count()

    # --- messages and replies

    @on(ReplyFeed.Came)
    async def take(self, came: ReplyFeed.Came) -> None:
        await self._feed.take(came)

    def _go_on(self, reply: Message | None) -> None:
        self.outbox.go_on(reply)

    async def stop_all(self) -> None:
        """Stop the replies of all chats."""
        await self._feed.stop_all()

    async def running_titles(self) -> Sequence[str]:
        """Return the titles of the chats in which a reply is being generated. Raises ClientError."""
        return await self._feed.running_titles()

    @on(PermissionAsk.Answered)
    def answer(self, answered: PermissionAsk.Answered) -> None:
        self._feed.answer(answered.call, answered.permission)

    def action_allow_call(self) -> None:
        """Allow the call of the open chat that waits for permission, once."""
        if (reply := self.current_reply) is not None and (called := reply.asking) is not None:
            self._feed.answer(called.call, Permission.ONCE)

    def action_choose_answer(self) -> None:
        """Focus the question about a call, from a prompt with text."""
        self._view.live.choose_answer()

    @work(group="trim", exclusive=True)
    async def action_trim_context(self) -> None:
        """Open the dialog that trims the context (command /room)."""
        await self._room.trim()

    # --- keys

    @property
    def is_interruptible(self) -> bool:
        """Whether there is a reply or a summary that `action_stop` can stop, or a message being edited."""
        return self._is_replying or self.composer.edited is not None

    @property
    def _is_replying(self) -> bool:
        return self.current_reply is not None or self._room.is_trimming

    @property
    def keys_of_the_moment(self) -> Mapping[str, str]:
        """Return the actions of Escape and Enter, for the footer. Empty if the frame of the prompt has the keys."""
        focused, edited = self.screen.focused, self.composer.edited
        if focused is not None and any(isinstance(one, MessageView) for one in focused.ancestors_with_self):
            return {"escape": "Stop" if self._is_replying else "Back"}
        if not self.composer.area.has_focus or self.composer.menu.is_open:
            return {}
        if self._is_replying:
            return {"escape": "Stop", "enter": "Queue"}
        if edited is None:
            return {}
        return {"escape": "Cancel edit", "enter": "Send as branch" if edited.role is Role.USER else "Save as branch"}

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        reply = self.current_reply
        return action not in ("allow_call", "choose_answer") or (reply is not None and reply.asking is not None)

    async def action_stop(self) -> None:
        """Stop the reply or the summary. If there is none, end editing."""
        if (reply := self.current_reply) is not None:
            self._escape.has_just_stopped = True
            await self._feed.stop(reply)
        elif not self._room.stop():
            self._escape.press()

    @on(TextArea.Changed)
    def yield_to_typing(self, event: TextArea.Changed) -> None:
        """Draw typed text before the reply, because the user waits for it."""
        event.stop()
        self._escape.has_just_stopped = False
        if self.current_reply is not None:
            self._view.live.yield_to_typing(self.current_reply)

    @on(PromptArea.PageAsked)
    def page(self, asked: PromptArea.PageAsked) -> None:
        scroll = self.transcript.scroll_page_up if asked.step < 0 else self.transcript.scroll_page_down
        scroll(animate=False)

    async def action_show_start(self) -> None:
        """Show the first message of the chat."""
        await self.transcript.show_start()

    async def action_show_end(self) -> None:
        """Show the end of the chat, with the question of a running tool call."""
        is_mounted_again = await self.transcript.show_end()
        if is_mounted_again and (reply := self.current_reply) is not None:
            await self._view.live.show_calls(reply)

    # --- actions on a message

    @property
    def _focused(self) -> Message | None:
        """The message that has the focus, to which commands apply."""
        return self.screen.focused.message if isinstance(self.screen.focused, MessageView) else None

    def _is_busy(self) -> bool:
        """Return whether a running reply prevents the action. If so, notify the user."""
        if is_busy := self.outbox.is_busy:
            self.app.notify(f"Still replying. Press {key_name('escape')} to stop.", markup=False)
        return is_busy

    def notify_empty(self) -> None:
        """Notify the user that a command does nothing, because the chat has no messages."""
        self.app.notify("This chat is empty.", markup=False)

    def _notify_nothing_to_copy(self) -> None:
        self.app.notify("Nothing to copy: there is no reply with text.", markup=False)

    def action_edit_last(self) -> None:
        if (message := self._focused or self.chat.last_of(Role.USER)) is not None:
            self.post_message(MessageView.EditAsked(message))
        else:
            self.notify_empty()

    @on(MessageView.EditAsked)
    def edit(self, event: MessageView.EditAsked) -> None:
        """Edit a message. The original is kept as a branch."""
        message = event.message
        if not self._is_busy() and self.chat.shows(message.id):  # another chat may have been opened since the request
            self.composer.edit(message, Prompt(message.text, message.attachments))

    def action_regenerate(self) -> None:
        if (message := self._focused or next(reversed(self.chat.path()), None)) is not None:
            self.post_message(MessageView.RegenerateAsked(message))
        else:
            self.notify_empty()

    @on(MessageView.RegenerateAsked)
    def regenerate(self, event: MessageView.RegenerateAsked) -> None:
        """Generate another reply as a sibling of the existing one."""
        message = event.message
        to = message.id if message.role is Role.USER else message.parent
        if self.chat.shows(message.id) and to is not None and not self._is_busy():
            self.composer.area.focus()  # the message that had the focus is replaced
            self.outbox.ask_again(to)

    def action_copy_last(self) -> None:
        if (message := self.chat.last_of(Role.ASSISTANT)) is not None:
            self.post_message(MessageView.CopyAsked(message))
        elif self.chat.path():
            self._notify_nothing_to_copy()
        else:
            self.notify_empty()

    @on(MessageView.CopyAsked)
    def copy(self, event: MessageView.CopyAsked) -> None:
        if text := event.message.full_text:
            self.app.copy_to_clipboard(text)
        else:
            self._notify_nothing_to_copy()

    def action_unfold_last(self) -> None:
        """Show or hide the details of the last message."""
        if views := list(self.transcript.query(MessageView)):
            views[-1].action_unfold()

    @on(MessageView.BranchAsked)
    async def step_branch(self, event: MessageView.BranchAsked) -> None:
        message = event.message.id
        if self.chat.shows(message) and (found := self.chat.neighbor_branch(message, event.step)) is not None:
            await self.show_branch(*found)

    async def show_branch(self, leaf: MessageId, at: MessageId) -> None:
        """Show another branch of the open chat, at the message `at`, unless a reply is running."""
        if not self._is_busy():
            await self._view.show_branch(leaf, at)

    @on(MessageView.NeighborAsked)
    def focus_neighbor(self, event: MessageView.NeighborAsked) -> None:
        if not self.transcript.focus_beside(event.message.id, event.step) and event.step > 0:
            self.composer.area.focus()
