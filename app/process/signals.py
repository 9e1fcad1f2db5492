"""Signals that end this process in an orderly way, besides Ctrl-C: SIGTERM, and SIGHUP when the terminal closes."""

import signal
from types import FrameType

_NAMES = ("SIGTERM", "SIGHUP")


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end this process. SIGHUP is missing if it is ignored, as with nohup."""
    return available_signals(*_NAMES)


def available_signals(*names: str) -> list[signal.Signals]:
    """Return the signals with these names that this system has and this process does not ignore."""
    known = (signal.Signals[name] for name in names if name in signal.Signals.__members__)
    return [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]


def interrupt_on_signals() -> None:
    """Make the first ending signal raise KeyboardInterrupt, as Ctrl-C does. Later ones are ignored."""
    is_ending = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_ending
        if not is_ending:
            is_ending = True
            raise KeyboardInterrupt

    for number in ending_signals():
        signal.signal(number, interrupt)
