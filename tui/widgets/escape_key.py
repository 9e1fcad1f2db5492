"""Escape without a reply to stop: ends editing and returns to the prompt. Two presses edit the last message."""

from collections.abc import Callable

from tui.double_press import DoublePress
from tui.drafts import Prompt
from tui.footer_keys import key_name
from tui.types import Role
from tui.widgets.chat_view import ChatView

_TWICE = 1.0  # maximum seconds between two presses of Escape


class EscapeKey:
    """The state of the Escape key. `edit_last` edits the user's last message."""

    def __init__(self, view: ChatView, edit_last: Callable[[], None]) -> None:
        self._view = view
        self._edit_last = edit_last
        self._presses = DoublePress(_TWICE)
        self.has_just_stopped = False  # whether Escape stopped a reply, and nothing was typed since

    def press(self) -> None:
        """Handle Escape without a reply."""
        composer, area = self._view.composer, self._view.composer.area
        if self.has_just_stopped:  # another Escape for the stopped reply, which had already ended
            self.has_just_stopped = False
            return
        is_idle = area.has_focus and composer.edited is None and composer.prompt == Prompt()
        composer.cancel_editing()
        area.focus()
        if is_idle and self._presses.press():
            area.end_hint()
            self._edit_last()
        elif is_idle and self._view.chat.last_of(Role.USER) is not None:
            area.hint(f"Press {key_name('escape')} again to edit your last message", self._presses.seconds)
