"""The signals that ask this process to end in order, besides Ctrl-C: SIGTERM, and SIGHUP when the terminal closes."""

import signal
from types import FrameType

_NAMES = ("SIGTERM", "SIGHUP")


def ending_signals() -> list[signal.Signals]:
    """Those that this system has, without SIGHUP if it is ignored, as nohup asks."""
    return heeded(*_NAMES)


def heeded(*names: str) -> list[signal.Signals]:
    """The signals of these names that this system has and this process does not ignore."""
    known = (signal.Signals[name] for name in names if name in signal.Signals.__members__)
    return [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]


def interrupt_on_signals() -> None:
    """Have the first of these signals raise KeyboardInterrupt, as Ctrl-C does. Later ones do not disturb the end that
    it has begun."""
    is_asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if not is_asked:
            is_asked = True
            raise KeyboardInterrupt

    for number in ending_signals():
        signal.signal(number, interrupt)
