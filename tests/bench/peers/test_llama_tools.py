"""llama.cpp's own tools: their arguments, and how their output is parsed."""

from pathlib import Path

import pytest

from app.bench.competitor import CompetitorFailed
from app.bench.workload import Load, Rate, rows_of
from tests.bench.peers.fake_llama import FakeLlama
from tests.bench.peers.fake_llama_program import START
from tests.bench.peers.llama_build import LlamaBuild, describe, probe
from tests.bench.peers.llama_tools import LlamaTools, tools_for

MODEL = Path("/models/tiny.gguf")


@pytest.fixture
def build(fake_llama: FakeLlama) -> LlamaBuild:
    return probe(fake_llama.server)


def test_probe_reads_description_and_options_of_a_build(build: LlamaBuild) -> None:
    assert build.description == "build 1 (0c1e570) with GNU 12.2.0 for Linux x86_64: SSE3 AVX2 AVX512_VNNI"
    assert "--cache-ram" in build.server_options
    assert "--no-slots" in build.server_options
    assert "--no-webui" not in build.server_options


def test_describe_reads_output_of_older_builds() -> None:
    output = (
        "build: 4567 (abcdef0) with cc 13.1 for aarch64-linux-gnu\nsystem_info: n_threads = 4 | CPU : NEON = 1 | \n"
    )
    assert describe(output) == "build 4567 (abcdef0) with cc 13.1 for aarch64-linux-gnu: NEON"
    assert describe(START).endswith("AVX512_VNNI")


def test_probe_rejects_other_programs(tmp_path: Path) -> None:
    program = tmp_path / "echo"
    program.write_text('#!/bin/sh\necho "$@"\n')
    with pytest.raises(CompetitorFailed, match="does not start"):
        probe(program)
    program.chmod(0o755)
    with pytest.raises(CompetitorFailed, match="is not a llama-server"):
        probe(program)


def test_llama_bench_measures_one_stream(build: LlamaBuild, fake_llama: FakeLlama) -> None:
    """Each fake test takes half a second. A reply of 33 tokens has 32 steps: the prefill produces the first token."""
    load = Load(100, 33)
    sample = LlamaTools(build.description, build.tool, MODEL, 2).measure(load, ())
    assert sample.rates == {Rate.PREFILL: 200.0, Rate.DECODE: 64.0, Rate.END_TO_END: 33.0}
    common = ["-m", str(MODEL), "-t", "2"]
    assert fake_llama.calls("llama-bench") == [
        [*common, "-p", "100", "-n", "0", "-r", "1", "-o", "json"],
        [*common, "-p", "0", "-n", "32", "-d", "100", "-r", "1", "-o", "json"],
    ]


@pytest.mark.parametrize(("rate", "figure"), [(Rate.PREFILL, 200.0), (Rate.DECODE, 64.0)])
def test_only_requested_rates_are_measured(build: LlamaBuild, fake_llama: FakeLlama, rate: Rate, figure: float) -> None:
    sample = LlamaTools(build.description, build.tool, MODEL, 2).measure(Load(100, 33, rates=frozenset({rate})), ())
    assert sample.rates == {rate: figure}
    assert len(fake_llama.calls("llama-bench")) == 1


def test_reply_of_one_token_has_no_decode_rate(build: LlamaBuild, fake_llama: FakeLlama) -> None:
    sample = LlamaTools(build.description, build.tool, MODEL, 2).measure(Load(100, 1), ())
    assert sample.rates == {Rate.PREFILL: 200.0, Rate.END_TO_END: 2.0}
    assert len(fake_llama.calls("llama-bench")) == 1


def test_llama_batched_bench_measures_several_streams(build: LlamaBuild, fake_llama: FakeLlama) -> None:
    *_, row = rows_of(60, 24, 16)
    sample = LlamaTools(build.description, build.tool, MODEL, 2).measure(row.load, ())
    assert sample.rates == {Rate.DECODE: 736.0, Rate.END_TO_END: 16 * 24 / 2.0}
    assert sample.together == 16
    [arguments] = fake_llama.calls("llama-batched-bench")
    shape = ["-npp", "60", "-ntg", "23", "-npl", "16", "-tb", "2", "-c", "4096", "--output-format", "jsonl"]
    assert arguments == ["-m", str(MODEL), "-t", "2", *shape]


def test_failing_tool_raises_with_its_stderr(build: LlamaBuild) -> None:
    with pytest.raises(CompetitorFailed, match=r"ended with status 1(?s:.*)unable to load model"):
        LlamaTools(build.description, build.tool, Path("/models/broken.gguf"), 2).measure(Load(8, 8), ())


def test_unexpected_tool_output_raises(build: LlamaBuild, fake_llama: FakeLlama) -> None:
    (fake_llama.folder / "llama-bench").write_text("#!/bin/sh\necho '| model | size |'\n")
    with pytest.raises(CompetitorFailed, match="llama-bench printed output that this version cannot parse"):
        LlamaTools(build.description, build.tool, MODEL, 2).measure(Load(8, 8), ())


def test_missing_tool_raises(build: LlamaBuild, fake_llama: FakeLlama) -> None:
    assert tools_for([Load(8, 8), Load(8, 8, 2)]) == ["llama-batched-bench", "llama-bench"]
    assert tools_for([Load(8, 8, 2)]) == ["llama-batched-bench"]
    (fake_llama.folder / "llama-bench").unlink()
    with pytest.raises(CompetitorFailed, match=r"llama-bench does not exist"):
        build.tool("llama-bench")
