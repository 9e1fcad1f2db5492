"""Entries that are made from reports, and the measured bandwidth of memory."""

from dataclasses import replace
from pathlib import Path

import pytest

from app.bench.figures import BadFigures, Machine, Measure, Result, read_entries
from app.bench.memory_speed import read_bandwidth
from app.bench.recording import Recording
from app.bench.report import Report, result_of
from app.bench.sample import Spread
from app.bench.workload import SUITE, rows_of
from tests.app.bench.test_report import report, series

OURS = Result("Inglenook", 300.0, 200.0, 450.0)


@pytest.fixture
def one_workload() -> Report:
    rows = rows_of(512, 128, 4)
    return report(rows, rows[-1].load)


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording(tmp_path / "figures.json", "ingle bench --concurrency 4")


def test_entry_has_the_conditions_of_the_report(one_workload: Report, recording: Recording) -> None:
    entry = recording.entry(one_workload, [], (45.0, 60.0))
    assert (entry.model, entry.quantization, entry.chart, entry.via) == ("tiny", "Q4_1", "tiny-q4_1", "engine")
    assert entry.machine == Machine("Abacus", 2, (45.0, 60.0))
    assert (entry.rounds, entry.command) == (3, "ingle bench --concurrency 4")
    assert entry.builds == {"Inglenook": "the build of ingle"}


def test_measures_of_one_workload_have_its_sizes(one_workload: Report, recording: Recording) -> None:
    assert recording.entry(one_workload, [], (1, 2)).measures == (
        Measure("prefill, 512 tokens", (OURS,)),
        Measure("decode, context 512", (OURS,)),
        Measure("decode, 4 streams, context 512", (OURS,)),
    )


def test_end_to_end_rates_are_left_out(recording: Recording) -> None:
    """With one stream, the decode rate has two rows, and the end-to-end rate has the same sizes."""
    rows = rows_of(512, 128, 1)
    found = report(rows, rows[-1].load)
    slow = replace(found.own, figures={**found.own.figures, "end_to_end_tok_s": Spread(1, 1, 1)})
    measures = recording.entry(replace(found, own=slow), [], (1, 2)).measures
    assert measures == (Measure("prefill, 512 tokens", (OURS,)), Measure("decode, context 512", (OURS,)))


def test_measures_of_the_suite_have_its_titles(recording: Recording) -> None:
    measures = recording.entry(report(SUITE, None), [], (1, 2)).measures
    assert [measure.measure for measure in measures] == [row.title for row in SUITE]


def test_peers_follow_inglenook(one_workload: Report, recording: Recording) -> None:
    peer = result_of(series("llama.cpp", one_workload.rows, 1.0, pid=None), one_workload.rows, one_workload.load)
    entry = recording.entry(one_workload, [peer], (1, 2))
    assert entry.measures[0].results == (OURS, Result("llama.cpp", 150.0, 100.0, 225.0))
    assert list(entry.builds) == ["Inglenook", "llama.cpp"]


def test_title_and_chart_replace_the_names_of_the_report(one_workload: Report, tmp_path: Path) -> None:
    recording = Recording(tmp_path / "figures.json", "ingle bench", "Tiny 1M", "../Tiny & small")
    entry = recording.entry(one_workload, [], (1, 2))
    assert (entry.model, entry.chart) == ("Tiny 1M", "tiny-small")


def test_add_writes_an_entry_that_can_be_read(one_workload: Report, recording: Recording) -> None:
    recording.check()
    recording.add(one_workload)
    recording.add(one_workload)
    [entry] = read_entries(recording.file)
    assert entry.machine.memory_gb_s is not None


def test_check_reads_an_existing_file(recording: Recording) -> None:
    recording.file.write_text("{}", encoding="utf-8")
    with pytest.raises(BadFigures):
        recording.check()


def test_read_bandwidth_has_a_lowest_and_a_highest_rate() -> None:
    low, high = read_bandwidth(2)
    assert 0 < low <= high
