"""A key that acts when it is pressed twice within a short time."""

import time


class DoublePress:
    """Remembers the last press of one key."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._last = -seconds

    def press(self) -> bool:
        """Whether this is the second press. The third one is a first again."""
        now, before = time.monotonic(), self._last
        is_second = now - before < self.seconds
        self._last = now - self.seconds if is_second else now
        return is_second
