"""Uses of private names of Textual, besides those of the Markdown widgets (see tui/widgets/markdown_internals.py).

tests/tui/test_textual_internals.py fails if a version of Textual changes a name that is used in these modules.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual._compositor import ChopsUpdate, Compositor
from textual._xterm_parser import XTermParser
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.geometry import Offset, Region
from textual.keys import Keys
from textual.message import Message
from textual.notifications import Notification
from textual.screen import Screen
from textual.selection import SELECT_ALL, Selection
from textual.strip import Strip
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Footer, TextArea
from textual.widgets._footer import FooterKey
from textual.widgets._toast import ToastRack

from tui.terminal_answers import AnswerFilter

_WORD = re.compile(r"\w[\w'’.-]*\w|\w")  # a double click selects it
_FRAME_PERIOD = 1 / 240  # seconds
_ALT_ENTER = "\x1b\r"  # sequence of terminals without the kitty protocol; Textual reports it as a plain Enter


def support_alt_enter() -> None:
    """Report Alt+Enter as Ctrl+J in every terminal."""
    ANSI_SEQUENCES_KEYS[_ALT_ENTER] = (Keys.ControlJ,)  # type: ignore[index]  # the table is typed as read-only


def ignore_answers() -> None:
    """Remove late answers of the terminal from the input of each parser."""
    if XTermParser.feed is not _feed:
        XTermParser.feed = _feed  # type: ignore[method-assign, assignment]


def _feed(parser: XTermParser, data: str) -> Iterable[Message]:
    answers = parser.__dict__.setdefault("_inglenook_answers", AnswerFilter())
    cleaned = answers.clean(data)
    return super(XTermParser, parser).feed(cleaned) if cleaned or not data else ()  # "" would end the input


def type_no_alt_digits() -> None:
    """Report Alt with a digit as such. Textual types the characters of a Mac keyboard in every terminal."""
    for sequence in [one for one, keys in ANSI_SEQUENCES_KEYS.items() if isinstance(keys, str)]:
        if len(sequence) == len("\x1b1") and sequence[0] == "\x1b":
            del ANSI_SEQUENCES_KEYS[sequence]  # type: ignore[attr-defined]  # the table is typed as read-only


def write_to_terminal(app: App[None], sequence: str) -> None:
    """Send an escape sequence to the terminal, in order with what the screens draw."""
    if app._driver is not None and not app.is_headless:
        app._driver.write(sequence)


def limit_notifications(app: App[None], most: int) -> None:
    """Close notifications that a newer one repeats, and others until at most `most` are shown: plain ones first, then
    the oldest, but never the newest.

    An error repeats another one with the same remedy, because their numbers or names may differ.
    """
    newest = {(one.severity, one.message): one for one in app._notifications}
    for one in [*app._notifications]:
        if newest[one.severity, one.message] is not one:
            _close(app, one)
    *older, _ = [*app._notifications] or [None]
    by_importance = sorted(filter(None, older), key=lambda one: one.severity != "information")
    for one in by_importance[: max(0, len(older) + 1 - most)]:
        _close(app, one)


def close_notifications(app: App[object]) -> None:
    """Close all notifications except warnings, which may be about the chats on disk."""
    for one in [*app._notifications]:
        if one.severity != "warning":
            _close(app, one)


def _close(app: App[Any], notification: Notification) -> None:
    """Close a notification. Textual leaves its holder on the screen, which would push the next one down."""
    app._unnotify(notification)
    for screen in app.screen_stack:
        screen.query(f"#{ToastRack._toast_id(notification)}").remove()


def follows_anchor(widget: Widget) -> bool:
    """Whether the widget scrolls to its end when it grows. It does not after the user has scrolled up."""
    return widget._anchored and not widget._anchor_released


def start_timer(widget: Widget, seconds: float, callback: Callable[[], object]) -> None:
    """Call `callback` once after a number of seconds.

    Textual's `set_timer` never does if another process runs for so long while the timer starts.
    """
    timer = Timer(widget, seconds, callback=partial(widget.call_next, callback), repeat=0, skip=False)
    timer._start()
    widget._timers.add(timer)


class ActiveCursor(TextArea):
    """Draws its cursor only while `show_cursor` is set. Textual checks that only in fields that are read-only."""

    @property
    def _draw_cursor(self) -> bool:
        return self.show_cursor and super()._draw_cursor


class KeyFooter(Footer):
    """Replaces its keys only if they change, and applies their styles once.

    Textual's footer does both after every change of the focus, and three times: most of the work after many keys.
    """

    _shown: Sequence[tuple[Binding, bool, str]] | None = None  # None: no keys are shown

    def compose(self) -> ComposeResult:
        self._shown, keys = None, self._keys()
        for widget in super().compose():
            if isinstance(widget, FooterKey):
                self._shown = keys
                widget.set_reactive(FooterKey.compact, self.compact)  # otherwise it is compact until it is mounted
            yield widget

    def bindings_changed(self, screen: Screen[object]) -> None:
        if not self.is_attached or screen is not self.screen or self._keys() != self._shown:
            super().bindings_changed(screen)

    def _keys(self) -> Sequence[tuple[Binding, bool, str]]:
        return [
            (binding, enabled, tooltip)
            for _, binding, enabled, tooltip in self.screen.active_bindings.values()
            if binding.show
        ]


class _ChangedOnly(Compositor):
    """Renders the widgets that overlap a changed region. Textual would render all visible ones for each frame."""

    _changed: Collection[Region] = ()

    def render_partial_update(self) -> ChopsUpdate | None:
        self._changed = self._dirty_regions.copy()
        try:
            return super().render_partial_update()
        finally:
            self._changed = ()

    def _get_renders(self, crop: Region | None = None) -> Iterable[tuple[Region, Region, list[Strip]]]:
        if not self._changed:
            yield from super()._get_renders(crop)
            return
        for widget, (region, clip) in self.visible_widgets.items():
            drawn = region.intersection(clip)
            if any(drawn.overlaps(changed) for changed in self._changed):
                yield region, clip, widget.render_lines(drawn.translate(-region.offset))


class SteadyScreen(Screen[None]):
    """Skips drawing while `is_unsettled`: content that moves right after the layout would flicker.

    A change is drawn at most 9 ms after the frame before it.
    """

    __frames: Timer | None = None

    def __init__(self) -> None:
        super().__init__()
        self._compositor = _ChangedOnly()

    @property
    def _update_timer(self) -> Timer:
        # After a frame, the next one can take two periods of the timer. With Textual's period, 1 / 60 s, a key during a
        # reply would sometimes be seen after 33 ms.
        if self.__frames is None:
            self.__frames = self.set_interval(_FRAME_PERIOD, self._on_timer_update, name="screen_update", pause=True)
        return self.__frames

    @property
    def is_unsettled(self) -> bool:
        return False

    def get_widget_and_offset_at(self, x: int, y: int) -> tuple[Widget | None, Offset | None]:
        """Return the widget at a position, unless it was just removed and is only still drawn.

        Textual would fail on a mouse button that is pressed there.
        """
        widget, offset = super().get_widget_and_offset_at(x, y)
        is_removed = widget is not None and widget is not self and widget.parent is None
        return (None, None) if is_removed else (widget, offset)

    def _select_all_in_widget(self, widget: Widget) -> None:
        """On a double click, select the word under the mouse. Textual would select all text of the widget."""
        under, offset = self.get_widget_and_offset_at(*self.app.mouse_position)
        text = widget.get_selection(SELECT_ALL) if under is widget else None
        lines = [] if text is None else text[0].splitlines()
        if offset is None or offset.y >= len(lines):
            super()._select_all_in_widget(widget)
            return
        words = (word.span() for word in _WORD.finditer(lines[offset.y]))
        start, end = next((span for span in words if span[0] <= offset.x < span[1]), (offset.x, offset.x + 1))
        self.selections = {widget: Selection(Offset(start, offset.y), Offset(end, offset.y))}

    def _compositor_refresh(self) -> None:
        if not self.is_unsettled:
            super()._compositor_refresh()
