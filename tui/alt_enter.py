"""Makes Alt+Enter insert a line break. Changes a private table of Textual (see tui/widgets/textual_internals.py)."""

from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual.keys import Keys

_ALT_ENTER = "\x1b\r"  # sequence of terminals without the kitty protocol; Textual reports it as a plain Enter


def support_alt_enter() -> None:
    """Report Alt+Enter as Ctrl+J in every terminal."""
    ANSI_SEQUENCES_KEYS[_ALT_ENTER] = (Keys.ControlJ,)  # type: ignore[index]  # the table is typed as read-only
