"""The benchmark of a GPU, where there is none: every part runs at toy size, and nothing that fails stops the rest."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.bench import PARTS, PEAKS, Results, main, measure
from tests.gpu.figures import COPY, FLOAT8, Figure, Peaks
from tests.gpu.part import Part, run_apart, run_dry
from tests.gpu.table import table


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_part_runs_at_toy_size(part: Part) -> None:
    figures = list(run_dry(part, Peaks(1e9, 1e9, 1e9, 1e9, 1e9), 60))
    assert figures
    assert all(figure.met for figure in figures if part.name == "likeness")
    assert all(figure.value >= 0 and figure.unit in UNITS for figure in figures)


UNITS = ("GB/s", "TFLOP/s", "tok/s", "ms", "s", "nats", "")


def test_one_failure_is_a_line_and_the_rest_goes_on() -> None:
    def run(part: Part, peaks: Peaks, seconds: float) -> Iterator[Figure]:
        yield Figure(COPY, 2.0, "GB/s")
        if part.name == "bad":
            raise RuntimeError("an illegal\naddress")
        yield Figure("seen", peaks.copy, "GB/s", 0.5, "copy", least=0.8)

    results = measure([PEAKS, Part("bad", 5, ""), Part("good", 5, "")], run, 60)
    assert results.faults == {"bad": "an illegal address"}
    assert results.figures["bad"] == [Figure(COPY, 2.0, "GB/s")]
    assert results.figures["good"][-1].value == 2e9
    text = table(results.figures, results.faults)
    assert "FAILED: an illegal address" in text
    assert text.endswith("0 aims met, 2 missed, 1 parts failed")


def test_what_has_no_time_left_is_not_begun() -> None:
    results = measure([PEAKS], run_apart, 0.5)
    assert results.faults == {"peaks": "there was no time left for it"}


def test_a_part_that_hangs_is_killed() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="not done"):
        list(run_apart(Part("slow", 2, PEAKS.place), Peaks(), 0.2))
    assert time.monotonic() - start < 30  # it would hang for ever


def test_a_part_that_fails_says_so_with_its_last_words() -> None:
    with pytest.raises(RuntimeError, match=r"status 1: (.|\n)*Error"):
        list(run_apart(Part("none", 60, "nowhere:nothing"), Peaks(), 60))


def test_aims_are_met_or_missed() -> None:
    assert Figure("a", 5.0, "s", most=4.0).met is False
    assert Figure("a", 5.0, "GB/s", 0.9, "copy", least=0.8).met is True
    assert Figure("a", 5.0, "s").met is None
    assert Peaks.of({COPY: 3000.0, FLOAT8: 1500.0}) == Peaks(copy=3e12, float8=1.5e15)


def test_results_go_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.gpu.bench.PARTS", PARTS[:1])
    assert main(["--dry-run", "--json", str(tmp_path / "figures.json")]) == 0
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["figures"]["peaks"][0]["name"] == COPY
    assert COPY in capsys.readouterr().out
    assert Results().json() == {"figures": {}, "faults": {}}
