"""Latency histograms (time to first token, time between tokens, total time), and counts of finish reasons.

Used on one event loop. Recording a token takes about 1 microsecond, so it is always on.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final

from engine.request import FinishReason, ServiceClass

# upper bounds of the buckets in seconds
REPLY_BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
GAP_BOUNDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10)

RESTORE_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)

# Replies with other finish reasons are left out of the total times.
_WHOLE = frozenset((FinishReason.STOP, FinishReason.LENGTH))


class Histogram:
    """Counts of durations in seconds, by upper bound."""

    __slots__ = ("bounds", "counts", "total_seconds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds: Final = tuple(bounds)
        # counts[i]: number of durations in (bounds[i - 1], bounds[i]]; the last element counts those above all bounds
        self.counts: Final = [0] * (len(bounds) + 1)
        self.total_seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total_seconds += seconds


class Latencies:
    """Latencies of all requests of one engine since its start."""

    def __init__(self) -> None:
        self.first_token: Final = by_class(REPLY_BOUNDS)  # upper bounds of the buckets in seconds
        self.between_tokens: Final = by_class(GAP_BOUNDS)
        # seconds until the end of replies that ended by themselves or at their token limit
        self.whole_reply: Final = by_class(REPLY_BOUNDS)
        self.ends: Final = dict.fromkeys(FinishReason, 0)  # number of requests by finish reason

    def timer(self, service: ServiceClass, now: float) -> "ReplyTimer":
        """Return a timer for a request that is submitted at `now`."""
        return ReplyTimer(self, service, now)


class ReplyTimer:
    """Records the times of one reply."""

    __slots__ = ("_between", "_last", "_latencies", "_next_histogram", "_service", "_started")

    def __init__(self, latencies: Latencies, service: ServiceClass, now: float) -> None:
        self._latencies = latencies
        self._service = service
        self._started = self._last = now
        self._next_histogram = latencies.first_token[service]  # histogram of the next token
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
    """Return an empty histogram for each service class."""
    return {service: Histogram(bounds) for service in ServiceClass}
