"""The Markdown of a reply, shown while it comes and afterwards.

A long text is shown as several pieces. Those far from what is seen are folded to empty room of their height, so that a
frame costs as much as what is near, however long the text. Knows that it is scrolled, not by whom.
Every address is shown; a click on one is told as Textual's own `Markdown.LinkClicked`, and opens nothing.
"""

from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, process_time

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.events import Mount
from textual.geometry import Region, Size
from textual.layout import DockArrangeResult
from textual.strip import Strip
from textual.widget import MountError, Widget
from textual.widgets import Markdown

from tui.markdown import PIECE, Part, Pieces, parser
from tui.widgets.code_block import CodeBlock
from tui.widgets.column import Column, alike, size_by_layout
from tui.widgets.headroom import opened, settled
from tui.widgets.list_block import ListBlock
from tui.widgets.paragraph import Paragraph
from tui.widgets.table import Table

_TYPING = 0.3  # seconds between two keys of somebody who types on
_REST = 25  # times the CPU time of a frame: 4 % of a core are used, for an engine may compute on all of them
_LONGEST_REST = 0.3  # seconds
_AT_ONCE = 4 * PIECE  # characters that are added in one frame
_AT_FIRST = 4  # pieces at the end of a text that are laid out at once
_UNKNOWN = Size(0, 0)


class Document(Markdown):
    """One piece of a reply."""

    COMPONENT_CLASSES = {"em", "strong", "s", "code_inline"}  # noqa: RUF012 - found here by all that stands in it
    DEFAULT_CSS = """
    Document {
        &:dark > .code_inline { background: $warning 10%; color: $text-warning 95%; }
        &:light > .code_inline { background: $error 5%; color: $text-error 95%; }
        &:ansi > .code_inline { background: ansi_default !important; }
        & > .em { text-style: italic; }
        & > .strong { text-style: bold; }
        & > .s { text-style: strike; }
    }
    """

    BLOCKS = {  # noqa: RUF012 - as the base class has it
        **Markdown.BLOCKS,
        "paragraph_open": Paragraph,
        "fence": CodeBlock,
        "code_block": CodeBlock,
        "table_open": Table,
        "bullet_list_open": ListBlock,
        "ordered_list_open": ListBlock,
    }

    virtual_size = size_by_layout()

    def __init__(self, text: str = "", *, goes_on: bool = False) -> None:
        """`goes_on`: the next piece does, with the last block of this one."""
        super().__init__(parser_factory=parser, open_links=False)
        self._first = text
        self.goes_on = goes_on

    async def on_mount(self, event: Mount) -> None:
        """Appended, even the first text: what the base class shows at first, it would not read again as it grows."""
        event.prevent_default()
        await self.append(self._first)
        if self.goes_on:
            self.close(goes_on=True)

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        return super().arrange(size.with_height(0), optimal)

    def render_lines(self, crop: Region) -> list[Strip]:
        return alike(super().render_lines, crop)

    def close(self, *, goes_on: bool) -> None:
        """Nothing will be added; no empty line stands below a block that the next piece goes on with."""
        self.goes_on = goes_on
        settled(self)
        for block in self.children[-1:] if goes_on else ():
            block.styles.margin = 0

    async def grow(self, text: str) -> None:
        """More of it, in the last block or behind it."""
        last = self.children[-1] if self.children else None
        await self.append(text)
        for block in self.children[-1:]:  # there is none when the program ends meanwhile
            if last is not block:
                if last is not None:
                    settled(last)
                opened(block)


class Room(Widget):
    """As high as the document that stood here, and will again once it is near to what is seen; in another width, and
    in place of one that was not laid out yet, that is an estimate."""

    DEFAULT_CSS = "Room { height: auto; }"

    def __init__(self, text: str, taken: Size = _UNKNOWN, *, goes_on: bool = False) -> None:
        super().__init__()
        self.text, self.goes_on = text, goes_on
        self._taken = taken

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        if width == self._taken.width:
            return self._taken.height
        return sum(1 + len(line) // max(1, width) for line in self.text.splitlines())


@dataclass(slots=True)
class _Piece:
    text: str
    goes_on: bool = False


class ReplyText(Column):
    """All of it."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._pieces = Pieces()
        self._first = text
        self._waiting: list[str] = []  # what is to be added; joined, where it comes faster than it can be shown
        self._is_growing = False  # until what is added has been laid out
        self._is_busy = False  # growing, or resting behind that
        self._is_whole = False  # nothing will be added
        self._is_held = False  # while somebody types
        self._typed_at = -_TYPING

    def compose(self) -> ComposeResult:
        pieces: list[_Piece] = []
        for part in self._pieces.feed(self._first):
            if part.begins or not pieces:
                for before in pieces[-1:]:
                    before.goes_on = part.goes_on
                pieces.append(_Piece(part.head))
            pieces[-1].text += part.text
        self._first = ""
        yield from (Room(one.text, goes_on=one.goes_on) for one in pieces[:-_AT_FIRST])
        yield from (Document(one.text, goes_on=one.goes_on) for one in pieces[-_AT_FIRST:])

    def on_mount(self) -> None:
        self.watch(self._scroll, "scroll_y", self._look_again, init=False)

    @property
    def _scroll(self) -> VerticalScroll:
        return next(one for one in self.ancestors if isinstance(one, VerticalScroll))

    def on_resize(self) -> None:
        self._look_again()

    def _look_again(self) -> None:
        if len(self.children) > 1:
            self.call_after_refresh(self._fold_far)

    def _fold_far(self) -> None:
        """What is farther than a screen from what is seen becomes room, and what comes near a document again. The last
        one stays, as it may grow."""
        if self._is_growing or not self.is_attached:
            return
        screen, top = self.screen.size.height, self.region.y
        for piece in self.children[:-1]:
            bottom = top + piece.outer_size.height
            near = bottom > -screen and top < 2 * screen
            if isinstance(piece, Room) and near:
                self.call_next(self._replace, piece, Document(piece.text, goes_on=piece.goes_on))
            elif isinstance(piece, Document) and not near and bottom > top:
                room = Room(piece.source, piece.outer_size, goes_on=piece.goes_on)
                self.call_next(self._replace, piece, room)
            top = bottom

    async def _replace(self, piece: Widget, other: Widget) -> None:
        if piece.is_attached:  # it may have been replaced since
            is_above, height = piece.region.bottom <= self._scroll.region.y, piece.outer_size.height
            with self.app.batch_update():
                await self.mount(other, before=piece)
                await piece.remove()
            if is_above:
                self.call_after_refresh(self._stay, other, height)

    def _stay(self, piece: Widget, before: int) -> None:
        """What is seen stays where it is, though a piece above it is higher or lower than what stood there."""
        if self.is_attached and (grown := piece.outer_size.height - before):
            self._scroll.scroll_to(y=self._scroll.scroll_y + grown, animate=False, force=True, immediate=True)

    def add(self, text: str) -> None:
        """Show more text behind what there is, soon."""
        self._waiting.append(text)
        self._go_on()

    def finish(self) -> None:
        """Nothing will be added."""
        self._is_whole = True
        self._settle()

    def _settle(self) -> None:
        if self._is_whole and not self._is_busy and not self._waiting:
            settled(self)

    def make_way(self) -> None:
        """A key was typed. What waits is shown right behind its echo, when the next key is farthest away."""
        self._typed_at = monotonic()
        self.call_after_refresh(self._go_on, behind_a_key=True)

    def _go_on(self, *, behind_a_key: bool = False) -> None:
        if self._is_busy or not self._waiting:
            return
        if behind_a_key or monotonic() - self._typed_at >= _TYPING:
            self._is_busy = self._is_growing = True
            self.call_next(self._show_waiting)
        elif not self._is_held:
            self._is_held = True
            self.set_timer(_TYPING, self._let_go)

    def _let_go(self) -> None:
        self._is_held = False
        self._go_on()

    async def _show_waiting(self) -> None:
        if not self.is_attached:  # another chat was opened
            return
        began = process_time()
        text = "".join(self._waiting)
        self._waiting = [text[_AT_ONCE:]] if text[_AT_ONCE:] else []
        with self.app.batch_update(), suppress(MountError):  # one layout for all of it; the chat may be left meanwhile
            for part in self._pieces.feed(text[:_AT_ONCE]):
                await self._show(part)
        self.call_after_refresh(self._rest, began)

    async def _show(self, part: Part) -> None:
        last = self.children[-1] if self.children else None
        if isinstance(last, Document) and not part.begins:
            await last.grow(part.text)
            return
        if isinstance(last, Document):
            last.close(goes_on=part.goes_on)
        await self.mount(Document(part.head + part.text))

    def _rest(self, began: float) -> None:
        """The frame is drawn. The next one comes once the program has idled for longer than this one took."""
        self._is_growing = False
        self._look_again()
        rest = _REST * (process_time() - began)
        self.set_timer(min(max(0.001, rest), _LONGEST_REST), self._end_rest)

    def _end_rest(self) -> None:
        self._is_busy = False
        self._go_on()
        self._settle()
