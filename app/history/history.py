"""The history of chats: its file, and everything that can be asked of it, as one object."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from app.history.chats import Chats
from app.history.database import Database, quiet
from app.history.inputs import NEW, Inputs
from app.history.messages import Messages
from app.history.notices import HistoryNotice, Rescue
from app.history.opening import Tell
from app.history.records import ChatSettings
from app.history.search import Search
from app.history.windows import Window

_FORGOTTEN_SECONDS = 86_400.0  # since when a chat is deleted that nobody will bring back


class History:
    """Chats that are kept in a folder; without one, in memory alone. Safe for several threads and processes.

    Raises HistoryTooNew, HistoryUnavailable or NoSpace when it is opened.
    """

    def __init__(self, folder: Path | None, tell: Tell = quiet) -> None:
        """`tell` is called with sentences for a user who waits while the history is opened."""
        self._database = Database(folder, tell)
        self.chats = Chats(self._database)
        self.messages = Messages(self._database)
        self.inputs = Inputs(self._database)
        self.search = Search(self._database, self.chats)
        self._window = Window(folder)
        self._deleted: list[int] = []  # by us

    @property
    def rescue(self) -> Rescue | None:
        """What became of a damaged history, if it was one when it was opened last."""
        return self._database.rescue

    @property
    def notices(self) -> Sequence[HistoryNotice]:
        """The news that nobody has heard yet."""
        return self._database.notices

    def subscribe(self, on_notice: Callable[[HistoryNotice], None]) -> Sequence[HistoryNotice]:
        """Call `hear`, on any thread, with all news from now on. Returns the news that nobody has heard yet."""
        return self._database.subscribe(on_notice)

    def deleted(self) -> Sequence[int]:
        """What was deleted here and not brought back."""
        waiting = set(self.chats.deleted_before(time.time()))
        return [chat for chat in self._deleted if chat in waiting]

    def delete(self, chat: int) -> None:
        """Out of all lists, and erased when this history is closed, unless it is brought back before."""
        self.chats.delete(chat)
        self._deleted.append(chat)

    def new_draft(self) -> str:
        """The draft of a new chat that this window had when it ended. Those of other windows that ended become chats.

        Raises OSError if the window cannot have a lock.
        """
        own = self._window.number
        for window in self.inputs.windows():
            if window != own:
                self._adopt(window)
        return self.inputs.draft(NEW - own)

    def save_new_draft(self, text: str) -> None:
        """Keep the draft of this window's new chat; an empty one is gone."""
        self.inputs.save_draft(text, NEW - self._window.number)

    def _adopt(self, window: int) -> None:
        with self._window.reserve(window) as is_gone, self._database.writing():
            if is_gone and self.inputs.draft(NEW - window):
                self.inputs.move_draft(window, self.chats.create(ChatSettings()).id)

    def close(self) -> None:
        """Erase what was deleted here, and what was left by programs that did not come to that."""
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
