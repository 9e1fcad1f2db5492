"""How a run of the chat ends that a signal asks to: in order at the first one, at once at the next."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress

from app.process.signals import heeded

_SIGNALLED = 128  # and the signal: the status of whoever was ended by one


class Shutdown:
    """`end` is told the exit status that is due, once. Used on one event loop."""

    def __init__(self, end: Callable[[int], object]) -> None:
        self._end = end
        self._is_asked = False

    def listen(self, *names: str) -> None:
        """Handle the signals of these names that this system has and this process does not ignore."""
        for number in heeded(*names):
            with suppress(NotImplementedError):  # Windows
                asyncio.get_running_loop().add_signal_handler(number, self.ask, number)

    def ask(self, number: int) -> None:
        """For the end, as this signal does. Who asks a second time does not wait for what hangs."""
        if self._is_asked:
            os._exit(_SIGNALLED + number)
        self._is_asked = True
        self._end(_SIGNALLED + number)
