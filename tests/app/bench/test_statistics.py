"""Tests of medians and percentiles."""

import pytest

from app.bench.sample import Spread, percentile, percentiles, spread


def test_spread_is_median_smallest_and_largest() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread([3.0, None]) == Spread(3.0, 3.0, 3.0)
    assert spread([None]) is None
    assert Spread(2.0, 1.0, 4.0).times(3) == Spread(6.0, 3.0, 12.0)


def test_percentiles_are_interpolated() -> None:
    values = [float(value) for value in range(101)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile([1.0, 2.0], 0.99) == pytest.approx(1.99)
    assert percentile([7.0], 0.99) == 7
    assert percentiles([]) is None
