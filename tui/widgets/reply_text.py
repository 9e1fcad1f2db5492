"""The Markdown of a reply, shown while it comes and afterwards.

A long text is shown as several documents. Those far from what is seen are folded to empty room of their height, so that
a frame costs as much as what is near, however long the text. Knows that it is scrolled, not by whom.
Every address is shown; a click on one is told as Textual's own `Markdown.LinkClicked`, and opens nothing.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from time import monotonic, process_time

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widget import MountError, Widget

from tui.markdown import PIECE, Pieces, TextPart
from tui.widgets.document import Document
from tui.widgets.growing import Column, DocumentText, Placeholder, keep_position, release_reserve

_TYPING = 0.3  # seconds between two keys of somebody who types on
_REST = 25  # times the CPU time of a frame: 4 % of a core are used, for an engine may compute on all of them
_LONGEST_REST = 0.3  # seconds
_READ_AT_ONCE = 40 * PIECE  # characters that are cut into pieces in one frame
_AT_ONCE = 2 * PIECE  # characters that are laid out in one frame
_AT_FIRST = 4  # pieces at the end of a text that are laid out at once


class ReplyText(Column):
    """All of it."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._pieces = Pieces()
        self._first = text
        self._unread: list[str] = []  # what is to be added; joined, where it comes faster than it can be shown
        self._unshown: list[TextPart] = []  # what was read of it
        self._is_growing = False  # until what is added has been laid out
        self._is_changing = False  # documents become room, or room a document
        self._unfolded: tuple[Document, int] | None = None  # until it has its place; and its room's height
        self._is_busy = False  # growing, or resting behind that
        self._is_complete = False  # nothing will be added
        self._is_held = False  # while somebody types
        self._typed_at = -_TYPING

    def compose(self) -> ComposeResult:
        pieces = _join_pieces(self._pieces.feed(self._first))
        self._first = ""
        if pieces[:-_AT_FIRST]:
            yield Placeholder(pieces[:-_AT_FIRST])
        yield from (Document(one.text, adjoined=one.adjoined) for one in pieces[-_AT_FIRST:])

    def on_mount(self) -> None:
        self.screen.screen_layout_refresh_signal.subscribe(self, lambda _: self._after_layout(), immediate=True)

    @property
    def _scroll(self) -> VerticalScroll:
        return next(one for one in self.ancestors if isinstance(one, VerticalScroll))

    # --- what is seen

    def on_resize(self) -> None:
        self._after_layout()

    def _after_layout(self) -> None:
        """Called when everything has its place. What changes now gets its own in the layout after which this is called
        again: there is one change at a time."""
        if self._unfolded is not None:
            document, height = self._unfolded
            if not document.outer_size.width:
                return
            self._unfolded = None
            if self._screen_line(document) < 0:  # what is seen is below it
                keep_position(self._scroll, document.outer_size.height - height)
        if len(self.children) > 1:
            self.call_after_refresh(self._fold_far)  # an anchor may scroll only then

    def _screen_line(self, widget: Widget) -> int:
        """Where it begins, by the last layout and what was scrolled since: 0 is the first line that is seen."""
        return widget.region.y - self._scroll.children[0].region.y - round(self._scroll.scroll_y)

    def _fold_far(self) -> None:
        """What is farther than a screen from what is seen becomes room, and of what comes near the nearest becomes a
        document again. The last one stays, as it may grow."""
        if self._is_growing or self._is_changing or self._unfolded is not None or not self.is_attached:
            return
        screen, top = self.screen.size.height, self._screen_line(self)
        far: list[Document] = []
        near: dict[int, DocumentText] = {}
        for child in self.children[:-1]:
            height = child.outer_size.height
            if isinstance(child, Placeholder):
                near |= {abs(top + line): piece for line, piece in child.pieces_within(-screen - top, 2 * screen - top)}
            elif isinstance(child, Document) and height and (top + height <= -screen or top >= 2 * screen):
                far.append(child)
            top += height
        if far or near:
            self._is_changing = True
            self.call_next(self._change, far, near[min(near)] if near else None)

    async def _change(self, far: list[Document], near: DocumentText | None) -> None:
        with self.app.batch_update(), suppress(MountError):  # the chat may be left meanwhile
            for document in far:
                await self._fold(document)
            if near is not None:
                await self._unfold(near)
        self._is_changing = False

    async def _fold(self, document: Document) -> None:
        """It becomes room, of those beside it if there are some."""
        if not document.is_attached:
            return
        piece = DocumentText(document.source, document.adjoined, document.outer_size)
        above, below = self._adjacent_placeholders(document)
        if above is not None:
            above.set_pieces([*above.pieces, piece, *(below.pieces if below else ())])
            if below is not None:
                await below.remove()
        elif below is not None:
            below.set_pieces([piece, *below.pieces])
        else:
            await self.mount(Placeholder([piece]), before=document)
        await document.remove()

    def _adjacent_placeholders(self, child: Widget) -> tuple[Placeholder | None, Placeholder | None]:
        """The room right above, and right below."""
        index = self.children.index(child)
        above, below = self.children[max(0, index - 1) : index], self.children[index + 1 : index + 2]
        return (
            next((one for one in above if isinstance(one, Placeholder)), None),
            next((one for one in below if isinstance(one, Placeholder)), None),
        )

    async def _unfold(self, piece: DocumentText) -> None:
        """It becomes a document, between the room of what is above it and of what is below."""
        holder = next((one for one in self.children if isinstance(one, Placeholder) and piece in one.pieces), None)
        if holder is None:
            return
        index, height = holder.pieces.index(piece), piece.height(self.size.width)
        above, below = holder.pieces[:index], holder.pieces[index + 1 :]
        document = Document(piece.text, adjoined=piece.adjoined)
        if above:
            await self.mount(document, *([Placeholder(below)] if below else ()), after=holder)
            holder.set_pieces(above)
        else:
            await self.mount(document, before=holder)
            holder.set_pieces(below)
            if not below:
                await holder.remove()
        self._unfolded = document, height

    # --- what comes

    def add(self, text: str) -> None:
        """Show more text behind what there is, soon."""
        self._unread.append(text)
        self._show_soon()

    def finish(self) -> None:
        """Nothing will be added."""
        self._is_complete = True
        self._release_when_done()

    @property
    def has_pending(self) -> bool:
        """Whether there is text that is not shown yet, or not laid out."""
        return self._is_busy or self._has_unshown

    @property
    def _has_unshown(self) -> bool:
        return bool(self._unread or self._unshown)

    def _release_when_done(self) -> None:
        if self._is_complete and not self.has_pending:
            release_reserve(self)

    def yield_to_typing(self) -> None:
        """A key was typed. What waits is shown right behind its echo, when the next key is farthest away."""
        self._typed_at = monotonic()
        self.call_after_refresh(self._show_soon, after_key=True)

    def _show_soon(self, *, after_key: bool = False) -> None:
        if self._is_busy or not self._has_unshown:
            return
        if after_key or monotonic() - self._typed_at >= _TYPING:
            self._is_busy = self._is_growing = True
            self.call_next(self._show_waiting)
        elif not self._is_held:
            self._is_held = True
            self.set_timer(_TYPING, self._end_hold)

    def _end_hold(self) -> None:
        self._is_held = False
        self._show_soon()

    async def _show_waiting(self) -> None:
        if not self.is_attached:  # another chat was reserve_lines
            return
        began = process_time()
        self._read()
        with self.app.batch_update(), suppress(MountError):  # one layout for all of it; the chat may be left meanwhile
            await self._skip_far()
            left = _AT_ONCE
            while self._unshown and left > 0:
                left -= PIECE if self._unshown[0].begins else 0
                left -= await self._show(max(left, PIECE))
        self.call_after_refresh(self._pause, began)

    def _read(self) -> None:
        text = "".join(self._unread)
        self._unread = [text[_READ_AT_ONCE:]] if text[_READ_AT_ONCE:] else []
        self._unshown += self._pieces.feed(text[:_READ_AT_ONCE])

    async def _skip_far(self) -> None:
        """What comes faster than it can be laid out becomes room, but for its end and what the last document lacks."""
        begins = [index for index, part in enumerate(self._unshown) if part.begins]
        if len(begins) <= _AT_FIRST:
            return
        first, end = begins[0], begins[-_AT_FIRST]
        for part in self._unshown[:first]:
            await self._append(part)
        self._close_last(self._unshown[first])
        await self.mount(Placeholder(_join_pieces(self._unshown[first : end + 1])[:-1]))
        del self._unshown[:end]

    async def _show(self, most: int) -> int:
        """So many characters of what waits first, at most; how many those are."""
        part = self._unshown[0]
        now, later = part.text[:most], part.text[most:]
        self._unshown[:1] = [TextPart(later)] if later else []
        await self._append(replace(part, text=now))
        return len(now)

    async def _append(self, part: TextPart) -> None:
        last = self.children[-1] if self.children else None
        if isinstance(last, Document) and not part.begins:
            await last.grow(part.text)
        else:
            self._close_last(part)
            await self.mount(Document(part.head + part.text))

    def _close_last(self, following: TextPart) -> None:
        for last in self.children[-1:]:
            if isinstance(last, Document):
                last.close(adjoined=following.adjoins)

    def _pause(self, began: float) -> None:
        """The frame is drawn. The next one comes once the program has idled for longer than this one took."""
        self._is_growing = False
        self._after_layout()
        rest = _REST * (process_time() - began)
        self.set_timer(min(max(0.001, rest), _LONGEST_REST), self._end_pause)

    def _end_pause(self) -> None:
        self._is_busy = False
        self._show_soon()
        self._release_when_done()


def _join_pieces(parts: Iterable[TextPart]) -> list[DocumentText]:
    pieces: list[DocumentText] = []
    for part in parts:
        if part.begins or not pieces:
            for before in pieces[-1:]:
                before.adjoined = part.adjoins
            pieces.append(DocumentText(part.head))
        pieces[-1].text += part.text
    return pieces
