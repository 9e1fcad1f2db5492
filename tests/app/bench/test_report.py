"""The report: its JSON object, on which scripts rely, and its table."""

import json
import os

import pytest

from app.bench.report import Conditions, Report, report_of
from app.bench.rounds import Series
from app.bench.sample import Sample
from app.bench.table import conditions, table
from app.bench.workload import SUITE, Load, Rate, Row, loads_of, rows_of
from app.commands.output import as_json
from tests.app.bench.test_rounds import Recorder

CONDITIONS = Conditions(
    model="tiny",
    quantization="Q4_1",
    device="cpu",
    processor="Abacus",
    backend="reference",
    via="engine",
    threads=2,
    repeat=3,
)


def series(name: str, rows: tuple[Row, ...], speed: float, *, pid: int | None) -> Series:
    """Return three rounds, with figures of 100, 150, and 225 times `speed`."""
    samples = {
        load: [
            Sample(dict.fromkeys(load.rates, 100 * speed * factor), load.streams, (0.5, 0.75), (0.125,))
            for factor in (1.0, 1.5, 2.25)
        ]
        for load in loads_of(rows)
    }
    return Series(Recorder(name, pid=pid, build=f"the build of {name}"), samples, [0.0, 0.25, 0.5])


def report(rows: tuple[Row, ...], load: Load | None) -> Report:
    ours = series("ingle", rows, 2.0, pid=os.getpid())
    return report_of(CONDITIONS, rows, load, ours, weight_bytes=10**9, peak_vram_mb=0.0)


@pytest.fixture
def one_workload() -> Report:
    rows = rows_of(512, 128, 4)
    return report(rows, rows[-1].load)


def test_json_of_one_workload_has_its_figures(one_workload: Report) -> None:
    found = json.loads(as_json(one_workload.json()))
    assert found.pop("peak_rss_mb") > 1
    assert found.pop("spread")["weight_gb_s"] == [200.0, 450.0]
    assert found == {
        "model": "tiny",
        "quantization": "Q4_1",
        "device": "cpu",
        "processor": "Abacus",
        "backend": "reference",
        "via": "engine",
        "threads": 2,
        "repeat": 3,
        "build": "the build of ingle",
        "prompt_tokens": 512,
        "output_tokens": 128,
        "concurrency": 4,
        "prefill_tok_s": 300.0,
        "decode_tok_s": 300.0,
        "throughput_tok_s": 300.0,
        "end_to_end_tok_s": 300.0,
        "ttft_ms": {"p50": 625.0, "p99": 750.0},
        "itl_ms": {"p50": 125.0, "p99": 125.0},
        "weight_gb_s": 300.0,
        "peak_vram_mb": 0.0,
        "busy_elsewhere_cores": {"median": 0.25, "low": 0.0, "high": 0.5},
    }


def test_json_of_the_suite_has_all_rows() -> None:
    found = report(SUITE, None).json()
    assert [found[row.name] for row in SUITE] == [300.0] * 5
    assert found["workloads"]["decode_16_streams"] == {"prompt_tokens": 60, "output_tokens": 64, "concurrency": 16}
    assert found["ttft_ms"] is found["weight_gb_s"] is None


def test_unknown_figure_is_null() -> None:
    rows = rows_of(512, 1, 1)
    samples = {load: [Sample({Rate.PREFILL: 9.87654}, 1)] for load in loads_of(rows)}
    found = report_of(CONDITIONS, rows, rows[-1].load, Series(Recorder("ingle"), samples), 1, 0.0).json()
    assert found["prefill_tok_s"] == 9.877
    assert found["decode_tok_s"] is found["weight_gb_s"] is found["ttft_ms"] is None
    assert found["spread"]["decode_tok_s"] is None


def test_table_of_one_workload_shows_its_figures(one_workload: Report) -> None:
    lines = table(one_workload)
    assert lines[0] == ("", "ingle")
    assert ("prefill", "300 tok/s (200-450)") in lines
    assert ("time to first token", "625 ms (p99 750)") in lines
    assert lines[-2] == ("weights read", "300 (200-450) GB/s")
    assert lines[-1][0] == "peak memory"
    lines_below = conditions(one_workload)
    assert lines_below[0] == "tiny, 512 + 128 tokens, 4 streams, without HTTP, on 2 threads of Abacus."
    assert lines_below[-1] == "ingle: the build of ingle"


def test_table_of_the_suite_shows_all_rows() -> None:
    titles = [line[0] for line in table(report(SUITE, None))]
    assert titles[1:6] == [row.title for row in SUITE]
