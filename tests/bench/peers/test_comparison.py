"""Comparisons with a peer: the JSON object, the table, and ratios of rounds."""

from dataclasses import replace

import pytest

from app.bench.sample import Spread
from app.bench.workload import SUITE, Load, Row, rows_of
from tests.app.bench.test_report import report, series
from tests.bench.peers.comparison import Comparison, comparison_of, ratios


def comparison(rows: tuple[Row, ...], load: Load | None) -> Comparison:
    both = [series("ingle", rows, 2.0, pid=None), series("peer", rows, 1.0, pid=None)]
    return comparison_of(report(rows, load), both)


@pytest.fixture
def one_workload() -> Comparison:
    rows = rows_of(512, 128, 4)
    return comparison(rows, rows[-1].load)


def test_json_of_one_workload_lists_the_peer(one_workload: Comparison) -> None:
    found = one_workload.json()
    [peer] = found["compare"]
    assert found["prefill_tok_s"] == 300.0
    assert (peer["peer"], peer["build"]) == ("peer", "the build of peer")
    assert peer["figures"]["prefill_tok_s"] == 150.0
    assert peer["figures"]["peak_rss_mb"] is None
    assert peer["spread"]["decode_tok_s"] == [100.0, 225.0]
    assert peer["ratios"]["throughput_tok_s"] == {"median": 2.0, "low": 2.0, "high": 2.0}


def test_json_of_suite_has_a_ratio_per_row() -> None:
    found = comparison(SUITE, None).json()
    assert found["compare"][0]["ratios"].keys() == {row.name for row in SUITE}


def test_table_has_two_columns_per_peer(one_workload: Comparison) -> None:
    lines = one_workload.table()
    assert {len(line) for line in lines} == {4}
    assert lines[0] == ("", "ingle", "peer", "ours/theirs")
    assert ("prefill", "300 tok/s (200-450)", "150 tok/s (100-225)", "2.00 (2.00-2.00)") in lines
    assert ("time to first token", "625 ms (p99 750)", "625 ms (p99 750)", "") in lines
    assert ("weights read", "300 (200-450) GB/s", "", "") in lines
    assert lines[-1][2] == "-"
    assert one_workload.conditions()[-1] == "peer: the build of peer"


def test_rate_of_memory_is_among_the_conditions(one_workload: Comparison) -> None:
    found = replace(one_workload, memory_gb_s=Spread(48.5, 45.0, 78.0))
    assert "The threads read 48.5 (45.0-78.0) GB/s from memory before each run." in found.conditions()
    assert found.json()["memory_gb_s"] == {"median": 48.5, "low": 45.0, "high": 78.0}


def test_ratios_pair_rates_of_the_same_round() -> None:
    """Both programs are slow in the second round, which does not affect the ratio."""
    assert ratios([20.0, 2.0, 30.0], [10.0, 1.0, 40.0]) == Spread(2.0, 0.75, 2.0)
    assert ratios([20.0, None], [10.0, 5.0]) == Spread(2.0, 2.0, 2.0)
    assert ratios([20.0], [None]) is None
