"""The width of the terminal that a stream writes to."""

import os
from typing import TextIO


def terminal_width(stream: TextIO) -> int | None:
    """Return the number of columns of a stream's terminal; None if it writes to a file or a pipe."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except OSError:
        return None
