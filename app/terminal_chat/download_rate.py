"""How fast something comes, over the last few seconds."""

import time
from collections import deque
from collections.abc import Callable

_WINDOW = 5.0  # seconds


class DownloadRate:
    """Of one thing after the other, by their labels."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._label = ""
        self._marks: deque[tuple[float, int]] = deque()  # when how much was done

    def after(self, label: str, done: int) -> float:
        """Units a second, now that `done` of them are; 0 where nobody knows yet. What was there at the first look, or
        at the first that saw any, is of another time."""
        if label != self._label or (self._marks and (done < self._marks[-1][1] or not self._marks[-1][1])):
            self._label = label
            self._marks.clear()
        now = self._clock()
        self._marks.append((now, done))
        while now - self._marks[0][0] > _WINDOW:
            self._marks.popleft()
        begun, before = self._marks[0]
        return (done - before) / (now - begun) if now > begun else 0.0
