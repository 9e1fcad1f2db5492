"""The screen that searches all chats or lists the latest ones. Returns what the user chose."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, Label, OptionList
from textual.widgets.option_list import Option

from tui import figures
from tui.client import Chats
from tui.plain_text import single_line, start, without_fences
from tui.screens.dialog import Dialog
from tui.show_errors import show_errors
from tui.types import AUTHORS, ChatId, ChatSummary, MessageId, SearchHit
from tui.widgets.rows import Rows
from tui.widgets.text_fields import LineField

_LEAST = 20  # minimum length of a shown title
_BESIDE = 4  # cells of a row beside its text: the scroll bar and the padding
_PAUSE = 0.15  # seconds after the last key before the search starts


@dataclass(frozen=True, slots=True)
class Found:
    """A chat, and the message to show in it. None: show the end of the chat."""

    chat: ChatId
    message: MessageId | None = None


class SearchScreen(Dialog[Found]):
    """Searches while the user types. Without a query, it lists the latest chats."""

    CSS_PATH = "search.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "move(1)", "Next", show=False),
        Binding("up", "move(-1)", "Previous", show=False),
    ]

    def __init__(self, chats: Chats, text: str = "") -> None:
        super().__init__()
        self._chats = chats
        self._text = text
        self._found: list[Found] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_subtitle = "⏎ open · ↓ choose · esc close"
            yield Label("Search all chats", classes="question")
            yield LineField(self._text, placeholder="Words of a message or a title")
            yield Label("", id="found", markup=False)
            yield Rows()

    def on_mount(self) -> None:
        self.search(self._text)

    @on(Input.Changed)
    def typed(self, event: Input.Changed) -> None:
        self.search(event.value.strip())

    @work(exclusive=True)
    async def search(self, text: str) -> None:
        with show_errors(self):
            if text:
                await asyncio.sleep(_PAUSE)
                hits = grouped(await self._chats.search(text))
                found = [Found(hit.chat.id, hit.message) for hit in hits]
                self._show(found, _lines(hits, self._width), _count(hits))
            else:
                chats = [chat for chat in await self._chats.summaries() if chat.message_count]
                chats.sort(key=lambda chat: -chat.updated)
                lines = [_summary(chat, self._width) for chat in chats]
                self._show([Found(chat.id) for chat in chats], lines, "Last chats")

    @property
    def _width(self) -> int:
        """Width of a row in cells."""
        return self.query_one(Rows).scrollable_content_region.width

    def _show(self, found: list[Found], lines: Sequence[Content], about: str) -> None:
        self._found = found
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options(Option(line) for line in lines)
        if found:
            options.highlighted = 0
        self.query_one("#found", Label).update(about if found or about != "Last chats" else "No chats yet.")

    @on(Input.Submitted)
    def choose_first(self) -> None:
        highlighted = self.query_one(OptionList).highlighted
        if highlighted is not None:
            self.dismiss(self._found[highlighted])

    @on(OptionList.OptionSelected)
    def choose(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._found[event.option_index])

    def action_move(self, step: int) -> None:
        """Move the list's cursor while the input keeps the focus."""
        options = self.query_one(OptionList)
        (options.action_cursor_down if step > 0 else options.action_cursor_up)()


def grouped(hits: Sequence[SearchHit]) -> list[SearchHit]:
    """Return the hits with those of one chat together, in the order of the best hit of each chat."""
    chats = list(dict.fromkeys(hit.chat.id for hit in hits))
    return sorted(hits, key=lambda hit: chats.index(hit.chat.id))


def _count(hits: Sequence[SearchHit]) -> str:
    """Return how many messages were found, and in how many chats: the list has a heading for each chat."""
    chats = len({hit.chat.id for hit in hits})
    counted = f"{len(hits)} {'result' if len(hits) == 1 else 'results'}"
    return f"{counted} in {chats} {'chat' if chats == 1 else 'chats'}" if hits else counted


def _summary(chat: ChatSummary, width: int) -> Content:
    """Return a line of `width` cells with the title of a chat, shortened if necessary, and its age."""
    mark, age = "private " * chat.private, f"  {figures.age(chat.updated, time.time())}"
    title = start(chat.name, max(_LEAST, width - _BESIDE - len(mark) - len(age)))
    return Content.assemble((mark, "italic"), (title, "bold"), (age, "dim"))


def _lines(hits: Sequence[SearchHit], width: int) -> list[Content]:
    """Return a row for each hit. Consecutive hits in one chat have its title only once."""
    chats = [None, *(hit.chat.id for hit in hits)]
    return [
        _excerpt(hit) if hit.chat.id == before else Content.assemble(_summary(hit.chat, width), "\n", _excerpt(hit))
        for hit, before in zip(hits, chats, strict=False)
    ]


def _excerpt(hit: SearchHit) -> Content:
    return Content.assemble(
        (f"  {AUTHORS[hit.role]}: " if hit.role else "  ", "dim"),
        _on_the_line(hit.before).lstrip(),
        (single_line(hit.match), "bold $text-accent reverse"),
        _on_the_line(hit.after).rstrip(),
    )


def _on_the_line(text: str) -> str:
    """Remove code fences and line ends, but keep a space at either end: a match may be part of a word."""
    return f"{' ' * text[:1].isspace()}{single_line(without_fences(text))}{' ' * text[-1:].isspace()}"
