"""Keeps the terminal while the chat runs in a child process, and gives it back as it was, whatever becomes of that.

A program that dies in the middle of a full screen leaves a terminal without echo, in another screen, that writes a line
for every move of the mouse. The guard is small, so that it does not die; it does nothing but wait. It knows terminals
and processes. Refuses to know what the chat is.
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

# The other screen, mouse reports of every kind, focus reports, pasted text in brackets, synchronized output, reports of
# size and colours, the keyboard protocol; then the cursor, wrapping and plain colours as they are at first.
RESET = (
    b"\x1b[?2026l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1016l\x1b[?1004l\x1b[?2004l\x1b[?2031l"
    b"\x1b[?2048l\x1b[<u\x1b[>4;0m\x1b[?1049l\x1b[?25h\x1b[?7h\x1b[0m"
)
_SIGNALLED = 128  # and the signal: the status of whoever was ended by one
_PATIENCE = 3.0  # seconds for the child to end when it is asked to
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl
_IGNORED = ("SIGINT", "SIGQUIT", "SIGTTOU", "SIGTSTP")  # of the whole group: the child answers them


def run_guarded(work: Work) -> int:
    """Run `work` in a child of this process, which owns the terminal. Gives the exit status that is due.

    `work` is given a function to call when it has left the terminal in order. In the child, this returns what `work`
    does. Where there is no fork, or no terminal, `work` runs here.
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
        print(f"error: the chat ended by {name}; what was sent and answered is kept", file=sys.stderr)  # noqa: T201
    return status if status >= 0 else _SIGNALLED - status


def _terminal() -> int | None:
    """A descriptor of the terminal; None where there is none."""
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return None


def _signal_left(pipe: int) -> None:
    with suppress(OSError):
        os.write(pipe, b"\0")


def _wait(child: int) -> int:
    """Until the child has ended: its exit status, or the signal that ended it, negative."""
    asked_at: list[float] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked_at.append(time.monotonic())
        with suppress(ProcessLookupError):
            os.kill(child, number if len(asked_at) == 1 else signal.SIGKILL)
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
        os.kill(os.getpid(), signal.SIGSTOP)  # the shell has its turn; it continues both of us


def _restore(terminal: int, before: list[object], *, in_order: bool) -> None:
    """The terminal as it was; of a child that left in order, its modes alone: nothing on the screen moves."""
    import termios

    with suppress(OSError, termios.error):
        if not in_order:
            os.write(terminal, RESET)
            termios.tcflush(terminal, termios.TCIFLUSH)  # what the mouse has written meanwhile
        termios.tcsetattr(terminal, termios.TCSANOW, before)  # type: ignore[arg-type]  # what tcgetattr gave


def _give_up(terminal: int, before: list[object]) -> None:
    """In the child, when the guard or the terminal has gone."""
    _restore(terminal, before, in_order=False)
    os._exit(_SIGNALLED + signal.SIGHUP)


def _die_with_parent(parent: int) -> None:
    """Have this process told when the guard is killed. Linux can do that."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGHUP), 0, 0, 0)
    if os.getppid() != parent:  # it was faster
        os.kill(os.getpid(), signal.SIGHUP)
