"""Notices to the user about events in the history."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from app.history.salvage import Salvage

_NOUNS = {
    "chats": "chat",
    "messages": "message",
    "drafts": "draft",
    "inputs": "earlier input",
    "presets": "preset",
}
_MOST_TITLES = 3
_TITLE = 40  # longest title in a notice, in characters


@dataclass(frozen=True, slots=True)
class HistoryNotice:
    """A message to the user about an event in the history, such as a repair."""

    message: str
    remedy: str = ""
    is_saved: bool = True  # whether further changes are saved

    @property
    def sentences(self) -> str:
        return f"{self.message} {self.remedy}".strip()


@dataclass(frozen=True, slots=True)
class Rescue:
    """The result of repairing a damaged history. The mappings give the number of rows of each table."""

    reason: str
    aside: Path | None  # path to which the damaged file was moved; None: it was not moved
    saved: Mapping[str, int]
    lost: Mapping[str, int]
    changed: Mapping[str, int]
    unreadable: int  # lost rows of unknown tables
    gaps: Sequence[str]  # lost parts of the files, with unknown contents
    titles: Sequence[str]  # titles of chats with lost or changed messages

    @property
    def is_loss(self) -> bool:
        return any((self.unreadable, *self.gaps, *self.lost.values(), *self.changed.values()))

    @property
    def notice(self) -> HistoryNotice:
        others = [_count(self.unreadable, "other entry")] if self.unreadable else []
        lost = [*_counted(self.lost), *others, *self.gaps]
        chats, messages = _count(self.saved["chats"], "chat"), _count(self.saved["messages"], "message")
        done = "Saved" if self.aside else "Read"
        message = f"The chat history was damaged: {self.reason}. {done}: {chats} and {messages}."
        message += f" Lost: {', '.join(lost) or 'nothing known'}."
        if changed := _counted(self.changed):
            message += f" Partly damaged: {', '.join(changed)}."
        if self.titles:
            message += f" Check: {_listed(self.titles)}."
        return HistoryNotice(message, f"The damaged file is kept as {self.aside}." if self.aside else "")


def rescue_of(reason: str, aside: Path | None, salvaged: Salvage, saved: Mapping[str, int]) -> Rescue:
    """Return the result of a salvage. `saved`: table -> number of rows in the new file."""
    return Rescue(
        reason,
        aside,
        saved,
        {table: len(ids) for table, ids in salvaged.lost.items()},
        {table: len(ids) for table, ids in salvaged.changed.items()},
        salvaged.unreadable,
        salvaged.gaps,
        [_title(salvaged, chat) for chat in sorted(_hurt_chats(salvaged))],
    )


def _hurt_chats(salvaged: Salvage) -> set[int]:
    """Return the remaining chats that are damaged, or have lost or damaged messages."""
    messages = {*salvaged.lost["messages"], *salvaged.changed["messages"]}
    kept = salvaged.rows["messages"]
    chats = {kept[one][1] if one in kept else salvaged.indexed.get(one) for one in messages}
    return {
        chat
        for chat in {*chats, *salvaged.changed["chats"]}
        if isinstance(chat, int) and chat in salvaged.rows["chats"]
    }


def _title(salvaged: Salvage, chat: int) -> str:
    title = str(salvaged.rows["chats"][chat][1])
    beginnings = (str(row[4]) for _, row in sorted(salvaged.rows["messages"].items()) if row[1] == chat)
    return shorten(title or next(beginnings, ""), _TITLE, placeholder="…") or f"chat {chat}"


def _listed(titles: Sequence[str]) -> str:
    more = len(titles) - _MOST_TITLES
    shown = ", ".join(f"“{title}”" for title in titles[:_MOST_TITLES])
    return f"{shown}, and {more} more" if more > 0 else shown


def _counted(counts: Mapping[str, int]) -> list[str]:
    return [_count(counts[table], noun) for table, noun in _NOUNS.items() if counts.get(table)]


def _count(number: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
