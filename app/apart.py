"""Work that nothing can interrupt, on a thread of its own, so that Ctrl-C need not wait for it.

A compiler runs for seconds without a look at signals, and swallows the exception that a signal raises where it calls
back. Refuses to know what the work is.
"""

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_NAME = "uninterruptible work"
_GLANCE = 0.1  # seconds between two looks for signals


def run_apart(work: Callable[[], None]) -> None:
    """Do `work` while this thread stays open for KeyboardInterrupt. Raises what `work` raises."""
    problems: list[BaseException] = []

    def attempt() -> None:
        try:
            work()
        except BaseException as problem:  # noqa: BLE001  # told to whoever waits
            problems.append(problem)

    thread = threading.Thread(target=attempt, name=_NAME, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_GLANCE)
    if problems:
        raise problems[0]


def leave(status: int) -> int:
    """The status for the end of the process; the end itself, at once, where such work is still going on."""
    if any(thread.name == _NAME for thread in threading.enumerate()):
        _end(status)
    return status


def _end(status: int) -> NoReturn:
    """Without Python's own end, which would take the memory of the work from under it."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
