"""How long replies take: to their first token, between tokens, to their end; and how many ended in which way.

Written and read on one event loop. Costs a microsecond a token, so that it can always be on. Refuses to know who reads
the figures, and in which format.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final

from engine.request import FinishReason, ServiceClass

REPLY_BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # seconds
GAP_BOUNDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10)

RESTORE_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)

# What ends a reply early says nothing of how long replies take.
_WHOLE = frozenset((FinishReason.STOP, FinishReason.LENGTH))


class Histogram:
    """How many durations, in seconds, were up to each bound."""

    __slots__ = ("bounds", "counts", "total_seconds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds: Final = tuple(bounds)
        self.counts: Final = [0] * (len(bounds) + 1)  # up to each bound and past the one before; last, past them all
        self.total_seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total_seconds += seconds


class Latencies:
    """Of all requests of one engine, since it was started."""

    def __init__(self) -> None:
        self.first_token: Final = by_class(REPLY_BOUNDS)  # from when the engine was asked
        self.between_tokens: Final = by_class(GAP_BOUNDS)
        self.whole_reply: Final = by_class(REPLY_BOUNDS)  # of replies that came to an end of their own
        self.ends: Final = dict.fromkeys(FinishReason, 0)  # requests that ended, by why

    def timer(self, service: ServiceClass, now: float) -> "ReplyTimer":
        """For a request that is submitted `now`."""
        return ReplyTimer(self, service, now)


class ReplyTimer:
    """The times of one reply, told as its tokens arrive."""

    __slots__ = ("_between", "_last", "_latencies", "_next_histogram", "_service", "_started")

    def __init__(self, latencies: Latencies, service: ServiceClass, now: float) -> None:
        self._latencies = latencies
        self._service = service
        self._started = self._last = now
        self._next_histogram = latencies.first_token[service]  # where the next token's time belongs
        self._between = latencies.between_tokens[service]

    def record_token(self, now: float) -> None:
        self._next_histogram.observe(now - self._last)
        self._next_histogram = self._between
        self._last = now

    def record_end(self, finish: FinishReason, now: float) -> None:
        self._latencies.ends[finish] += 1
        if finish in _WHOLE:
            self._latencies.whole_reply[self._service].observe(now - self._started)


def by_class(bounds: Sequence[float]) -> Mapping[ServiceClass, Histogram]:
    """An empty histogram for each class."""
    return {service: Histogram(bounds) for service in ServiceClass}
