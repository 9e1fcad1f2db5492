"""Detects when a key is pressed twice within a short time."""

import time


class DoublePress:
    """Remembers the last press of one key."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._last = -seconds

    def press(self) -> bool:
        """Return whether this press is the second one. A third press counts as a first one again."""
        now, before = time.monotonic(), self._last
        is_second = now - before < self.seconds
        self._last = now - self.seconds if is_second else now
        return is_second
