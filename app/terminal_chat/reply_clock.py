"""When the tokens of a reply came, by the clock of whoever waits for them."""

import time


class ReplyClock:
    """Runs from its making on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first: float | None = None
        self._last = self._began

    def token(self) -> None:
        """Some came."""
        self._last = time.monotonic()
        if self._first is None:
            self._first = self._last

    @property
    def has_begun(self) -> bool:
        """Whether any came."""
        return self._first is not None

    @property
    def first_token_seconds(self) -> float:
        """Until it came; until now, while none has."""
        return (self._first or time.monotonic()) - self._began

    @property
    def reply_seconds(self) -> float:
        """From the first token to the last one."""
        return self._last - (self._first or self._last)
