"""End the chat on a signal: the first signal shuts down cleanly, the second exits at once."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress

from app.process.signals import available_signals

_SIGNALLED = 128  # plus the signal: the exit status after a signal


class Shutdown:
    """Calls `end` once, with the exit status. Used on one event loop."""

    def __init__(self, end: Callable[[int], object]) -> None:
        self._end = end
        self._is_requested = False

    def listen(self, *names: str) -> None:
        """Handle the named signals that this system has and this process does not ignore."""
        for number in available_signals(*names):
            with suppress(NotImplementedError):  # Windows
                asyncio.get_running_loop().add_signal_handler(number, self.request, number)

    def request(self, number: int) -> None:
        """End the run because of a signal. A second signal exits at once, in case something hangs."""
        if self._is_requested:
            os._exit(_SIGNALLED + number)
        self._is_requested = True
        self._end(_SIGNALLED + number)
