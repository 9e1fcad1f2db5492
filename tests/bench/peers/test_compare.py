"""The command that compares with peers, over the real default model and children of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app.bench.competitor import CompetitorFailed
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


def test_engines_in_comparison(environment: dict[str, str], fake_llama: FakeLlama) -> None:
    """The real xllamacpp, and the words of a real llama.cpp."""
    options = (*ONE_THREAD, "--xllamacpp", "--llama-server", str(fake_llama.server), "-q")
    done = compare(environment, *SMALL, *options, "--concurrency", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
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


def test_servers_in_comparison(environment: dict[str, str], fake_llama: FakeLlama) -> None:
    done = compare(environment, *SMALL, *ONE_THREAD, "--http", "--llama-server", str(fake_llama.server))
    assert done.returncode == 0, done.stderr
    titles, *lines = done.stdout.split("\n\n")[0].splitlines()
    assert titles.split() == ["ingle", "llama.cpp", "ours/theirs"]
    assert len(lines) == len(RATES) + 4
    assert "smollm2:135m, 20 + 4 tokens, 1 stream, over HTTP, on 1 thread of" in done.stdout
    assert not Path(environment["INGLE_STATE_DIR"]).exists()
    assert not Path(environment["INGLE_KV_DISK_DIR"]).exists()
    assert "\x1b" not in done.stdout + done.stderr


def test_an_interrupt_leaves_no_process_behind(environment: dict[str, str], fake_llama: FakeLlama) -> None:
    command = [*PROGRAM, *ONE_THREAD, "--http", "--llama-server", str(fake_llama.server), "--prompt-tokens", "99"]
    assert_interrupt_ends_all(command, 2, ROOT, environment)


def test_other_program_is_no_llama_server(environment: dict[str, str]) -> None:
    done = compare(environment, "--llama-server", "pyproject.toml")
    assert done.returncode == EXIT_FAILURE
    assert "does not start" in done.stderr
    assert "Traceback" not in done.stderr


def test_nobody_to_compare_with(monkeypatch: pytest.MonkeyPatch, fake_llama: FakeLlama) -> None:
    monkeypatch.setattr("tests.bench.peers.competitors.installed", lambda: False)
    with pytest.raises(CompetitorFailed, match="xllamacpp is not installed") as raised:
        find_peers(True, None, SilentProgress())
    assert "pip install xllamacpp" in raised.value.remedy
    assert exit_status(raised.value) == EXIT_FAILURE
    peers = find_peers(True, fake_llama.server, SilentProgress())
    assert not peers.xllamacpp
    assert peers.llama is not None
