"""The rates of a run, computed from given token times."""

import pytest

from app.bench.sample import Timeline, sample_of
from app.bench.workload import Load, Rate


def test_rates_of_one_stream_are_computed_from_its_times() -> None:
    """Prefill of 100 tokens takes 0.5 s, and the 4 decode steps take 1 s."""
    sample = sample_of(Load(100, 5), [Timeline(10.0, [10.5, 10.75, 11.0, 11.25, 11.5], 5)])
    assert sample.rates == {Rate.PREFILL: 200.0, Rate.DECODE: 4.0, Rate.END_TO_END: pytest.approx(5 / 1.5)}
    assert sample.together == 1
    assert sample.first_token == (0.5,)
    assert sample.between_tokens == (0.25,) * 4


def test_decode_rate_counts_the_span_in_which_all_streams_decode() -> None:
    """The first stream starts a second before the last and ends a second before it. Each step of both takes 0.1 s."""
    early = [round(1 + 0.5 * step, 1) for step in range(3)] + [round(2.1 + 0.1 * step, 1) for step in range(10)]
    late = [round(2 + 0.1 * step, 1) for step in range(11)] + [3.5, 4.0]
    sample = sample_of(Load(8, 13, 2), [Timeline(0.0, early, 13), Timeline(0.0, late, 13)])
    assert sample.together == 2
    assert sample.rates[Rate.DECODE] == pytest.approx(20)  # 10 steps of 2 streams between 2.0 and 3.0 s
    assert sample.rates[Rate.END_TO_END] == pytest.approx(26 / 4.0)
    assert Rate.PREFILL not in sample.rates


def test_streams_that_never_overlap_have_the_rate_of_one_stream() -> None:
    first, second = Timeline(0.0, [1.0, 1.5, 2.0], 3), Timeline(0.0, [3.0, 3.25, 3.5], 3)
    sample = sample_of(Load(8, 3, 2), [first, second])
    assert sample.together == 1
    assert sample.rates[Rate.DECODE] == pytest.approx(2.0)  # the rate of the longer of the two spans


def test_part_with_several_tokens_counts_all_of_them() -> None:
    """Six tokens arrive in three parts, because the server holds back incomplete characters."""
    sample = sample_of(Load(8, 6), [Timeline(0.0, [1.0, 2.0, 3.0], 6)])
    assert sample.rates[Rate.DECODE] == pytest.approx(2.0)


def test_single_token_has_no_decode_rate() -> None:
    sample = sample_of(Load(8, 1), [Timeline(0.0, [2.0], 1)])
    assert sample.rates == {Rate.PREFILL: 4.0, Rate.END_TO_END: 0.5}
