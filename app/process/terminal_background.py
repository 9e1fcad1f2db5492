"""Ask the terminal whether its background is dark."""

import os
import re
import select
import sys
import time
from contextlib import suppress

_SECONDS = 0.15  # longest wait for the answer
_ASK = b"\x1b]11;?\x1b\\\x1b[c"  # asks for the background color, then the terminal type, which every terminal reports
_COLOR = re.compile(rb"\x1b\]11;rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})")
_KIND = re.compile(rb"\x1b\[\?[0-9;]*c")
_WEIGHTS = (0.299, 0.587, 0.114)  # weights of red, green, and blue in the brightness
_LIGHT_COLORS = (7, *range(9, 16))  # numbers of the light colors among the terminal's 16


def is_background_dark(color_fgbg: str = "") -> bool:
    """Whether the background is dark, according to OSC 11, or else to COLORFGBG ("15;0"). True if both are unknown."""
    answer = _ask() if sys.platform != "win32" else b""
    if (found := parse_background(answer)) is not None:
        return found
    last = color_fgbg.rpartition(";")[2]
    return not (last.isdecimal() and int(last) in _LIGHT_COLORS)


def parse_background(answer: bytes) -> bool | None:
    """Return whether the color in an answer to OSC 11 is dark; None if the answer contains no color."""
    found = _COLOR.search(answer)
    if found is None:
        return None
    levels: list[float] = [int(part, 16) / (16 ** len(part) - 1) for part in found.groups()]
    return sum(weight * level for weight, level in zip(_WEIGHTS, levels, strict=True)) < 0.5


def _ask() -> bytes:
    """Send the queries to the terminal. Returns the bytes of its answer that arrive in time."""
    import termios
    import tty

    answer = b""
    with suppress(OSError, termios.error):
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        try:
            before = termios.tcgetattr(terminal)
            try:
                tty.setcbreak(terminal)
                os.write(terminal, _ASK)
                answer = _read(terminal)
            finally:
                termios.tcsetattr(terminal, termios.TCSANOW, before)
        finally:
            os.close(terminal)
    return answer


def _read(terminal: int) -> bytes:
    answer, end = b"", time.monotonic() + _SECONDS
    while not _KIND.search(answer) and select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0]:
        answer += os.read(terminal, 256)
    return answer
