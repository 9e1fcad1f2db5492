"""Computes figures from the arrival times of tokens: rates, medians, spreads, and percentiles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from app.bench.workload import Load, Rate


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, the smallest, and the largest of several values."""

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
    present = [value for value in values if value is not None]
    return Spread(median(present), min(present), max(present)) if present else None


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Return p50 and p99; None if there are no values."""
    return Percentiles(percentile(values, 0.5), percentile(values, 0.99)) if values else None


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile of the values at a fraction `share`, by linear interpolation."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The time at which one stream was sent, and the times at which the parts of its reply arrived (at least one)."""

    sent: float
    arrivals: Sequence[float]
    # Number of tokens of the reply. A part can have several tokens, because a server holds back incomplete characters.
    tokens: int

    @property
    def first(self) -> float:
        return self.arrivals[0]

    @property
    def last(self) -> float:
        return self.arrivals[-1]

    def tokens_between(self, start: float, end: float) -> float:
        """Return the number of tokens that arrived after `start`, up to and including `end`.

        Tokens are counted as if each part of the reply had the same number of them.
        """
        return sum(start < arrival <= end for arrival in self.arrivals) * self.tokens / len(self.arrivals)


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one run of a load. Rates that a competitor does not report are missing."""

    rates: Mapping[Rate, float]
    together: int  # largest number of streams that decoded at the same time
    first_token: tuple[float, ...] = ()  # seconds until the first token of each stream
    between_tokens: tuple[float, ...] = ()  # seconds between consecutive tokens


def sample_of(load: Load, timelines: Sequence[Timeline]) -> Sample:
    """Return the figures of one run of `load`."""
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
    """Return the largest number of streams that decode together, and the start and end of the longest such span.

    Usually the span reaches from the first token of the last stream to the last token of the first stream. Before the
    span, prompts are in prefill; after it, the batch is no longer full. A tool that decodes a fixed batch measures the
    same.
    """
    starts = [(line.first, 0, 1) for line in timelines]
    ends = [(line.last, 1, -1) for line in timelines]  # if events are simultaneous, a start comes before an end
    edges = sorted(starts + ends)
    spans, active = [], 0
    for (start, _, change), (end, _, _) in pairwise(edges):
        active += change
        spans.append((active, end - start, start, end))
    together, _, start, end = max(spans)
    return together, start, end
