"""Run work that Ctrl-C must not interrupt. It runs in a thread, so that the main thread stays interruptible.

A compiler runs for seconds without handling signals, and swallows exceptions that a signal raises in its callbacks. An
event loop that is interrupted while it starts is left half initialized.
"""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NoReturn, TypeVar

T = TypeVar("T")

_NAME = "uninterruptible work"
_POLL_SECONDS = 0.1  # interval at which pending signals are handled


def run_uninterruptible(work: Callable[[], T]) -> T:
    """Return the result of `work`. KeyboardInterrupt can end the wait for it. Raises the errors of `work`."""
    done = start_uninterruptible(work)
    while not done.done():
        wait({done}, _POLL_SECONDS)
    return done.result()


def start_uninterruptible(work: Callable[[], T]) -> "Future[T]":
    """Start `work` in a daemon thread, which does not delay the exit of the process. Returns its future result."""
    done: Future[T] = Future()

    def attempt() -> None:
        done.set_running_or_notify_cancel()
        try:
            result = work()
        except BaseException as problem:  # noqa: BLE001  # raised in the thread that reads the result
            done.set_exception(problem)
        else:
            done.set_result(result)

    threading.Thread(target=attempt, name=_NAME, daemon=True).start()
    return done


def exit_if_busy(status: int) -> int:
    """Return `status`. If uninterruptible work still runs, exit the process at once with that status instead."""
    if any(thread.name == _NAME for thread in threading.enumerate()):
        _end(status)
    return status


def _end(status: int) -> NoReturn:
    """Exit without Python's shutdown, which would free memory that the work still uses."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
