"""Search in all chats. Returns the match that the user chose."""

import asyncio

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, Label, OptionList
from textual.widgets.option_list import Option

from tui.client import Chats
from tui.plain_text import single_line
from tui.screens.dialog import Dialog
from tui.show_errors import show_errors
from tui.types import SearchHit
from tui.widgets.text_fields import LineField

_PAUSE = 0.15  # seconds after the last key before the search starts


class SearchScreen(Dialog[SearchHit]):
    """Searches while the user types."""

    CSS_PATH = "search.tcss"

    def __init__(self, chats: Chats, text: str = "") -> None:
        super().__init__()
        self._chats = chats
        self._text = text
        self._hits: list[SearchHit] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield LineField(self._text, placeholder="Search all chats")
            yield Label("", id="found", markup=False)
            yield OptionList(markup=False)

    @on(Input.Changed)
    def typed(self, event: Input.Changed) -> None:
        self.search(event.value.strip())

    @work(exclusive=True)
    async def search(self, text: str) -> None:
        await asyncio.sleep(_PAUSE)
        with show_errors(self):
            self._hits = list(await self._chats.search(text)) if text else []
            self._show(text)

    def _show(self, text: str) -> None:
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options(Option(_line(hit)) for hit in self._hits)
        if self._hits:
            options.highlighted = 0
        self.query_one("#found", Label).update(_count(len(self._hits)) if text else "")

    @on(Input.Submitted)
    def choose_first(self) -> None:
        highlighted = self.query_one(OptionList).highlighted
        if highlighted is not None:
            self.dismiss(self._hits[highlighted])

    @on(OptionList.OptionSelected)
    def choose(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._hits[event.option_index])

    def key_down(self) -> None:
        """Move from the input to the results."""
        self.query_one(OptionList).focus()


def _count(hits: int) -> str:
    return f"{hits} {'result' if hits == 1 else 'results'}"


def _line(hit: SearchHit) -> Content:
    return Content.assemble(
        ("private " * hit.chat.private, "italic"),
        (single_line(hit.chat.title), "bold"),
        "\n  ",
        _on_the_line(hit.before).lstrip(),
        (single_line(hit.match), "bold $text-accent reverse"),
        _on_the_line(hit.after).rstrip(),
    )


def _on_the_line(text: str) -> str:
    """Put text on one line, and keep a space at either end: the match may be part of a word."""
    return f"{' ' * text[:1].isspace()}{single_line(text)}{' ' * text[-1:].isspace()}"
