"""The open chat: messages, prompt, replies, edits, and branches.

Workers that read replies only post events; the handlers in this module change the state. The client stores every change
before it is shown.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message as Posted
from textual.widgets import TextArea
from textual.worker import Worker

from tui.attachment_sizes import AttachmentSizes
from tui.client import Client, ClientError, NotLoaded
from tui.double_press import DoublePress
from tui.drafts import Prompt
from tui.footer_keys import key_name
from tui.open_chat import OpenChat, settings_of_new_chats
from tui.reply_progress import ReplyProgress
from tui.reply_stopper import ReplyStopper
from tui.running_replies import RunningReplies
from tui.screens.full_context import FullContextScreen
from tui.show_errors import show_error, show_errors
from tui.trimming import ContextTrimmer
from tui.types import (
    NEW_CHAT,
    CallId,
    Chat,
    ChatId,
    ChatSettings,
    ContextBudget,
    EngineRestarting,
    Finish,
    Message,
    MessageId,
    Permission,
    ReplyEnd,
    ReplyEvent,
    ReplyStarted,
    Role,
    ToolCalled,
    TrimPlan,
)
from tui.widgets.attached_file import AttachedFile
from tui.widgets.composer import Composer
from tui.widgets.live_reply import LiveReply
from tui.widgets.message_view import MessageView
from tui.widgets.prompt_area import PromptArea
from tui.widgets.tool_call import ALLOW_KEY, CHOOSE_KEY, PermissionAsk
from tui.widgets.transcript import Transcript
from tui.widgets.welcome import Welcome

_TWICE = 1.0  # maximum seconds between two presses of Escape
LONG_REPLY = 20.0  # seconds; after a longer reply, the terminal bell rings if another window has the focus
_COUNTED = 64  # number of tokens of a reply after which the shown context is updated
_BRIEF = 3.0  # seconds to show a hint; short, because the user continues to type


class Conversation(Vertical):
    """The transcript and the composer of the open chat."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(ALLOW_KEY, "allow_call", "Allow once", show=False, priority=True),
        Binding(CHOOSE_KEY, "choose_answer", "Choose", show=False, priority=True),
        Binding("ctrl+o", "unfold_last", "Details", show=False),
    ]

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

    class LongReplyEnded(Posted):
        """A reply ended that took longer than LONG_REPLY."""

        def __init__(self, chat: ChatId) -> None:
            super().__init__()
            self.chat = chat

    class ModelWanted(Posted):
        """The user requested a reply, but no model is loaded, or its engine has exited."""

    class ReplyCame(Posted, bubble=False):
        """An event of a reply, or the error that ended it. Posted by the worker that reads the reply."""

        def __init__(self, reply: ReplyProgress, event: ReplyEvent | ClientError) -> None:
            super().__init__()
            self.reply = reply
            self.event = event

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self._sizes = AttachmentSizes(client.replies)
        self.transcript = Transcript(self._sizes)
        self.welcome = Welcome()
        self.composer = Composer(client, self._sizes)
        self.model = ""  # the loaded model; empty until one is loaded
        self.chat = OpenChat()
        self._activity = ""  # the text of the last Activity message
        self._replies = RunningReplies(
            client.replies, self._stream, lambda *came: self.post_message(self.ReplyCame(*came))
        )
        self._stopper = ReplyStopper(
            client.replies, self._replies, self._run_stop, self._finish_reply, partial(show_error, self)
        )
        self._live = LiveReply(self.transcript, self.composer)
        self._trimmer = ContextTrimmer(client.context, self._choose_trim, self._show_trimmed, self._post_trimming)
        self._asking_again = False
        self._editing: Message | None = None
        self._switching = asyncio.Lock()  # held while a chat is opened: only one at a time
        self._escapes = DoublePress(_TWICE)
        self._has_just_stopped = False  # whether Escape stopped a reply, and nothing was typed since

    def _stream(self, stream: Callable[[], Coroutine[None, None, None]]) -> Worker[None]:
        return self.run_worker(stream, group="reply", description="reply")

    def _run_stop(self, stop: Callable[[], Coroutine[None, None, None]]) -> Worker[None]:
        return self.run_worker(stop, group="stop", description="stop")

    def compose(self) -> ComposeResult:
        yield self.transcript
        yield self.welcome
        yield self.composer

    async def on_mount(self) -> None:
        await self._show(self.chat, None)

    @property
    def current_reply(self) -> ReplyProgress | None:
        """The reply that is being generated in the open chat, or None."""
        return self._replies.in_chat(self.chat.id)

    @property
    def is_interruptible(self) -> bool:
        """Whether there is a reply or a summary that `action_stop` can stop, or a message being edited."""
        return self.current_reply is not None or self._trimmer.is_trimming(self.chat.id) or self._editing is not None

    @property
    def keys_of_the_moment(self) -> Mapping[str, str]:
        """Return the actions of Escape and Enter, for the footer. Empty if the frame of the prompt has the keys."""
        is_replying = self.current_reply is not None or self._trimmer.is_trimming(self.chat.id)
        focused = self.screen.focused
        if focused is not None and any(isinstance(one, MessageView) for one in focused.ancestors_with_self):
            return {"escape": "Stop" if is_replying else "Back"}
        if not self.composer.area.has_focus or self.composer.menu.is_open:
            return {}
        if is_replying:
            return {"escape": "Stop", "enter": "Queue"}
        if self._editing is None:
            return {}
        saves = "Send as branch" if self._editing.role is Role.USER else "Save as branch"
        return {"escape": "Cancel edit", "enter": saves}

    @property
    def running_chats(self) -> Collection[ChatId]:
        """The chats in which a reply is being generated."""
        return self._replies.chats

    def use_model(self, model: str) -> None:
        """Use a loaded model from now on; "" if none is loaded."""
        if model != self.model:
            self.model = model
            self._sizes.forget()
            self.composer.count_attached()
            for file in self.query(AttachedFile):
                file.count()

    # --- the open chat

    async def open(self, chat: ChatId, at: MessageId | None = None) -> None:
        """Open a chat, and show the end of its branch or the message `at`."""
        async with self._leaving() as left:
            found = await self._client.chats.open(chat)
            opened = OpenChat.of(found)
            for question, why in self._replies.unanswered(chat).items():
                opened.set_failure(question, why)
            running = self._replies.in_chat(chat)
            if running is not None and (message := running.snapshot()) is not None:
                opened.put(message)
            if at is not None:
                opened.leaf = opened.branches.newest_leaf(at)
            await self._save_left_draft(left)
            await self._show(opened, at)
            if running is not None:
                await self._live.show_calls(running)
            self.composer.show_draft(self.composer.drafts.with_files(chat, found.draft))

    async def open_new(self, *, private: bool = False) -> None:
        """Open a new chat with the settings of new chats."""
        async with self._leaving() as left:
            settings = await settings_of_new_chats(self._client.chats)
            if await self._save_left_draft(left):
                self.app.notify("Draft saved to the chat list.", timeout=_BRIEF, markup=False)
            await self._show(OpenChat(settings=settings, private=private), None)
            self.composer.show_draft(Prompt())

    async def _save_left_draft(self, left: Prompt) -> bool:
        """When the user leaves a new chat, save its draft as a chat in the list. Returns whether it had one."""
        if self.chat.id is None and left != Prompt():
            await self.composer.drafts.save_as_chat(self.chat, left)
            return True
        return False

    async def merge_other_windows(self) -> None:
        """Add messages that another window has stored in the open chat. Those after the shown branch are shown."""
        chat = self.chat
        if chat.id is None or self._is_sending:
            return
        with suppress(ClientError):  # the next action of the user reports the error
            found = await self._client.chats.open(chat.id)
            if chat is self.chat and self.current_reply is None:
                known, changed = len(chat.branches), chat.merge(found.messages)
                await self._show_merged(chat, changed, is_longer=len(chat.branches) > known)

    async def _show_merged(self, chat: OpenChat, changed: Sequence[Message], *, is_longer: bool) -> None:
        for message in chat.path():  # also shows new numbers of branches
            self.transcript.update_message(message)
        ids = {message.id for message in changed}
        end = None if chat.leaf is None else chat.branches.newest_leaf(chat.leaf)
        for message in chat.branches.path(end):
            if message.id in ids and chat is self.chat and message.parent == chat.leaf:
                chat.leaf = message.id
                await self.transcript.append(message)
        if is_longer and chat is self.chat:
            self.app.notify(
                f"This chat was continued in another window. {key_name('ctrl+t')} shows its branches.", markup=False
            )
            self.composer.measure()

    async def leave_deleted(self, chat: ChatId) -> None:
        """Stop the reply of a deleted chat. If the chat is open, open a new one."""
        if (reply := self._replies.in_chat(chat)) is not None:
            self._replies.remove(reply)
        if chat == self.chat.id:
            await self.open_new()

    async def configure(self, chat: OpenChat, settings: ChatSettings) -> None:
        """Change the settings of a chat. The user may have left it since the dialog was opened."""
        with show_errors(self):
            if chat.id is not None:
                await self._client.chats.configure(chat.id, settings)
            chat.settings = settings
            self.composer.show_settings()

    @asynccontextmanager
    async def _leaving(self) -> AsyncGenerator[Prompt, None]:
        """Leave the open chat, and yield its draft. The body opens another chat.

        If the body fails, show the error and stay in the chat. A message sent meanwhile goes to the chat that is open
        afterwards.
        """
        async with self._switching:
            self._editing = None
            left = await self.composer.leave()
            with show_errors(self):
                yield left
            if self.composer.is_leaving:
                self.composer.show_draft(left)
                self.composer.take_back_queue()
            if not self._is_sending and (waiting := self.composer.next_in_queue()) is not None:
                self.send(waiting)

    async def _show(self, chat: OpenChat, at: MessageId | None) -> None:
        self.chat = chat
        self.set_class(chat.id is None, "empty")
        await self.transcript.show(chat.path(), chat.branches.siblings, left_out=chat.left_out, at=at)
        self.composer.switch_chat(chat)
        self._post_shown()

    def _post_shown(self) -> None:
        self.set_class(self.chat.id is None, "empty")
        self.post_message(self.Shown(self.chat))
        self._post_activity(self.current_reply.activity if self.current_reply else self._trimmer.activity(self.chat.id))

    def _post_activity(self, text: str) -> None:
        self.transcript.status.follow(self.current_reply, text)
        if text != self._activity:
            self._activity = text
            self.post_message(self.Activity(text))

    def _post_trimming(self, chat: ChatId) -> None:
        if chat == self.chat.id:
            self.composer.show_held(is_held=self._trimmer.is_trimming(chat))
            self._post_activity(self._trimmer.activity(chat))
            self.refresh_bindings()

    # --- sending

    def submit(self, prompt: Prompt) -> None:
        """Send a message now, or queue it after the current reply."""
        if self._is_sending:
            self.composer.queue(prompt)
        else:
            self.send(prompt)

    @property
    def _is_sending(self) -> bool:
        """Whether a message or reply is in progress in the open chat, or another chat is being opened."""
        is_under_way = self.current_reply is not None or self.composer.sending is not None or self._asking_again
        return is_under_way or self.composer.is_leaving

    def send(self, prompt: Prompt) -> None:
        """Send a message now."""
        self.composer.sending = prompt
        self.deliver(prompt)

    @work(group="send", description="send")
    async def deliver(self, prompt: Prompt) -> None:
        """Store a message, show it, and request a reply. If the message cannot be sent, put it back into the prompt."""
        chat, edited = self.chat, self._editing
        self._editing = None
        self.refresh_bindings()
        message: Message | None = None
        with show_errors(self):
            message = await self._store(chat, prompt, edited)
        if message is not None:
            await self._follow(chat, message)
            await self.composer.sent(chat)
        elif edited is not None and chat is self.chat:
            self.composer.sending = None
            self._begin_editing(edited, prompt)
        else:
            await self.composer.restore_unsent(chat, prompt)

    async def _follow(self, chat: OpenChat, message: Message) -> None:
        """Show a new message and request a reply to it."""
        if chat is self.chat:
            await self.transcript.truncate_after(message.parent)
            chat.put(message)
        if chat is self.chat:  # the user may have opened another chat
            await self.transcript.append(message)
        if message.role is Role.USER and chat.id is not None:
            self.ask(chat.id, message.id)

    async def _store(self, chat: OpenChat, prompt: Prompt, edited: Message | None) -> Message | None:
        """Store the message and return it, or None if the user decided not to send it."""
        chats = self._client.chats
        if chat.id is None:
            # before the chat is created: a message that cannot fit creates no chat
            await self._ensure_room(chat, None, prompt.all_text)
            chat.summary = (await chats.create(chat.settings, private=chat.private)).summary
            await self.composer.drafts.clear_new(chat)
            self._post_shown()
            name = chat.summary.id
        else:
            name = chat.id
        if edited is not None and edited.role is Role.ASSISTANT:
            return await chats.rewrite(name, edited.id, prompt.text)
        parent = chat.leaf if edited is None else edited.parent
        if not await self._ensure_room(chat, parent, prompt.all_text):
            return None
        return await chats.add(name, parent, prompt.text, prompt.attachments)

    def ask(self, chat: ChatId, to: MessageId) -> None:
        """Request a reply to a message, which must be the end of its branch."""
        self._replies.start(chat, to)
        self._show_failure(chat, to)
        if not self.model:
            self.post_message(self.ModelWanted())
        self._post_shown()

    @on(ReplyCame)
    async def take(self, came: ReplyCame) -> None:
        """Apply an event of a reply, and show it if its chat is open."""
        reply, event = came.reply, came.event
        if not self._replies.is_running(reply):
            return
        if isinstance(event, ClientError):
            self._replies.fail(reply, event)
            is_reported = reply.message is None and reply.chat == self.chat.id  # the error is shown below the question
            if not is_reported and (self.model or not isinstance(event, NotLoaded)):
                show_error(self, event)
            await self._finish_reply(reply)
            return
        reply.apply(event)
        if isinstance(event, EngineRestarting):
            self.post_message(self.ModelWanted())
        if reply.chat == self.chat.id:
            if isinstance(event, ReplyStarted) and reply.message is not None:
                self.chat.put(reply.message)
            await self._live.show(reply, event)
            self.composer.status.written = reply.tokens // _COUNTED * _COUNTED
            self._post_activity(reply.activity)
        elif isinstance(event, ToolCalled) and event.asks:
            self.app.notify(f"{event.name} waits for your permission in another chat.", markup=False)
        if isinstance(event, ReplyEnd):
            if event.error and reply.chat != self.chat.id:
                show_error(self, ClientError(event.error.partition("\n")[0]))
            await self._finish_reply(reply)

    def _show_failure(self, chat: ChatId, to: MessageId) -> None:
        """Show the reason why a message has no reply, or remove it."""
        if chat == self.chat.id and to in self.chat.branches:
            self.transcript.update_message(self.chat.set_failure(to, self._replies.unanswered(chat).get(to, "")))

    @on(TextArea.Changed)
    def yield_to_typing(self, event: TextArea.Changed) -> None:
        """Draw typed text before the reply, because the user waits for it."""
        event.stop()
        self._has_just_stopped = False
        if self.current_reply is not None:
            self._live.yield_to_typing(self.current_reply)

    @on(PromptArea.PageAsked)
    def page(self, asked: PromptArea.PageAsked) -> None:
        scroll = self.transcript.scroll_page_up if asked.step < 0 else self.transcript.scroll_page_down
        scroll(animate=False)

    @on(PermissionAsk.Answered)
    def answer(self, answered: PermissionAsk.Answered) -> None:
        self._answer(answered.call, answered.permission)

    def action_allow_call(self) -> None:
        """Allow the call of the open chat that waits for permission, once."""
        if (reply := self.current_reply) is not None and (called := reply.asking) is not None:
            self._answer(called.call, Permission.ONCE)

    def action_choose_answer(self) -> None:
        """Focus the question about a call, from a prompt with text."""
        self._live.choose_answer()

    def _answer(self, call: CallId, permission: Permission) -> None:
        self._client.tools.answer(call, permission)
        if (reply := self.current_reply) is not None:
            self._live.show_answer(reply, call)
        self.composer.area.focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        reply = self.current_reply
        return action not in ("allow_call", "choose_answer") or (reply is not None and reply.asking is not None)

    async def _finish_reply(self, reply: ReplyProgress) -> None:
        """Process the end of a reply. Send the next queued message, unless the reply failed or was stopped."""
        self._replies.remove(reply)
        self._show_failure(reply.chat, reply.to)
        if reply.seconds > LONG_REPLY:
            self.post_message(self.LongReplyEnded(reply.chat))
        message = reply.message
        if message is not None and message.text and message.finish is not Finish.FAILED:
            self.run_worker(self._name_chat(reply.chat), group=f"title of {reply.chat}", exclusive=True)
        if reply.chat != self.chat.id:
            return
        self._post_shown()
        if message is not None:
            self.chat.branches.put(message)
            self.transcript.update_message(message)
        if message is None or message.finish in (Finish.FAILED, Finish.STOPPED):
            self.composer.take_back_queue()
        elif (waiting := self.composer.next_in_queue()) is not None:
            self.send(waiting)
        self.composer.measure()

    async def _name_chat(self, chat: ChatId) -> None:
        """Give the chat a title after a reply. Errors are ignored, because the next reply tries again."""
        with suppress(ClientError):
            title = await self._client.chats.title(chat)
            if chat == self.chat.id:
                self.chat.rename(title)
            self.post_message(self.Shown(self.chat))

    # --- stopping

    async def action_stop(self) -> None:
        """Stop the reply or the summary. If there is none, end editing."""
        reply = self.current_reply
        if reply is None and self._trimmer.stop(self.chat.id):
            return
        if reply is None:
            self._leave_or_edit()
        else:
            self._has_just_stopped = True
            await self._stopper.stop(reply)
            self._post_stopping()

    async def stop_all(self) -> None:
        """Stop the replies of all chats."""
        await self._stopper.stop_all()
        self._post_stopping()

    def _post_stopping(self) -> None:
        if self.current_reply is not None and self.current_reply.stopping:
            self._post_activity("stopping")

    async def running_titles(self) -> Sequence[str]:
        """Return the titles of the chats in which a reply is being generated. Raises ClientError."""
        if not self.running_chats:
            return []
        names = {one.id: one.name for one in await self._client.chats.summaries()}
        return [names.get(chat, NEW_CHAT) for chat in self.running_chats]

    def _leave_or_edit(self) -> None:
        """Handle Escape without a reply: end editing or return to the prompt.

        A second Escape in an empty prompt edits the last message.
        """
        area = self.composer.area
        if self._has_just_stopped:  # another Escape for the stopped reply, which had already ended
            self._has_just_stopped = False
            return
        is_idle = area.has_focus and self._editing is None and self.composer.prompt == Prompt()
        self._end_editing()
        area.focus()
        if is_idle and self._escapes.press():
            area.end_hint()
            self.action_edit_last()
        elif is_idle and self.chat.last_of(Role.USER) is not None:
            area.hint(f"Press {key_name('escape')} again to edit your last message", self._escapes.seconds)

    # --- edits and branches

    @on(MessageView.EditAsked)
    def edit(self, event: MessageView.EditAsked) -> None:
        """Edit a message. The original is kept as a branch."""
        if self._is_busy() or not self._is_shown(event.message):
            return
        self._begin_editing(event.message, Prompt(event.message.text, event.message.attachments))

    def _begin_editing(self, message: Message, prompt: Prompt) -> None:
        self._editing = message
        self.composer.edit(prompt, is_reply=message.role is Role.ASSISTANT)
        self.refresh_bindings()

    def _is_busy(self) -> bool:
        """Return whether a running reply prevents the action. If so, notify the user."""
        if self._is_sending:
            self.app.notify(f"Still replying. Press {key_name('escape')} to stop.", markup=False)
        return self._is_sending

    def _is_shown(self, message: Message) -> bool:
        """Whether the message is on the shown branch. Since the request, another chat may have been opened."""
        return any(one.id == message.id for one in self.chat.path())

    def _end_editing(self) -> None:
        self._editing = None
        self.composer.end_editing()
        self.refresh_bindings()

    @property
    def _focused(self) -> Message | None:
        """The message that has the focus, to which commands apply."""
        return self.screen.focused.message if isinstance(self.screen.focused, MessageView) else None

    def notify_empty(self) -> None:
        """Notify the user that a command does nothing, because the chat has no messages."""
        self.app.notify("This chat is empty.", markup=False)

    def action_edit_last(self) -> None:
        if (message := self._focused or self.chat.last_of(Role.USER)) is not None:
            self.post_message(MessageView.EditAsked(message))
        else:
            self.notify_empty()

    @on(MessageView.RegenerateAsked)
    def regenerate(self, event: MessageView.RegenerateAsked) -> None:
        """Generate another reply as a sibling of the existing one."""
        message = event.message
        to = message.id if message.role is Role.USER else message.parent
        if self._is_shown(message) and to is not None and not self._is_busy():
            self._asking_again = True
            self.ask_again(to)

    @work(group="send", description="send")
    async def ask_again(self, to: MessageId) -> None:
        """Request another reply to a message. Errors are handled as in `deliver`."""
        chat, has_room = self.chat, True
        self._post_activity("waiting for the model")  # if the engine has stopped, it restarts now
        with suppress(ClientError):  # the request fails for the same reason, and shows it below the message
            has_room = await self._ensure_room(chat, to, "")
        self._asking_again = False
        self._post_activity("")
        if chat is self.chat and has_room:
            await self.transcript.truncate_after(to)
            chat.leaf = to
        if chat.id is not None and has_room:
            self.ask(chat.id, to)
        else:
            self.composer.take_back_queue()

    def action_copy_last(self) -> None:
        if (message := self.chat.last_of(Role.ASSISTANT)) is not None:
            self.post_message(MessageView.CopyAsked(message))
        else:
            self.notify_empty()

    def action_regenerate(self) -> None:
        if (message := self._focused or next(reversed(self.chat.path()), None)) is not None:
            self.post_message(MessageView.RegenerateAsked(message))
        else:
            self.notify_empty()

    def action_unfold_last(self) -> None:
        """Show or hide the details of the last message."""
        if views := list(self.transcript.query(MessageView)):
            views[-1].action_unfold()

    @on(MessageView.BranchAsked)
    async def step_branch(self, event: MessageView.BranchAsked) -> None:
        if not self._is_shown(event.message):
            return
        index = [message.id for message in self.chat.path()].index(event.message.id)
        leaf = self.chat.branches.neighbor_leaf(event.message.id, event.step)
        if leaf is not None:
            await self.show_branch(leaf, self.chat.branches.path(leaf)[index].id)

    async def show_branch(self, leaf: MessageId, at: MessageId) -> None:
        """Show another branch of the open chat. The engine may still have it in its cache."""
        chat = self.chat
        if self._is_busy() or chat.id is None:
            return
        with show_errors(self):
            await self._client.chats.show_branch(chat.id, leaf)
            chat.leaf = leaf
            if chat is self.chat:
                await self._show(chat, at)

    @on(MessageView.NeighborAsked)
    def focus_neighbor(self, event: MessageView.NeighborAsked) -> None:
        if not self.transcript.focus_beside(event.message.id, event.step) and event.step > 0:
            self.composer.area.focus()

    @on(MessageView.CopyAsked)
    def copy(self, event: MessageView.CopyAsked) -> None:
        self.app.copy_to_clipboard(event.message.full_text)

    # --- the context

    async def _ensure_room(self, chat: OpenChat, leaf: MessageId | None, typed: str) -> bool:
        """Whether `typed` and a reply fit after `leaf`, after trimming if necessary. True if no model is ready: the
        message is shown at once, and its reply waits for the model.
        """
        is_ready = self.model and await self._client.engine.is_ready()
        return not is_ready or await self._trimmer.ensure_room(chat.id, leaf, typed, chat.settings.full_context)

    async def _choose_trim(
        self, chat: ChatId, leaf: MessageId | None, typed: str = "", budget: ContextBudget | None = None
    ) -> TrimPlan | None:
        """Ask the user which messages to leave out, and return the plan."""
        dialog = FullContextScreen(self._client.context, chat, leaf, self.chat.branches, typed, budget)
        return await self.app.push_screen_wait(dialog)

    async def _show_trimmed(self, changed: Chat) -> None:
        if self.chat.id == changed.summary.id:
            self.chat.leave_out(changed)
            await self._show(self.chat, None)

    @work(group="trim", exclusive=True)
    async def action_trim_context(self) -> None:
        """Open the dialog that trims the context (command /room)."""
        chat = self.chat.id
        if chat is not None and self.chat.leaf is not None:
            with show_errors(self):
                if (plan := await self._choose_trim(chat, self.chat.leaf)) is not None:
                    await self._trimmer.trim(chat, plan)
