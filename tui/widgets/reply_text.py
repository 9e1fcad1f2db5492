"""The Markdown text of a reply, while it is generated and afterwards.

A long text is shown as several documents. Documents far from the visible part are replaced with placeholders of the
same height, so that the cost of a frame does not depend on the length of the text. A click on a link posts Textual's
`Markdown.LinkClicked` and opens nothing.
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
from tui.widgets.textual_internals import start_timer

_TYPING = 0.3  # the user is typing if two keys are at most this many seconds apart
# pause in multiples of a frame's CPU time: limits drawing to 4 % of a core, because the engine may need all cores
_REST = 25
_LONGEST_REST = 0.2  # maximum pause in seconds
_READ_AT_ONCE = 40 * PIECE  # maximum number of characters that are split into pieces in one frame
_AT_ONCE = 2 * PIECE  # maximum number of characters that are laid out in one frame
_AT_FIRST = 4  # number of pieces at the end of a text that are laid out first
_FOLDED_AT_ONCE = 4  # number of far documents of a growing reply that are replaced together: a change needs layouts


class ReplyText(Column):
    """The whole text of one reply."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._pieces = Pieces()
        self._first = text
        self._unread: list[str] = []  # received text that is not split into pieces yet
        self._unshown: list[TextPart] = []  # pieces of text that are not shown yet
        self._is_growing = False  # whether added text is not laid out yet
        self._is_changing = False  # whether documents and placeholders are being exchanged
        # the document that was mounted last until it is laid out, and the height of its placeholder
        self._unfolded: tuple[Document, int] | None = None
        self._is_busy = False  # whether it is growing, or pausing after a frame
        self._is_complete = False  # whether the text is complete
        self._is_held = False  # whether it waits until the user stops typing
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

    # --- the visible part

    def on_resize(self) -> None:
        self._after_layout()

    def _after_layout(self) -> None:
        """Make one change of documents and placeholders. Runs after each layout, so the next layout continues."""
        if self._unfolded is not None:
            document, height = self._unfolded
            if not document.outer_size.width:
                return
            self._unfolded = None
            if self._screen_line(document) < 0:  # the visible part is below the document
                keep_position(self._scroll, document.outer_size.height - height)
        if len(self.children) > 1:
            self.call_after_refresh(self._fold_far)  # the scroll position can be corrected only after the refresh

    def _screen_line(self, widget: Widget) -> int:
        """Return the first line of a widget relative to the screen, given the last layout and the scroll position."""
        return widget.region.y - self._scroll.children[0].region.y - round(self._scroll.scroll_y)

    def _fold_far(self) -> None:
        """Replace documents more than a screen away with placeholders, and unfold the nearest placeholder near the
        screen.

        The last document is never replaced, because it may grow.
        """
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
        if len(far) >= (1 if self._is_complete else _FOLDED_AT_ONCE) or near:
            self._is_changing = True
            self.call_next(self._change, far, near[min(near)] if near else None)

    async def _change(self, far: list[Document], near: DocumentText | None) -> None:
        with self.app.batch_update(), suppress(MountError):  # the user may leave the chat meanwhile
            for document in far:
                await self._fold(document)
            if near is not None:
                await self._unfold(near)
        self._is_changing = False

    async def _fold(self, document: Document) -> None:
        """Replace a document with a placeholder, or add it to an adjacent placeholder."""
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
        """Return the placeholders directly above and below a widget."""
        index = self.children.index(child)
        above, below = self.children[max(0, index - 1) : index], self.children[index + 1 : index + 2]
        return (
            next((one for one in above if isinstance(one, Placeholder)), None),
            next((one for one in below if isinstance(one, Placeholder)), None),
        )

    async def _unfold(self, piece: DocumentText) -> None:
        """Replace one of a placeholder's documents with a widget. Placeholders remain for the other documents."""
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

    # --- new text

    def add(self, text: str) -> None:
        """Append text. It is shown in one of the next frames."""
        self._unread.append(text)
        self._show_soon()

    def finish(self) -> None:
        """Mark the text as complete."""
        self._is_complete = True
        self._release_when_done()

    @property
    def has_pending(self) -> bool:
        """Whether some text is not shown or not laid out yet."""
        return self._is_busy or self._has_unshown

    @property
    def _has_unshown(self) -> bool:
        return bool(self._unread or self._unshown)

    def _release_when_done(self) -> None:
        if self._is_complete and not self.has_pending:
            release_reserve(self)
            self._after_layout()

    def yield_to_typing(self) -> None:
        """Show waiting text right after a key is drawn, because then the next key is farthest away."""
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
            start_timer(self, _TYPING, self._end_hold)

    def _end_hold(self) -> None:
        self._is_held = False
        self._show_soon()

    async def _show_waiting(self) -> None:
        if not self.is_attached:  # the user has opened another chat
            return
        started = process_time()
        self._read()
        # one layout for all changes; the user may leave the chat meanwhile
        with self.app.batch_update(), suppress(MountError):
            await self._skip_far()
            left = _AT_ONCE
            while self._unshown and left > 0:
                left -= PIECE if self._unshown[0].begins else 0
                left -= await self._show(max(left, PIECE))
        self.call_after_refresh(self._pause, started)

    def _read(self) -> None:
        text = "".join(self._unread)
        self._unread = [text[_READ_AT_ONCE:]] if text[_READ_AT_ONCE:] else []
        self._unshown += self._pieces.feed(text[:_READ_AT_ONCE])

    async def _skip_far(self) -> None:
        """If text arrives faster than it can be laid out, replace all of it but the end with a placeholder."""
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
        """Show at most `most` characters of the first part in `_unshown`. Returns the number of characters shown."""
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
            # a reserve below a reply of one line would move the text up and down
            await self.mount(Document(part.head + part.text, grows=last is not None))

    def _close_last(self, following: TextPart) -> None:
        for last in self.children[-1:]:
            if isinstance(last, Document):
                last.close(adjoined=following.adjoins)

    def _pause(self, started: float) -> None:
        """Pause after a frame, in proportion to the CPU time that it took since `started`."""
        self._is_growing = False
        self._after_layout()
        rest = _REST * (process_time() - started)
        start_timer(self, min(max(0.001, rest), _LONGEST_REST), self._end_pause)

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
