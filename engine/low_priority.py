"""Threads that compute only when no other thread needs their core."""

import os
import sys
from contextlib import suppress
from threading import get_native_id

LOWEST = 19


def lower_priority() -> None:
    """Give the calling thread, and threads that it starts later, the lowest priority. Does nothing outside of Linux.

    Elsewhere, the priority is that of a whole process.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), LOWEST)
