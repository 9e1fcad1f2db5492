"""The lower part of the chat: the prompt, its attachments, queued messages, and the context budget.

Shortly after the last key, the draft is saved and the context budget is updated.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message as Posted
from textual.widgets import Label, TextArea

from tui import commands
from tui.attachment_sizes import AttachmentSizes
from tui.client import Client, ClientError
from tui.completion import Completions
from tui.drafts import Drafts, Prompt, read_attachment, with_named_files
from tui.open_chat import OpenChat
from tui.show_errors import show_errors
from tui.types import Attachment, Message, Role
from tui.widgets.attachment_line import AttachmentLine
from tui.widgets.prompt_area import PromptArea
from tui.widgets.prompt_menu import PromptMenu
from tui.widgets.status_line import StatusLine

_PAUSE = 0.4  # seconds after the last key until the draft is saved and the context is measured
_MENU_ROWS = 6  # rows of the menu in a low terminal


class Composer(Vertical):
    """The prompt, its attachments, and the queued messages."""

    class EnteredEmpty(Posted):
        """The user pressed Enter in a prompt without text and attachments."""

    class Submitted(Posted):
        """The user pressed Enter to send a message. The prompt is already empty."""

        def __init__(self, prompt: Prompt) -> None:
            super().__init__()
            self.prompt = prompt

    class CommandTyped(Posted):
        """The user pressed Enter on a command. Attachments are kept for the next message."""

        def __init__(self, name: str, argument: str) -> None:
            super().__init__()
            self.name, self.argument = name, argument

    def __init__(self, client: Client, sizes: AttachmentSizes) -> None:
        super().__init__()
        self._client = client
        self._chat = OpenChat()
        self.menu = PromptMenu(
            Completions(client, lambda: self.app.available_themes, lambda: self._chat.title),
        )
        self.area = PromptArea(self.menu, self.take_back_last, self._stored_inputs)
        self.attached = AttachmentLine(sizes)
        self.status = StatusLine()
        self.drafts = Drafts(client.chats)
        self.sending: Prompt | None = None  # the message that is being sent, until the client has stored it
        self._queue: list[Prompt] = []
        self._is_paused = False  # whether the queue waits until the user sends its next message
        self._is_held = False  # whether `sending` waits for a summary
        self._aside: Prompt | None = None  # the prompt to restore after the user has edited a message
        self.edited: Message | None = None  # the message that the next sent one replaces as a branch
        self.is_leaving = False  # whether the open chat is being left: text typed now belongs to the next chat

    def compose(self) -> ComposeResult:
        yield Label("", id="queue", markup=False)
        yield self.menu
        yield self.attached
        yield self.area
        yield self.status

    def fit(self, height: int) -> None:
        """Limit each part to a share of the screen's height, so that the prompt is always visible.

        Textual ignores relative limits in a widget whose height depends on its contents.
        """
        menu_rows = max(round(height * 0.3), min(_MENU_ROWS, height // 2 - 1))
        for part, rows in ((self.area, height * 0.4), (self.menu, menu_rows), (self.query_one("#queue"), height * 0.2)):
            part.styles.max_height = max(3, round(rows))

    @property
    def prompt(self) -> Prompt:
        """The message that Enter would send."""
        return Prompt(self.area.text.strip(), tuple(self.attached.files))

    def write(self, prompt: Prompt) -> None:
        """Replace the text and the attachments."""
        self.area.write(prompt.text)
        self.attached.replace(prompt.attachments)

    def put_back(self, typed: str) -> None:
        """Write a command or message that failed before the current text, so that the user can correct it."""
        self.write(Prompt.of([Prompt(typed), self.prompt]))

    # --- drafts and the context

    async def start(self) -> None:
        """Load earlier inputs and the last draft. Text that the user has already typed is kept."""
        with show_errors(self):
            self.area.remember(await self._client.chats.inputs())
            draft = await self.drafts.read_window_draft()
            if self._chat.id is None and not self._chat.private and not self.area.text:
                self.write(draft)
            elif draft != Prompt():  # the user has already typed text or opened a chat, or the new chat is private
                await self.drafts.save_as_chat(OpenChat(), draft)
                await self.save_draft()

    async def _stored_inputs(self) -> Sequence[str]:
        with show_errors(self):
            return await self._client.chats.inputs()
        return ()

    @property
    def draft(self) -> Prompt:
        """Return all text that is not sent: the queue and the prompt, without `sending` and without a message that is
        being edited.
        """
        typed = Prompt(self.area.draft.strip(), tuple(self.attached.files))
        return Prompt.of([*self._queue, typed if self._aside is None else self._aside])

    async def save_draft(self) -> None:
        """Save the draft now, unless the open chat is being left."""
        if not self.is_leaving:
            with show_errors(self):
                await self.drafts.save(self._chat, self.draft, self.sending)

    async def flush_keys(self) -> None:
        """Wait until the prompt has processed all keys received before."""
        flushed = asyncio.Event()
        if self.area.is_running and self.area.call_later(flushed.set):
            await flushed.wait()

    @work(group="keep", description="keep")
    async def save_soon(self) -> None:
        """Save the draft in the background."""
        await self.save_draft()

    async def leave(self) -> Prompt:
        """Remove the draft of the chat that the user leaves, and save it. Text typed later belongs to the next chat."""
        self.edited = None
        await self.flush_keys()
        self.end_editing()
        self.take_back_queue()
        chat, left, sending = self._chat, self.draft, self.sending
        self.is_leaving = True
        self.write(Prompt())
        with show_errors(self):
            await self.drafts.save(chat, left, sending)
        return left

    def show_draft(self, draft: Prompt) -> None:
        """Show the draft of the chat that was opened, followed by the text typed meanwhile."""
        self.is_leaving = False
        self.write(Prompt(draft.text + self.area.text, (*draft.attachments, *self.attached.files)))

    def switch_chat(self, chat: OpenChat) -> None:
        """From now on, typed text belongs to this chat."""
        if chat is not self._chat:
            self._chat = chat
            self.sending, self._is_held, self.status.written = None, False, 0
            self.status.budget = None  # until the new chat is measured
            self.area.change_chat(is_private=chat.private)
        self.show_settings()

    def show_settings(self) -> None:
        """Show the settings of the open chat."""
        self.status.settings, self.status.is_private = self._chat.settings, self._chat.private
        self.measure()

    @work(exclusive=True, group="measure")
    async def measure(self) -> None:
        """After a pause, save the draft and show how full the context is."""
        await asyncio.sleep(_PAUSE)
        await self.save_draft()
        with suppress(ClientError):  # the next reply reports it; the engine may be restarting
            chat = self._chat
            self.status.budget = await self._client.context.budget(chat.id, chat.answered, self.prompt.all_text)
            if chat.answered == chat.leaf:
                self.status.written = 0

    # --- queued messages

    def queue(self, prompt: Prompt) -> None:
        """Add a message to the queue. It is sent after the current reply."""
        self._queue.append(prompt)
        self._show_queue()
        self.save_soon()

    def next_in_queue(self) -> Prompt | None:
        """Remove and return the first queued message."""
        prompt = self._queue.pop(0) if self._queue else None
        self._show_queue()
        return prompt

    async def sent(self, chat: OpenChat) -> None:
        """Save the draft without the message that the client has stored. The user may have left its chat."""
        if chat is self._chat:
            self.sending = None
            await self.save_draft()
        else:
            with show_errors(self):
                await self.drafts.save(chat, self.drafts.unsent(chat.id))

    async def restore_unsent(self, chat: OpenChat, prompt: Prompt) -> None:
        """Move a message that could not be sent back into the prompt, or before queued messages if the prompt is used.

        The queue waits for the user.
        """
        if chat is self._chat:
            self.sending = None
            if self.prompt == Prompt() and self._aside is None:
                self.write(prompt)
            else:
                self._queue.insert(0, prompt)
            self.pause_queue(is_paused=True)
            await self.save_draft()
        elif chat.id is None:
            with show_errors(self):
                await self.drafts.save_as_chat(chat, prompt)
        else:
            with show_errors(self):
                await self.drafts.save(chat, Prompt.of([prompt, self.drafts.unsent(chat.id)]))

    def pause_queue(self, *, is_paused: bool) -> None:
        """Send no queued message until the user asks for it, or continue with the queue after the next reply."""
        self._is_paused = is_paused
        self._show_queue()

    def take_back_queue(self) -> None:
        """Move all queued messages back to the prompt, because the user leaves the chat."""
        if not self._queue:
            return
        draft, self._queue = self.draft, []
        if self._aside is None:
            self.write(draft)
        else:
            self._aside = draft
        self._show_queue()

    def take_back_last(self) -> bool:
        """Move the last queued message into the prompt. Returns whether there was one."""
        if not self._queue:
            return False
        self.write(self._queue.pop())
        self._show_queue()
        self.save_soon()
        return True

    def show_held(self, *, is_held: bool) -> None:
        """Show the message that is being sent above the queue, while old messages are summarized for it."""
        self._is_held = is_held
        self._show_queue()

    def _show_queue(self) -> None:
        waiting = [self.sending] if self._is_held and self.sending is not None else []
        waiting += self._queue
        lines = [f"next: {prompt.text.splitlines()[0] if prompt.text else '(files)'}" for prompt in waiting]
        if self._queue:
            lines.append("      " + "⏎ sends the next one · " * self._is_paused + "↑ takes the last one back")
        label = self.query_one("#queue", Label)
        label.update("\n".join(lines))
        label.display = bool(lines)

    # --- editing a message

    def edit(self, message: Message, prompt: Prompt) -> None:
        """Put `prompt`, the text of a message, into the prompt for editing. The current prompt is kept aside."""
        self.edited = message
        if self._aside is None:
            self._aside = self.prompt
        self.add_class("editing")
        self.write(prompt)
        self.area.show_purpose(edits=True)
        self.area.edited_reply = self.area.text if message.role is Role.ASSISTANT else ""
        self.area.focus()
        self.refresh_bindings()

    def take_edited(self) -> Message | None:
        """Return the message that is replaced by the one being sent. The one after it replaces none."""
        edited, self.edited = self.edited, None
        self.refresh_bindings()
        return edited

    def cancel_editing(self) -> None:
        """Edit no message, and restore the prompt that was kept aside."""
        self.take_edited()
        self.end_editing()

    def end_editing(self) -> None:
        """Restore the prompt that was kept aside."""
        if self._aside is not None:
            draft, self._aside = self._aside, None
            self.remove_class("editing")
            self.area.show_purpose(edits=False)
            self.area.put_away()
            self.area.edited_reply = ""
            self.write(draft)

    # --- input

    @on(PromptArea.Entered)
    def submit(self, event: PromptArea.Entered) -> None:
        event.stop()
        if (typed := commands.parse_command(event.text)) is not None:
            self.post_message(self.CommandTyped(*typed))
            return
        prompt = self._with_named_files(Prompt(event.text, self.prompt.attachments))
        if prompt is None:
            self.put_back(event.text)
        elif prompt.text or prompt.attachments:
            self.attached.replace(())
            if self._aside is not None:
                self._aside = Prompt.of([self._aside, self.prompt])
                self.end_editing()
            self.post_message(self.Submitted(prompt))
        else:
            self.post_message(self.EnteredEmpty())

    def _with_named_files(self, prompt: Prompt) -> Prompt | None:
        """Attach the files that the text names, or show why one cannot be attached and return None."""
        if self.area.edited_reply:  # a reply has no attachments
            return prompt
        with show_errors(self):
            return with_named_files(prompt)
        return None

    @on(TextArea.Changed)
    def suggest(self) -> None:
        if self.area.is_recalled:
            self.menu.close()  # so that the arrow keys recall other inputs
        else:
            self.menu.follow(self.area.text, self.area.cursor_index)
        self.measure()

    @on(PromptMenu.OptionSelected)
    def choose_clicked(self, event: PromptMenu.OptionSelected) -> None:
        event.stop()
        self.area.take_choice(runs=True)

    @on(PromptMenu.Toggled)
    def show_keys(self, event: PromptMenu.Toggled) -> None:
        event.stop()
        self.area.end_hint()
        self.refresh_bindings()

    @on(PromptArea.LongPasted)
    def attach_pasted(self, event: PromptArea.LongPasted) -> None:
        event.stop()
        number = 1 + sum(file.name.startswith("pasted") for file in self.attached.files)
        self.attached.add(Attachment(f"pasted-{number}.txt", event.text))

    @on(PromptArea.PathPasted)
    def attach_file(self, event: PromptArea.PathPasted) -> None:
        event.stop()
        if not self.attach_path(event.path) and event.typed:
            self.area.withdraw(event.typed)

    def attach_path(self, path: Path) -> bool:
        """Attach the file at `path`. Returns False if it cannot be attached."""
        with show_errors(self):
            self.attached.add(read_attachment(path))
            return True
        return False

    @on(PromptArea.DetachAsked)
    def detach_last(self, event: PromptArea.DetachAsked) -> None:
        event.stop()
        if self.attached.files:
            self.attached.remove_last(1)

    def action_detach(self) -> None:
        """Remove all attachments."""
        self.attached.remove_last(len(self.attached.files))

    @on(PromptArea.UndoAsked)
    def undo(self, event: PromptArea.UndoAsked) -> None:
        event.stop()
        if not self.attached.restore():
            self.area.undo()

    @on(AttachmentLine.Changed)
    def measure_attached(self, event: AttachmentLine.Changed) -> None:
        event.stop()
        self.measure()
