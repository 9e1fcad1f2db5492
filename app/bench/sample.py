"""From the times of tokens to figures: the definition of each, and medians, spreads, and percentiles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from app.bench.workload import Load, Rate


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, the smallest and the largest."""

    median: float
    low: float
    high: float

    def times(self, factor: float) -> "Spread":
        return Spread(self.median * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p99: float


def spread(values: Sequence[float | None]) -> Spread | None:
    """Return the spread of the values that are not None; None if there are none."""
    there = [value for value in values if value is not None]
    return Spread(median(there), min(there), max(there)) if there else None


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """None when there are no values."""
    return Percentiles(percentile(values, 0.5), percentile(values, 0.99)) if values else None


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie, on a straight line between the two nearest."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Timeline:
    """When one stream was sent, and when the parts of its reply came: at least one."""

    sent: float
    arrivals: Sequence[float]
    tokens: int  # of the reply. A server holds half a character back, so that a part may be more than one token.

    @property
    def first(self) -> float:
        return self.arrivals[0]

    @property
    def last(self) -> float:
        return self.arrivals[-1]

    def tokens_between(self, start: float, end: float) -> float:
        """Tokens that came after `start`, up to `end`."""
        return sum(start < arrival <= end for arrival in self.arrivals) * self.tokens / len(self.arrivals)


@dataclass(frozen=True, slots=True)
class Sample:
    """What one run of a load gave; what a competitor does not tell is left out."""

    rates: Mapping[Rate, float]
    together: int  # the most streams that decoded at the same time
    first_token: tuple[float, ...] = ()  # seconds that each stream waited for it
    between_tokens: tuple[float, ...] = ()  # seconds between any two that follow each other


def sample_of(load: Load, timelines: Sequence[Timeline]) -> Sample:
    """The figures of one run of `load`."""
    together, start, end = _busiest_span(timelines)
    waits = tuple(line.first - line.sent for line in timelines)
    seconds = max(line.last for line in timelines) - min(line.sent for line in timelines)
    rates = {Rate.END_TO_END: sum(line.tokens for line in timelines) / seconds}
    if load.streams == 1:
        rates[Rate.PREFILL] = load.prompt_tokens / waits[0]
    if end > start:
        rates[Rate.DECODE] = sum(line.tokens_between(start, end) for line in timelines) / (end - start)
    gaps = tuple(after - before for line in timelines for before, after in pairwise(line.arrivals))
    return Sample(rates, together, waits, gaps)


def _busiest_span(timelines: Sequence[Timeline]) -> tuple[int, float, float]:
    """How many streams decode at most at the same time, and from when to when they do; the longest such span.

    Mostly from the last stream's first token to the first stream's last one: prompts are still being read before, and
    the batch is no longer full behind. A tool that decodes a fixed batch measures the same.
    """
    beginnings = [(line.first, 0, 1) for line in timelines]
    ends = [(line.last, 1, -1) for line in timelines]  # of two things at the same time the beginning comes first
    edges = sorted(beginnings + ends)
    spans, active = [], 0
    for (start, _, change), (end, _, _) in pairwise(edges):
        active += change
        spans.append((active, end - start, start, end))
    together, _, start, end = max(spans)
    return together, start, end
