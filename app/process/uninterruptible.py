"""Work that Ctrl-C cannot or must not cut in two, on a thread of its own, so that nobody waits for it.

A compiler runs for seconds without a look at signals, and swallows the exception that a signal raises where it calls
back; an event loop that is interrupted while it is made leaves half of one. Refuses to know what the work is.
"""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NoReturn, TypeVar

T = TypeVar("T")

_NAME = "uninterruptible work"
_POLL_SECONDS = 0.1  # seconds between two looks for signals


def run_uninterruptible(work: Callable[[], T]) -> T:
    """The result of `work`, while this thread stays open for KeyboardInterrupt. Raises what `work` raises."""
    done = start_uninterruptible(work)
    while not done.done():
        wait({done}, _POLL_SECONDS)
    return done.result()


def start_uninterruptible(work: Callable[[], T]) -> "Future[T]":
    """What will be the result of `work`, which does not hold up the end of the process."""
    done: Future[T] = Future()

    def attempt() -> None:
        done.set_running_or_notify_cancel()
        try:
            result = work()
        except BaseException as problem:  # noqa: BLE001  # told to whoever waits
            done.set_exception(problem)
        else:
            done.set_result(result)

    threading.Thread(target=attempt, name=_NAME, daemon=True).start()
    return done


def exit_if_busy(status: int) -> int:
    """The status for the end of the process; the end itself, at once, where such work is still going on."""
    if any(thread.name == _NAME for thread in threading.enumerate()):
        _end(status)
    return status


def _end(status: int) -> NoReturn:
    """Without Python's own end, which would take the memory of the work from under it."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
