"""Runs the chat in a child process and restores the terminal when the child ends, also after a crash.

A program that dies in full-screen mode leaves the terminal without echo, on the alternate screen, and with mouse
reports on. The guard only waits for the child, so that it is unlikely to fail itself.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from app.process.signals import ending_signals

Left = Callable[[], None]
Work = Callable[[Left], int]

# Turns off the alternate screen, mouse and focus reports, bracketed paste, synchronized output, reports of size and
# colors, and the keyboard protocol. Then resets cursor, wrapping, and colors.
RESET = (
    b"\x1b[?2026l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1016l\x1b[?1004l\x1b[?2004l\x1b[?2031l"
    b"\x1b[?2048l\x1b[<u\x1b[>4;0m\x1b[?1049l\x1b[?25h\x1b[?7h\x1b[0m"
)
_SIGNALLED = 128  # a process ended by signal N has exit status 128 + N
_PATIENCE = 3.0  # seconds that the child has to exit after a signal
_SET_PARENT_DEATH_SIGNAL = 1  # number of the prctl operation
_IGNORED = ("SIGINT", "SIGQUIT", "SIGTTOU", "SIGTSTP")  # the terminal sends these to the child also, which handles them


def run_guarded(work: Work) -> int:
    """Run `work` in a child process, and return its exit status. This process owns the terminal.

    `work` receives a function that it calls after it has restored the terminal itself. The child returns the result of
    `work` from this function. Without fork or a terminal, `work` runs in this process.
    """
    terminal = _terminal()
    if sys.platform == "win32" or terminal is None:
        return work(lambda: None)
    import termios

    before = termios.tcgetattr(terminal)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _die_with_parent(os.getppid())
        signal.signal(signal.SIGHUP, lambda *_: _give_up(terminal, before))
        return work(lambda: _signal_left(writing))
    os.close(writing)
    status = _wait(child)
    left = bool(os.read(reading, 1))
    _restore(terminal, before, in_order=left and status >= 0)
    if status < 0:
        name = signal.Signals(-status).name
        print(f"error: the chat was ended by {name}; messages and replies are saved", file=sys.stderr)  # noqa: T201
    return status if status >= 0 else _SIGNALLED - status


def _terminal() -> int | None:
    """Return a file descriptor of the terminal, or None if there is no terminal."""
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return None


def _signal_left(pipe: int) -> None:
    with suppress(OSError):
        os.write(pipe, b"\0")


def _wait(child: int) -> int:
    """Wait for the child. Returns its exit status, or the negative signal that ended it."""
    signaled_at: list[float] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        signaled_at.append(time.monotonic())
        with suppress(ProcessLookupError):
            os.kill(child, number if len(signaled_at) == 1 else signal.SIGKILL)
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE)

    def give_up(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, give_up)
    for number in ending_signals():
        signal.signal(number, pass_on)
    for name in _IGNORED:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    while True:
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return os.waitstatus_to_exitcode(status)
        os.kill(os.getpid(), signal.SIGSTOP)  # the shell then sees a stopped job, and later continues both processes


def _restore(terminal: int, before: list[object], *, in_order: bool) -> None:
    """Restore the terminal.

    If the child exited `in_order`, only the modes are restored, so that the screen does not change.
    """
    import termios

    with suppress(OSError, termios.error):
        if not in_order:
            os.write(terminal, RESET)
            termios.tcflush(terminal, termios.TCIFLUSH)  # discards mouse reports that have arrived
        termios.tcsetattr(terminal, termios.TCSANOW, before)  # type: ignore[arg-type] # the value of tcgetattr


def _give_up(terminal: int, before: list[object]) -> None:
    """Restore the terminal and exit. The child calls this when the guard or the terminal is gone."""
    _restore(terminal, before, in_order=False)
    os._exit(_SIGNALLED + signal.SIGHUP)


def _die_with_parent(parent: int) -> None:
    """Make the kernel send this process SIGHUP when the guard dies. Linux only."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGHUP), 0, 0, 0)
    if os.getppid() != parent:  # the guard died before prctl
        os.kill(os.getpid(), signal.SIGHUP)
