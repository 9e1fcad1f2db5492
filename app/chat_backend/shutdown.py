"""Ends the chat on a signal: the first signal shuts down cleanly, the second exits at once."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress

from app.process.signals import available_signals

_SIGNALLED = 128  # a process ended by signal N has exit status 128 + N


class Shutdown:
    """Calls `end` with the exit status when the first signal arrives. Used on one event loop."""

    def __init__(self, end: Callable[[int], object]) -> None:
        self._end = end
        self._is_requested = False

    def listen(self, *names: str) -> None:
        """Handle the named signals, except those that this system lacks or this process ignores."""
        for number in available_signals(*names):
            with suppress(NotImplementedError):  # Windows
                asyncio.get_running_loop().add_signal_handler(number, self.request, number)

    def request(self, number: int) -> None:
        """Shut down because of a signal. A second signal exits at once, in case the shutdown hangs."""
        if self._is_requested:
            os._exit(_SIGNALLED + number)
        self._is_requested = True
        self._end(_SIGNALLED + number)
