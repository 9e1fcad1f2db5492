"""The window of the terminal: its title, and notifications on the desktop. Sends escape sequences to the terminal."""

from collections.abc import Callable, Mapping

from tui.plain_text import single_line, start

_LONGEST = 80  # characters
_SAVE_TITLE, _RESTORE_TITLE = "\x1b[22;2t", "\x1b[23;2t"
_PROGRAM = "ingle"
# Terminals that show OSC 9 as a notification, by TERM_PROGRAM and TERM. Some others take it for another command.
_NOTIFYING = frozenset({"iTerm.app", "WezTerm", "ghostty", "xterm-kitty", "xterm-ghostty", "foot", "wezterm"})
_WITHOUT_TITLE = ("", "dumb", "linux")  # values of TERM


class TerminalWindow:
    """Sets the terminal's title and sends notifications.

    `write` receives the escape sequences. `environment` identifies the terminal; without TERM, nothing is written.
    `rings`: whether to notify the user when a long reply ends.
    """

    def __init__(self, write: Callable[[str], None], environment: Mapping[str, str], *, rings: bool = True) -> None:
        self._write = write
        self.rings = rings
        self._has_title = environment.get("TERM", "") not in _WITHOUT_TITLE
        self._notifies = bool(_NOTIFYING & {environment.get("TERM_PROGRAM", ""), environment.get("TERM", "")})
        self._title = ""

    def show_title(self, title: str) -> None:
        """Show the title of a chat in the title of the window. Before the first one, save the present title."""
        title = f"{start(title, _LONGEST)} · {_PROGRAM}"
        if self._has_title and title != self._title:
            self._write(f"{'' if self._title else _SAVE_TITLE}\x1b]2;{title}\x07")
            self._title = title

    def restore_title(self) -> None:
        """Show the title from before the first `show_title`, in terminals that have saved it."""
        if self._title:
            self._write(_RESTORE_TITLE)

    def notify(self, text: str) -> None:
        """Show a notification on the desktop, in terminals that can."""
        if self._notifies:
            self._write(f"\x1b]9;{_PROGRAM}: {single_line(text)}\x07")
