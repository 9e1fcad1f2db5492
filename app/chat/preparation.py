"""Requests that are prepared for the engine, and whether any of them gets there."""

import contextlib
import time
from collections.abc import Callable, Iterator

STUCK_SECONDS = 60.0  # without a request that is prepared, or given up, while some are waiting


class Preparation:
    """Used on one event loop; `problem` may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds that only grow."""
        self._clock = clock
        self._waiting = 0
        self._moved_at = clock()

    @contextlib.contextmanager
    def of_request(self) -> Iterator[None]:
        """A request waits for its prompt and its grammar while the body runs."""
        if not self._waiting:
            self._moved_at = self._clock()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self._moved_at = self._clock()

    def problem(self) -> str:
        """Why requests wait in vain, or an empty string while they get on."""
        silence = self._clock() - self._moved_at if self._waiting else 0.0
        return f"no request was prepared for the engine for {silence:.0f} s" if silence >= STUCK_SECONDS else ""
