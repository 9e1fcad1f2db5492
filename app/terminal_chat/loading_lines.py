"""How a model loads, as lines for people who listen: one at once, and then one every few seconds."""

import time
from collections.abc import Callable

from tui.engine_nouns import Loading

OFTEN = 5.0  # seconds between two lines about what is awaited


class LoadingLines:
    """Of one loading."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_at: float | None = None
        self._told = ""

    def line(self, state: Loading) -> str:
        """What is to be said of this state; empty where that is nothing."""
        if state.warning:
            return f"{state.model}: {state.warning}"
        done = "" if state.fraction is None else f", {state.fraction:.0%}"
        words, now = f"{state.model}: {state.stage}{done}", self._clock()
        if words == self._told or (self._told_at is not None and now - self._told_at < OFTEN):
            return ""
        self._told_at, self._told = now, words
        return words
