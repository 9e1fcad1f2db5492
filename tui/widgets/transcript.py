"""The messages of the shown branch. Only messages near the visible part are mounted."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from textual import on, work
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.geometry import Region, Size
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

from tui.attachment_sizes import AttachmentSizes
from tui.types import Message, MessageId
from tui.widgets.folded import Folded
from tui.widgets.growing import Column, keep_position, render_uniform, size_by_layout
from tui.widgets.message_view import MessageView
from tui.widgets.new_text_mark import NewTextMark
from tui.widgets.reply_status import ReplyStatus
from tui.widgets.textual_internals import follows_anchor

_SCREENS = 1.5  # messages with an estimated height of this many screens are mounted at once
_WINDOW = "window"  # group of the workers that move the window
MAX_MOUNTED = 80  # maximum number of mounted messages, unless more are visible; the farthest are unmounted first

NOTHING: Mapping[MessageId, str] = MappingProxyType({})  # for a branch in which no messages are left out
Siblings = Callable[[MessageId], tuple[MessageId, ...]]


class Transcript(VerticalScroll, can_focus=False):
    """A window over the branch: messages from index `_first` up to but excluding `_end` are mounted.

    Both are set before the first await, so that other code sees the new window at once.
    """

    virtual_size = size_by_layout()

    def __init__(self, sizes: AttachmentSizes) -> None:
        super().__init__()
        self._sizes = sizes
        self.status = ReplyStatus()  # below the last message
        self.mark = NewTextMark(self.status)  # below the visible part; the parent of this widget composes it
        self._path: list[Message] = []
        self._siblings: Siblings = lambda message: (message,)
        self._left_out: Mapping[MessageId, str] = NOTHING
        self._first = self._end = 0
        # the topmost message, while messages above the window are being mounted
        self._arriving: MessageView | None = None
        self._moving = False  # whether the window is moving; scrolling then starts no other move
        self._changing = asyncio.Lock()  # held while the branch changes

    def compose(self) -> ComposeResult:
        # At least as high as the screen, because an anchor could not scroll to the bottom otherwise.
        with Column(id="messages"):
            yield self.status

    def render_lines(self, crop: Region) -> list[Strip]:
        return render_uniform(super().render_lines, crop)

    @property
    def _messages(self) -> Column:
        return self.query_one("#messages", Column)

    async def show(
        self,
        path: Sequence[Message],
        siblings: Siblings,
        *,
        left_out: Mapping[MessageId, str] = NOTHING,
        at: MessageId | None = None,
    ) -> None:
        """Show a branch at its end, or at the message `at`.

        `left_out`: summary by message that is not sent to the model; "" unless the message is the last of a summary.
        """
        async with self._changing:
            await self._show(path, siblings, left_out, at)

    async def _show(
        self,
        path: Sequence[Message],
        siblings: Siblings,
        left_out: Mapping[MessageId, str],
        at: MessageId | None = None,
    ) -> None:
        self._path, self._siblings, self._left_out = list(path), siblings, left_out
        index = None if at is None else self._index_of(at)
        if index is None:
            await self._replace_window(self._window_start(len(self._path)), len(self._path))
        else:
            await self._replace_window(self._window_start(index), self._window_end(index))
        view = None if at is None else self.view(at)
        self.mark.hide()
        self.anchor(view is None)
        if view is not None:
            view.focus(scroll_visible=False)
            self.call_after_refresh(self.scroll_to_widget, view, animate=False, top=True)

    async def _replace_window(self, first: int, end: int) -> None:
        """Mount the messages from index `first` up to but excluding `end`, and no others."""
        self.workers.cancel_group(self, _WINDOW)
        self._arriving = None
        self._moving = True
        self._first, self._end = first, end
        with self.app.batch_update():
            await self._messages.remove_children(MessageView)
            await self._messages.mount_all(self._views(first, end), before=self.status)
        self._moving = False

    async def show_start(self) -> None:
        """Scroll to the first message."""
        async with self._changing:
            self.anchor(False)
            if self._first > 0:
                await self._replace_window(0, self._window_end(0))
            self.scroll_to(y=0, animate=False, force=True, immediate=True)

    async def show_end(self) -> bool:
        """Scroll to the last message. Returns whether the messages were mounted again."""
        async with self._changing:
            is_cut = self._end < len(self._path)
            if is_cut:
                await self._replace_window(self._window_start(len(self._path)), len(self._path))
            self.mark.hide()
            self.anchor()
            return is_cut

    def note_new_text(self) -> None:
        """Show the mark for new text below, unless the end is visible."""
        if not follows_anchor(self):
            self.mark.display = True

    async def append(self, message: Message, *, scrolls: bool = True) -> None:
        """Append a message to the branch. With `scrolls`, scroll to it; otherwise only if the end is visible."""
        async with self._changing:
            scrolls = scrolls or follows_anchor(self)
            if self._end < len(self._path) and scrolls:
                await self._show([*self._path, message], self._siblings, self._left_out)
                return
            self._path.append(message)
            if self._end == len(self._path) - 1:
                self._end += 1
                await self._messages.mount(*self._views(self._end - 1, self._end), before=self.status)
            if scrolls:
                self.anchor()
            else:
                self.mark.display = True

    async def truncate_after(self, message: MessageId | None) -> None:
        """Shorten the branch so that `message` is the last one; None removes all messages."""
        async with self._changing:
            index = None if message is None else self._index_of(message)
            end = 0 if index is None else index + 1
            if end <= self._first:
                await self._show(self._path[:end], self._siblings, self._left_out)
            else:
                del self._path[end:]
                self._end = min(self._end, end)
                await self._unmount_outside()

    async def replace_message(self, message: Message) -> None:
        """Replace a message of the branch and its view, because its text has changed."""
        async with self._changing:
            if (index := self._index_of(message.id)) is None:
                return
            self._path[index] = message
            if (old := self.view(message.id)) is not None:
                (new,) = self._views(index, index + 1)
                with self.app.batch_update():
                    await self._messages.mount(new, before=old)
                    if old.has_focus:
                        new.focus(scroll_visible=False)
                    await old.remove()

    def update_message(self, message: Message) -> None:
        """Replace a message of the branch, which may be unmounted."""
        index = self._index_of(message.id)
        if index is None:
            return
        self._path[index] = message
        if (view := self.view(message.id)) is not None:
            view.update_message(message, self._siblings(message.id))

    def view(self, message: MessageId) -> MessageView | None:
        """Return the widget of a message, or None if it is not mounted."""
        return next((view for view in self._mounted() if view.message.id == message), None)

    @on(Folded.Opened)
    def show_opened(self, event: Folded.Opened) -> None:
        """Scroll to the start of a part that the user has opened. An anchor would keep the end in view."""
        event.stop()
        self.anchor(False)
        self.call_after_refresh(self._scroll_to_start, event.part)

    def _scroll_to_start(self, part: Widget) -> None:
        """Scroll as little as possible so that a part is visible; to its start if it is higher than the screen."""
        is_high = part.outer_size.height > self.size.height
        self.scroll_to_widget(part, animate=False, top=is_high)

    def focus_beside(self, message: MessageId, step: int) -> bool:
        """Focus the message `step` positions after this one. Returns False if that message is not mounted."""
        index = self._index_of(message)
        target = None if index is None else index + step
        if target is None or not 0 <= target < len(self._path):
            return False
        view = self.view(self._path[target].id)
        if view is not None:
            view.focus()
        return view is not None

    def _mounted(self) -> list[MessageView]:
        return [child for child in self._messages.children if isinstance(child, MessageView)]

    def _index_of(self, message: MessageId) -> int | None:
        return next((index for index, one in enumerate(self._path) if one.id == message), None)

    def _views(self, first: int, end: int) -> list[MessageView]:
        latest = self.status.snapshot
        return [
            MessageView(
                message if latest is None or latest.id != message.id else latest,
                self._siblings(message.id),
                self._sizes,
                left_out=message.id in self._left_out,
                summary=self._left_out.get(message.id, ""),
            )
            for message in self._path[first:end]
        ]

    # --- the window

    def _visible_indices(self) -> list[int]:
        """Return the indices of the visible messages."""
        screen = Region(0, round(self.scroll_y), *self.size)
        return [
            index for index, view in enumerate(self._mounted(), self._first) if view.virtual_region.overlaps(screen)
        ]

    def _estimated_lines(self, message: Message) -> int:
        """Return the estimated height of a message in lines."""
        width = max(20, self.size.width or self.app.size.width)
        return 3 + message.text.count("\n") + len(message.text) // width

    def _window_start(self, index: int) -> int:
        """Return the first index of a window that ends near `index`, with enough messages before it."""
        lines_left = _SCREENS * self.app.size.height
        while index > 0 and lines_left > 0:
            index -= 1
            lines_left -= self._estimated_lines(self._path[index])
        return index

    def _window_end(self, index: int) -> int:
        lines_left = _SCREENS * self.app.size.height
        while index < len(self._path) and lines_left > 0:
            lines_left -= self._estimated_lines(self._path[index])
            index += 1
        return index

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if new_value >= self.max_scroll_y and not self._shows_end:
            self.anchor(False)
        elif new_value >= self.max_scroll_y:
            self.call_next(self._anchor_at_end)  # later, because an anchor would end the current scroll step
        if self._moving:
            return
        if new_value <= 2 and self._first > 0 and old_value > new_value:
            self._moving = True
            self._move_up()
        elif new_value >= self.max_scroll_y - 2 and self._end < len(self._path) and new_value > old_value:
            self._moving = True
            self._move_down()

    @property
    def _shows_end(self) -> bool:
        """Whether the window includes the end of the branch, and is not moving."""
        return self._end == len(self._path) and not self._moving

    def _anchor_at_end(self) -> None:
        if self.scroll_y >= self.max_scroll_y and self._shows_end:  # the user may have scrolled meanwhile
            self.mark.hide()
            self.anchor()

    @work(group=_WINDOW, description="window")
    async def _move_up(self) -> None:
        """Mount messages above the window, keep the visible part in place, and unmount messages far below."""
        above, seen = self._first, self._visible_indices()
        self._first = self._window_start(above)
        stays, *_ = self._mounted()
        await self._mount(self._first, above, before=0)
        await self._restore_position(stays)
        self._end = min(self._end, max([self._first + MAX_MOUNTED, *(index + 1 for index in seen)]))
        await self._unmount_outside()
        self._moving = False

    @work(group=_WINDOW, description="window")
    async def _move_down(self) -> None:
        """Mount messages below the window, and unmount messages far above."""
        below, seen = self._end, self._visible_indices()
        self._end = self._window_end(below)
        await self._mount(below, self._end)
        self._first = max(self._first, min([self._end - MAX_MOUNTED, *seen]))
        await self._unmount_outside()
        self._moving = False

    async def _mount(self, first: int, end: int, *, before: int | None = None) -> None:
        position = self.status if before is None else before
        with self.app.batch_update():
            await self._messages.mount_all(self._views(first, end), before=position)

    async def _unmount_outside(self) -> None:
        """Unmount messages outside the window, and keep the visible part in its position."""
        inside = {message.id for message in self._path[self._first : self._end]}
        views = self._mounted()
        kept = [view for view in views if view.message.id in inside]
        with self.app.batch_update():
            if kept and kept[0] is not views[0]:
                keep_position(self, kept[0].styles.margin.top - kept[0].virtual_region.y)
            for view in views:
                if view not in kept:
                    await view.remove()

    @property
    def is_unsettled(self) -> bool:
        """Whether the last layout moved the visible part. The part is moved back right after the layout."""
        return self._arriving is not None and bool(self._arriving.outer_size.width)

    async def _restore_position(self, view: MessageView) -> None:
        """Scroll back to `view` after the messages above it are laid out."""
        laid_out, done = self.screen.screen_layout_refresh_signal, asyncio.Event()
        arriving = self._arriving = self._mounted()[0]

        def look(_: Screen[object]) -> None:
            if self._arriving is arriving and self.is_unsettled:
                laid_out.unsubscribe(arriving)
                self._arriving = None
                keep_position(self, view.virtual_region.y - view.styles.margin.top)
                self.refresh()  # the moved part may already be drawn
                done.set()

        laid_out.subscribe(arriving, look, immediate=True)
        look(self.screen)
        await done.wait()

    def watch_virtual_size(self, size: Size) -> None:
        """Move the window up if it does not fill the screen, because then the user cannot scroll to move it."""
        if not self._moving and self._first > 0 and 0 < size.height <= self.size.height:
            self._moving = True
            self._move_up()
