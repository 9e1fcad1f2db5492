"""The tools of ik_llama.cpp: their arguments, and how their output is parsed."""

from pathlib import Path

import pytest

from app.bench.competitor import CompetitorFailed
from app.bench.workload import Load, Rate, rows_of
from tests.bench.peers.ik_llama import IkTools

MODEL = Path("/models/tiny.gguf")
SINGLE = '[{"n_prompt": 100, "n_gen": 32, "avg_ns": 500000000}]'
BATCHED = """\
|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|    60 |     23 |   16 |   1328 |    1.500 |   640.00 |    0.500 |   736.00 |    2.000 |   664.00 |
"""


def programs(folder: Path, output: str) -> Path:
    """Make both tools: they print the output, and append their arguments to a file."""
    for name in ("llama-bench", "llama-batched-bench"):
        program = folder / name
        to = " >&2" if name == "llama-batched-bench" else ""
        program.write_text(f"#!/bin/sh\necho \"$@\" >> '{folder}/arguments'\ncat{to} <<'END'\n{output}\nEND\n")
        program.chmod(0o755)
    return folder


def test_llama_bench_measures_prefill_and_decode(tmp_path: Path) -> None:
    sample = IkTools(programs(tmp_path, SINGLE), MODEL, 2).measure(Load(100, 33), ())
    assert sample.rates == {Rate.PREFILL: 200.0, Rate.DECODE: 64.0, Rate.END_TO_END: 33.0}
    assert (tmp_path / "arguments").read_text().splitlines() == [
        "-m /models/tiny.gguf -t 2 -p 100 -n 0 -r 1 -o json",
        "-m /models/tiny.gguf -t 2 -p 0 -n 0 -gp 100,32 -r 1 -o json",
    ]


def test_several_streams_are_measured_by_llama_batched_bench(tmp_path: Path) -> None:
    *_, row = rows_of(60, 24, 16)
    sample = IkTools(programs(tmp_path, BATCHED), MODEL, 2).measure(row.load, ())
    assert sample.rates == {Rate.DECODE: 736.0, Rate.END_TO_END: 16 * 24 / 2.0}
    assert "-npp 60 -ntg 23 -npl 16 -tb 2" in (tmp_path / "arguments").read_text()


@pytest.mark.parametrize("output", ["", "no table", "| PP |\n| 1 | 2 |"])
def test_output_without_figures_is_an_error(tmp_path: Path, output: str) -> None:
    *_, row = rows_of(60, 24, 16)
    with pytest.raises(CompetitorFailed, match="cannot parse"):
        IkTools(programs(tmp_path, output), MODEL, 2).measure(row.load, ())


def test_missing_program_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CompetitorFailed, match="llama-bench does not exist"):
        IkTools(tmp_path, MODEL, 2).measure(Load(100, 33), ())
