"""The chat history as one object, with all operations on its file."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from app.history.chats import Chats
from app.history.database import Database, quiet
from app.history.inputs import NEW, Inputs
from app.history.messages import Messages
from app.history.notices import HistoryNotice, Rescue
from app.history.opening import Tell
from app.history.records import Chat, ChatSettings, StoredMessage, path_to
from app.history.reply_marks import ReplyMarks
from app.history.search import Search
from app.history.windows import Window

_FORGOTTEN_SECONDS = 86_400.0  # seconds after which a deleted chat is erased by any process


class History:
    """Chats stored in a folder; without one, in memory. Safe for several threads and processes.

    Raises HistoryTooNew, HistoryUnavailable, or NoSpace when it is opened.
    """

    def __init__(self, folder: Path | None, tell: Tell = quiet) -> None:
        """Open the history. `tell` is called with messages for a user who waits until it is open."""
        self._database = Database(folder, tell)
        self.chats = Chats(self._database)
        self.messages = Messages(self._database)
        self.inputs = Inputs(self._database)
        self.search = Search(self._database, self.chats)
        self._window = Window(folder)
        self._reply_marks = ReplyMarks(folder)
        self._deleted: list[int] = []  # chats that this process deleted

    @property
    def rescue(self) -> Rescue | None:
        """The result of a repair, if the history was damaged when it was last opened."""
        return self._database.rescue

    @property
    def notices(self) -> Sequence[HistoryNotice]:
        """The notices that no subscriber has received."""
        return self._database.notices

    def subscribe(self, on_notice: Callable[[HistoryNotice], None]) -> Sequence[HistoryNotice]:
        """Call `on_notice`, on any thread, with each later notice. Returns those before the first subscription."""
        return self._database.subscribe(on_notice)

    def with_messages(self) -> list[tuple[Chat, Sequence[StoredMessage]]]:
        """Return all chats that have messages, with their messages. Deleted chats are left out."""
        with self._database.reading():
            listed = [chat for archived in (False, True) for chat in self.chats.listed(archived=archived)]
            return [(chat, self.messages.in_chat(chat.id)) for chat in listed if chat.num_messages]

    def transaction(self) -> AbstractContextManager[object]:
        """Return a context whose changes are stored together at its end, or not at all if it raises."""
        return self._database.writing()

    def model_of(self, chat: int) -> str:
        """Return the model of the last reply in the shown branch of a chat; "" if there is no reply."""
        messages = {message.id: message for message in self.messages.in_chat(chat)}
        branch = path_to(messages, self.chats.get(chat).shown)
        return next((message.model for message in reversed(branch) if message.model), "")

    def deleted(self) -> Sequence[int]:
        """Return the chats that this process deleted and that were not restored."""
        waiting = set(self.chats.deleted_before(time.time()))
        return [chat for chat in self._deleted if chat in waiting]

    def delete(self, chat: int) -> None:
        """Remove a chat from all lists. It is erased when this history is closed, unless it is restored before."""
        self.chats.delete(chat)
        self._deleted.append(chat)

    def mark_reply(self, chat: int, message: int) -> None:
        """Show other windows that this process is generating a reply, until `unmark_reply` or the process's end."""
        if self._database.is_saved:
            self._reply_marks.hold(chat, message)

    def unmark_reply(self, message: int) -> None:
        self._reply_marks.release(message)

    def replies_elsewhere(self) -> Mapping[int, Collection[int]]:
        """Return the replies that other windows are generating, as messages by chat."""
        return self._reply_marks.of_others() if self._database.is_saved else {}

    def new_draft(self) -> str:
        """Return the draft that this window's new chat had when the window was last closed.

        Drafts of other closed windows become chats. Raises OSError if no lock can be created for the window.
        """
        own = self._window.number
        for window in self.inputs.windows():
            if window != own:
                self._adopt(window)
        return self.inputs.draft(NEW - own)

    def save_new_draft(self, text: str) -> None:
        """Save the draft of this window's new chat. An empty string deletes it."""
        self.inputs.save_draft(text, NEW - self._window.number)

    def _adopt(self, window: int) -> None:
        with self._window.reserve(window) as is_closed, self._database.writing():
            if is_closed and self.inputs.draft(NEW - window):
                self.inputs.move_draft(window, self.chats.create(ChatSettings()).id)

    def close(self) -> None:
        """Close the history. Erase the chats that this process deleted, and old ones that other processes left."""
        try:
            old = self.chats.deleted_before(time.time() - _FORGOTTEN_SECONDS)
            self.chats.erase([*self._deleted, *old])
        finally:
            self._window.close()
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
