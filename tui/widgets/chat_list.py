"""The list of chats, and the actions on a whole chat: rename, pin, archive, export, and delete."""

import time
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Label, OptionList
from textual.widgets.option_list import Option

from tui import figures
from tui.chat_files import back_up, export_chat, import_chats
from tui.client import Chats, ClientError
from tui.plain_text import single_line
from tui.screens.dialog import ask, confirm
from tui.show_errors import show_errors
from tui.types import ChatId, ChatSummary
from tui.widgets.rows import Rows

_AGE_POLL = 40  # number of polls after which the ages are drawn again
_RUNNING = "⠿"  # mark of a running reply; it does not move, because the engine may need all cores
_UNDO = "/undo restores it until you quit."


class ChatList(Vertical):
    """Lists the chats, pinned ones first. Actions apply to the highlighted chat if the list has the focus, else to the
    open chat.

    Letters are not bound, because the chat screen sends them to the prompt.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Back"),
        Binding("ctrl+e", "rename", "Rename"),
        Binding("ctrl+k", "pin", "Pin"),
        Binding("ctrl+a", "archive", "Archive"),
        Binding("ctrl+a", "unarchive", "Unarchive"),
        Binding("delete,ctrl+d", "delete", "Delete", key_display="del"),
        Binding("ctrl+z", "undelete", "Undo"),
        Binding("ctrl+v,left,right", "view_archive", "View archive", key_display="^v"),
        Binding("ctrl+v,left,right", "view_chats", "View chats", key_display="^v"),
    ]

    class Left(Message):
        """The user left the list to return to the prompt."""

    class OpenAsked(Message):
        """The user chose a chat to open."""

        def __init__(self, chat: ChatId) -> None:
            super().__init__()
            self.chat = chat

    class Deleted(Message):
        """A chat was deleted."""

        def __init__(self, chat: ChatId) -> None:
            super().__init__()
            self.chat = chat

    class Archived(Message):
        """A chat was moved to the archive or out of it."""

        def __init__(self, chat: ChatId, *, archived: bool) -> None:
            super().__init__()
            self.chat = chat
            self.archived = archived

    class Counted(Message):
        """The stored number of messages of the open chat has changed, perhaps by another window."""

        def __init__(self, chat: ChatId, count: int) -> None:
            super().__init__()
            self.chat = chat
            self.count = count

    class Renamed(Message):
        """A chat has another title."""

        def __init__(self, chat: ChatId, title: str) -> None:
            super().__init__()
            self.chat = chat
            self.title = title

    def __init__(self, chats: Chats, running: Callable[[], Container[ChatId]]) -> None:
        """Create an empty list. `running` returns the ids of the chats in which this window is generating a reply."""
        super().__init__(id="chats")
        self._chats = chats
        self._running_chats = running
        self._looks = 0  # number of polls so far
        self._shown_running: list[ChatId] = []  # chats that were last drawn with a running reply
        self._summaries: dict[ChatId, ChatSummary] = {}
        self._open: ChatId | None = None
        self.shows_archive = False
        self._reported: tuple[ChatId, str] | None = None  # the open chat and its title in the last Renamed
        self._counted: tuple[ChatId, int] | None = None  # the open chat and its messages in the last Counted
        self._deleted: list[ChatId] = []

    def compose(self) -> ComposeResult:
        yield Label("Chats", id="chats-title", markup=False)
        yield Rows()

    def on_mount(self) -> None:
        self.reload()

    def on_resize(self) -> None:
        self._show()

    def on_descendant_focus(self) -> None:
        self._show()

    def mark_open(self, chat: ChatId | None) -> None:
        """Mark the chat that is shown next to the list."""
        self._open = chat
        self.reload()

    @work(exclusive=True, group="chat-list")
    async def reload(self) -> None:
        """Read the chats again, and update the list."""
        with show_errors(self):
            self._summaries = await self._read()
            self._show()
            self._report_open_chat()

    @work(exclusive=True, group="chat-list")
    async def poll(self) -> None:
        """Show changes by other windows, and update the marks of running replies and the ages. Call it regularly."""
        self._looks += 1
        with suppress(ClientError):  # the next action of the user reports the error
            found = await self._read()
            is_changed = list(found.values()) != list(self._summaries.values())
            self._summaries = found
            self._report_open_chat()
            if not self.display:
                return
            if is_changed or self._replying() != self._shown_running or self._looks % _AGE_POLL == 0:
                self._show()

    async def _read(self) -> dict[ChatId, ChatSummary]:
        found = await self._chats.summaries(archived=self.shows_archive)
        return {summary.id: summary for summary in found}

    def _report_open_chat(self) -> None:
        """Report changes of the open chat: its first message gives it a title, and other windows may change it."""
        if (found := self._summaries.get(self._open or ChatId(""))) is None:
            return
        if found.title and (found.id, found.title) != self._reported:
            self._reported = found.id, found.title
            self.post_message(self.Renamed(found.id, found.title))
        if (found.id, found.message_count) != self._counted:
            self._counted = found.id, found.message_count
            self.post_message(self.Counted(found.id, found.message_count))

    def _is_running(self, summary: ChatSummary) -> bool:
        return summary.replying_elsewhere or summary.id in self._running_chats()

    def _replying(self) -> list[ChatId]:
        return [summary.id for summary in self._summaries.values() if self._is_running(summary)]

    def _show(self) -> None:
        for options in self.query(OptionList):  # there is no list before it is composed
            # without the focus, only the open chat is highlighted: the user would take another one for the open chat
            highlighted, row = self._highlighted() if self.has_focus_within else None, self._row(options)
            options.clear_options()
            options.add_options(self._options(max(12, options.size.width - 2)))
            keep = highlighted if highlighted in self._summaries else self._open
            if keep in self._summaries:
                options.highlighted = options.get_option_index(keep or "")
            elif self.has_focus_within and self._summaries:  # keep the row of a chat that was removed
                chat = list(self._summaries)[min(row, len(self._summaries) - 1)]
                options.highlighted = options.get_option_index(chat)
            self._shown_running = self._replying()
            self.query_one("#chats-title", Label).update("Archive" if self.shows_archive else "Chats")

    def _row(self, options: OptionList) -> int:
        """Return the row of the highlighted chat. Rows of group headings are not counted."""
        return sum(option.id is not None for option in options.options[: options.highlighted or 0])

    def _options(self, width: int) -> Iterator[Option]:
        now, group = time.time(), ""
        for summary in self._summaries.values():
            named = "Pinned" if summary.pinned else figures.day_group(summary.updated, now)
            if named != group:
                group = named
                yield Option(Content.styled(f" {group}", "bold"), disabled=True)
            yield Option(self._line(summary, width, now), id=summary.id)

    def _line(self, summary: ChatSummary, width: int, now: float) -> Content:
        """Return a line of `width` cells: mark, title, and age on the right. The mark also works without colors."""
        signs = {"private ": summary.private, "draft ": not summary.message_count}
        words = "".join(word for word, holds in signs.items() if holds)
        is_open = summary.id == self._open
        mark = "›" if is_open else "•" if summary.pinned else " "
        running = _RUNNING if self._is_running(summary) else ""
        age = "" if running else figures.short_age(summary.updated, now)
        title = Content.assemble(
            (f"{running or mark} ", "$text-accent"),
            (words, "italic"),
            (summary.name, "bold" if is_open else ""),
        ).truncate(width - len(age) - bool(age), ellipsis=True)
        return Content.assemble(title, " " * (width - title.cell_length - len(age)), (age, "dim"))

    def _highlighted(self) -> ChatId | None:
        options = self.query_one(OptionList)
        index = options.highlighted
        return None if index is None else ChatId(options.get_option_at_index(index).id or "")

    def _target_chat(self) -> ChatId | None:
        """Return the chat to which an action applies."""
        return self._highlighted() if self.has_focus_within else self._open

    async def _target_summary(self) -> ChatSummary | None:
        """Return the summary of the chat to which an action applies, archived or not.

        If the chat does not exist yet, notify the user and return None.
        """
        chat = self._target_chat()
        if chat not in self._summaries:
            others = await self._chats.summaries(archived=not self.shows_archive)
            found = next((summary for summary in others if summary.id == chat), None)
        else:
            found = self._summaries[chat]
        if found is None:
            self.app.notify("This chat is empty.", markup=False)
        return found

    @on(OptionList.OptionSelected)
    def open_chosen(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.post_message(self.OpenAsked(ChatId(event.option.id or "")))

    # --- actions

    @work
    async def action_rename(self, title: str = "") -> None:
        chat = self._target_chat()
        if chat is None:
            return
        before = self._summaries[chat].title if chat in self._summaries else ""
        new = single_line(title) or await ask(self, "Chat name", before)
        if new:
            with show_errors(self):
                await self._chats.rename(chat, new)
                self.post_message(self.Renamed(chat, new))
                self.reload()

    @work
    async def action_pin(self) -> None:
        with show_errors(self):
            if (summary := await self._target_summary()) is not None:
                await self._chats.pin(summary.id, not summary.pinned)
                self.app.notify("Unpinned." if summary.pinned else "Pinned.", markup=False)
                self.reload()

    @work
    async def action_archive(self) -> None:
        with show_errors(self):
            if (summary := await self._target_summary()) is not None:
                await self._chats.archive(summary.id, not summary.archived)
                done = "Unarchived." if summary.archived else "Archived. See /archived."
                self.app.notify(done, markup=False)
                self.post_message(self.Archived(summary.id, archived=not summary.archived))
                self.reload()

    def action_unarchive(self) -> None:
        self.action_archive()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide keys without an effect in the shown list. Commands are always allowed."""
        hidden = {
            "undelete": not self._deleted,
            "archive": self.shows_archive,
            "view_archive": self.shows_archive,
            "unarchive": not self.shows_archive,
            "view_chats": not self.shows_archive,
        }
        return not (self.has_focus_within and hidden.get(action, False))

    def action_leave(self) -> None:
        self.post_message(self.Left())

    def action_view_archive(self) -> None:
        self.view(archive=True)

    def action_view_chats(self) -> None:
        self.view(archive=False)

    def view(self, *, archive: bool) -> None:
        """List the archived chats, or the others."""
        self.shows_archive = archive
        self.refresh_bindings()
        self.reload()

    @work
    async def action_delete(self) -> None:
        """Delete a chat after the user has confirmed it."""
        with show_errors(self):
            if (summary := await self._target_summary()) is not None:
                about = f"{summary.name}\n\n{_UNDO}"
                if await confirm(self, "Delete this chat?", about, "Delete"):
                    await self._delete(summary.id)

    async def _delete(self, chat: ChatId) -> None:
        with show_errors(self):
            await self._chats.delete(chat)
            self._deleted.append(chat)
            self.refresh_bindings()
            self.app.notify(f"Deleted. {_UNDO}", markup=False)
            self.post_message(self.Deleted(chat))
            self.reload()

    @work
    async def action_undelete(self) -> None:
        if not self._deleted:
            self.app.notify("Nothing to undo.", markup=False)
            return
        with show_errors(self):
            chat = self._deleted[-1]
            await self._chats.undelete(chat)
            self._deleted.pop()
            self.refresh_bindings()
            self.post_message(self.OpenAsked(chat))
            self.reload()

    @work
    async def action_export(self, path: str = "") -> None:
        if (summary := await self._target_summary()) is not None:
            await export_chat(self, self._chats, summary.id, summary.title, path)

    @work
    async def action_back_up(self, path: str = "") -> None:
        await back_up(self, self._chats, path)

    @work
    async def action_import(self, path: str = "") -> None:
        await import_chats(self, self._chats, path)
        self.reload()
