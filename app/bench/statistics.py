"""The statistics of repeated runs: medians, spreads, and percentiles."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


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
    """Of the values that there are; None when there are none."""
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
