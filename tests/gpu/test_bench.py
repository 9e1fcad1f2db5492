"""The GPU benchmark without a GPU: each part runs with toy sizes, and failures do not stop the rest."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.accuracy import SPREAD, agreement
from tests.gpu.bench import PARTS, PEAKS, Results, main, measure
from tests.gpu.figures import COPY, FLOAT8, Figure, Peaks
from tests.gpu.part import Part, run_dry, run_in_process
from tests.gpu.table import table
from tests.kernels.weights import ROWS


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_benchmark_part_runs_at_toy_size(part: Part) -> None:
    figures = list(run_dry(part, Peaks(1e9, 1e9, 1e9, 1e9, 1e9), 60))
    assert figures
    assert all(figure.met is not False for figure in figures if part.name == "accuracy")
    assert all(figure.value >= 0 and figure.unit in UNITS for figure in figures)


UNITS = ("GB/s", "TFLOP/s", "tok/s", "ms", "s", "nats", "")


def test_failing_part_does_not_stop_the_others() -> None:
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
    assert text.endswith("0 targets met, 2 missed, 1 parts failed")


def test_part_without_time_left_is_not_started() -> None:
    results = measure([PEAKS], run_in_process, 0.5)
    assert results.faults == {"peaks": "no time left"}


def test_hanging_part_is_killed() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="not done"):
        list(run_in_process(Part("slow", 2, PEAKS.entry_point), Peaks(), 0.2))
    assert time.monotonic() - start < 30  # without the limit it would run much longer


def test_failing_part_raises_the_end_of_its_output() -> None:
    with pytest.raises(RuntimeError, match=r"status 1: (.|\n)*Error"):
        list(run_in_process(Part("none", 60, "nowhere:nothing"), Peaks(), 60))


def test_report_states_which_figures_meet_their_targets() -> None:
    assert Figure("a", 5.0, "s", most=4.0).met is False
    assert Figure("a", 5.0, "GB/s", 0.9, "copy", least=0.8).met is True
    assert Figure("a", 5.0, "s").met is None
    assert Peaks.of({COPY: 3000.0, FLOAT8: 1500.0}) == Peaks(copy=3e12, float8=1.5e15)


def test_results_are_written_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.gpu.bench.PARTS", [PEAKS])
    assert main(["--dry-run", "--json", str(tmp_path / "figures.json")]) == 0
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["figures"]["peaks"][0]["name"] == COPY
    assert COPY in capsys.readouterr().out
    assert Results().json() == {"figures": {}, "faults": {}}


def test_single_part_runs_after_the_peaks(tmp_path: Path) -> None:
    assert main(["--dry-run", "--part", "experts", "--json", str(tmp_path / "figures.json")]) == 0
    assert [*json.loads((tmp_path / "figures.json").read_text())["figures"]] == ["peaks", "experts"]


def test_agreement_of_best_tokens_can_fail() -> None:
    want = torch.randn(64, ROWS) * SPREAD
    repeated = want.repeat(1, 4)  # as the rows of random weights do, so that the best logits are equal
    assert agreement(repeated, repeated) == 1.0
    assert agreement(repeated, torch.randn(64, 4 * ROWS)) < 0.5
    assert agreement(torch.zeros(4, ROWS), torch.zeros(4, ROWS)) == 0.0  # nothing was compared
