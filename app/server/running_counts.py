"""Counts and times of a reply so far, for streams that report them with each chunk."""

import time
from collections.abc import Callable

from app.chat.events import ChatEvent, GeneratedTokens, PromptProgress
from app.server.token_reports import Timings, timings_so_far


class RunningCounts:
    """The tokens of one request, counted while its replies come; they need `ReplyOptions.reports_tokens`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds that only grow."""
        self.completion = 0  # tokens of all replies
        self._clock = clock
        self._first_token_at: float | None = None
        self._progress = PromptProgress(0, 0)

    def add(self, event: ChatEvent) -> None:
        """Count an event of any reply."""
        match event:
            case GeneratedTokens(ids):
                self.completion += len(ids)
                self._first_token_at = self._first_token_at or self._clock()
            case PromptProgress():
                self._progress = event

    def timings(self) -> Timings:
        """The times so far; those of the queue and of restored blocks are known at the end."""
        read, since = self._progress, self._first_token_at
        predicted = 0.0 if since is None else self._clock() - since
        return timings_so_far(
            cached=read.cached,
            computed=read.done - read.cached,
            reading_seconds=read.seconds,
            completion=self.completion,
            writing_seconds=predicted,
        )
