"""The comparison command with the real default model, xllamacpp, and a fake llama.cpp."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from app.bench.chart import write_charts
from app.bench.competitor import CompetitorFailed
from app.bench.figures import read_entries
from app.errors import EXIT_FAILURE, exit_status
from app.progress import SilentProgress
from tests.app.commands.test_bench import ONE_THREAD, RATES, ROOT, SMALL, own_folders
from tests.bench.peers.competitors import find_peers
from tests.bench.peers.fake_llama import FakeLlama
from tests.support.processes import assert_interrupt_ends_all

PROGRAM = [sys.executable, "-m", "tests.bench.compare"]


@pytest.fixture
def environment(smollm2: Path, cpu_kernels: Path, tmp_path: Path) -> dict[str, str]:
    return own_folders(smollm2, tmp_path)


def compare(environment: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*PROGRAM, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_compare_measures_engines(environment: dict[str, str], fake_llama: FakeLlama) -> None:
    """Uses the real xllamacpp, and recorded output of llama.cpp's tools."""
    options = (*ONE_THREAD, "--xllamacpp", "--llama-server", str(fake_llama.server), "-q")
    result = compare(environment, *SMALL, *options, "--concurrency", "2", "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    found = json.loads(result.stdout)
    package, native = found["compare"]
    assert (package["peer"], native["peer"]) == ("xllamacpp", "llama.cpp")
    assert "GNU" in package["build"]
    assert package["figures"]["peak_rss_mb"] > 50
    for peer in (package, native):
        for name in RATES:
            assert peer["figures"][name] > 0
            ratio = peer["ratios"][name]
            assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
    assert all(call[2:4] == ["-t", "1"] for call in fake_llama.calls("llama-bench"))


def test_record_adds_all_programs_and_replaces_the_entry(
    environment: dict[str, str], fake_llama: FakeLlama, tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    options = (*SMALL, *ONE_THREAD, "--llama-server", str(fake_llama.server), "-q", "--record", str(figures))
    for title in ("Tiny 1M", "Tiny 1M", "Tiny 2M"):
        result = compare(environment, *options, "--title", title, "--chart", "tiny")
        assert result.returncode == 0, result.stderr
    first, second = read_entries(figures)
    assert (first.chart, first.model, second.model) == ("tiny", "Tiny 1M", "Tiny 2M")
    assert (
        first.command
        == f"python -m tests.bench.compare {shlex.join([*options, '--title', 'Tiny 1M', '--chart', 'tiny'])}"
    )
    assert list(first.builds) == ["Inglenook", "llama.cpp"]
    for measure in first.measures:
        assert [found.engine for found in measure.results] == ["Inglenook", "llama.cpp"]
    assert [path.name for path in write_charts(figures, tmp_path)] == ["tiny.svg"]


def test_compare_measures_servers_over_http(environment: dict[str, str], fake_llama: FakeLlama) -> None:
    result = compare(environment, *SMALL, *ONE_THREAD, "--http", "--llama-server", str(fake_llama.server))
    assert result.returncode == 0, result.stderr
    titles, *lines = result.stdout.split("\n\n")[0].splitlines()
    assert titles.split() == ["ingle", "llama.cpp", "ours/theirs"]
    assert len(lines) == len(RATES) + 4
    assert "smollm2:135m, 20 + 4 tokens, 1 stream, over HTTP, on 1 thread of" in result.stdout
    assert not Path(environment["INGLE_STATE_DIR"]).exists()
    assert not Path(environment["INGLE_KV_DISK_DIR"]).exists()
    assert "\x1b" not in result.stdout + result.stderr


def test_interrupt_ends_all_child_processes(environment: dict[str, str], fake_llama: FakeLlama) -> None:
    command = [*PROGRAM, *ONE_THREAD, "--http", "--llama-server", str(fake_llama.server), "--prompt-tokens", "99"]
    assert_interrupt_ends_all(command, 2, ROOT, environment)


def test_program_other_than_llama_server_is_an_error(environment: dict[str, str]) -> None:
    result = compare(environment, "--llama-server", "pyproject.toml")
    assert result.returncode == EXIT_FAILURE
    assert "does not start" in result.stderr
    assert "Traceback" not in result.stderr


def test_find_peers_fails_without_xllamacpp_and_llama_server(
    monkeypatch: pytest.MonkeyPatch, fake_llama: FakeLlama
) -> None:
    monkeypatch.setattr("tests.bench.peers.competitors.installed", lambda: False)
    with pytest.raises(CompetitorFailed, match="xllamacpp is not installed") as raised:
        find_peers(True, None, SilentProgress())
    assert "pip install xllamacpp" in raised.value.remedy
    assert exit_status(raised.value) == EXIT_FAILURE
    peers = find_peers(True, fake_llama.server, SilentProgress())
    assert not peers.xllamacpp
    assert peers.llama is not None
