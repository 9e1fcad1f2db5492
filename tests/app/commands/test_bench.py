"""`ingle bench` with the real default model, in child processes, with small workloads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.bench.figures import read_entries
from app.bench.measured_model import read_model
from app.commands.bench import bench as command
from app.models.stored_model import StoredModel
from tests.app.command_line import ingle
from tests.engine.models.tiny_llama import make as make_tiny
from tests.support.processes import assert_interrupt_ends_all

ROOT = Path(__file__).parents[3]
PROGRAM = [sys.executable, "-m", "app", "bench"]
SMALL = ("--prompt-tokens", "20", "--output-tokens", "4", "--repeat", "1")
ONE_THREAD = ("--kernels", "cpu", "--threads", "1", "--context", "512")
RATES = ("prefill_tok_s", "decode_tok_s", "throughput_tok_s", "end_to_end_tok_s")


@pytest.fixture
def environment(smollm2: Path, cpu_kernels: Path, tmp_path: Path) -> dict[str, str]:
    return own_folders(smollm2, tmp_path)


def own_folders(smollm2: Path, tmp_path: Path) -> dict[str, str]:
    """An environment in which the model is stored and offline mode is on."""
    own = {"INGLE_MODELS_DIR": str(smollm2.parent), "INGLE_OFFLINE": "1", "XDG_CONFIG_HOME": str(tmp_path)}
    own |= {"INGLE_STATE_DIR": str(tmp_path / "state"), "INGLE_KV_DISK_DIR": str(tmp_path / "kv")}
    return {**os.environ, **own, "HF_HUB_CACHE": str(tmp_path / "hub")}


def bench(environment: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    done = ingle(environment, "bench", *arguments)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_json_option_prints_one_object(environment: dict[str, str], smollm2: Path) -> None:
    done = bench(environment, *SMALL, *ONE_THREAD, "--concurrency", "2", "--repeat", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["model"], found["device"], found["backend"]) == ("smollm2:135m", "cpu", "cpu")
    assert (found["prompt_tokens"], found["output_tokens"], found["concurrency"]) == (20, 4, 2)
    assert (found["threads"], found["repeat"], found["via"]) == (1, 2, "engine")
    for name in (*RATES, "weight_gb_s"):
        low, high = found["spread"][name]
        assert 0 < low <= found[name] <= high
    assert 0 < found["ttft_ms"]["p50"] <= found["ttft_ms"]["p99"]
    assert 0 < found["itl_ms"]["p50"] <= found["itl_ms"]["p99"]
    assert found["weight_gb_s"] == pytest.approx(found["decode_tok_s"] * 0.0966, rel=0.01)
    assert found["peak_rss_mb"] > smollm2.stat().st_size / 1e6
    assert found["peak_vram_mb"] == 0
    assert "Round 2 of 2: 20 + 4 tokens, 2 streams" in done.stderr
    assert not Path(environment["INGLE_KV_DISK_DIR"]).exists()


def test_recorded_figures_can_be_plotted(environment: dict[str, str], tmp_path: Path) -> None:
    figures, charts = tmp_path / "figures.json", tmp_path / "new" / "charts"
    done = bench(environment, *SMALL, *ONE_THREAD, "--record", str(figures), "-q")
    assert done.returncode == 0, done.stderr
    [entry] = read_entries(figures)
    assert entry.command == f"ingle bench {' '.join([*SMALL, *ONE_THREAD])} --record {figures} -q"
    assert (entry.chart, entry.machine.threads) == ("smollm2-135m-q4_1", 1)
    done = bench(environment, "--plot", str(figures), "--to", str(charts))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [str(charts / "smollm2-135m-q4_1.svg")]
    assert "prefill, 20 tokens" in (charts / "smollm2-135m-q4_1.svg").read_text(encoding="utf-8")


def test_plot_without_a_file_needs_a_checkout(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = bench(environment, "--plot", "--to", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    names = {path.name for path in (ROOT / "docs/figures").glob("*.svg")}
    assert {Path(line).name for line in done.stdout.splitlines()} == names
    [option] = [option for option in command.params if option.name == "plot"]
    monkeypatch.setattr(option, "flag_value", str(tmp_path / "docs/figures/speed.json"))
    done = bench(environment, "--plot")
    assert done.returncode == 1
    assert "Name a file: ingle bench --plot FILE" in done.stderr


def test_malformed_file_fails_before_the_measurement(environment: dict[str, str], tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text('{"entries": [{"chart": "tiny"}]}', encoding="utf-8")
    done = bench(environment, *SMALL, *ONE_THREAD, "--record", str(figures))
    assert done.returncode == 1
    assert "entry 1 (tiny): Object missing required field `model`" in done.stderr
    assert "Round 1" not in done.stderr


def test_http_measures_a_server(environment: dict[str, str]) -> None:
    # 32 tokens: on a busy machine the server may send several tokens in one chunk, and one chunk has no decode rate
    done = bench(environment, *SMALL, *ONE_THREAD, "--http", "--output-tokens", "32")
    assert done.returncode == 0, done.stderr
    titles, *lines = done.stdout.split("\n\n")[0].splitlines()
    assert titles.split() == ["ingle"]
    assert len(lines) == len(RATES) + 4
    assert "smollm2:135m, 20 + 32 tokens, 1 stream, over HTTP, on 1 thread of" in done.stdout
    assert not Path(environment["INGLE_STATE_DIR"]).exists()
    assert not Path(environment["INGLE_KV_DISK_DIR"]).exists()
    assert "\x1b" not in done.stdout + done.stderr


def test_interrupt_ends_all_processes(environment: dict[str, str]) -> None:
    command = [*PROGRAM, *ONE_THREAD, "--http", "--prompt-tokens", "99"]
    assert_interrupt_ends_all(command, 1, ROOT, environment)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--prompt-tokens", "0"], 2, "0 is not in the range"),
        (["--output-tokens", "0"], 2, "0 is not in the range"),
        (["--concurrency", "0"], 2, "0 is not in the range"),
        (["--repeat", "0"], 2, "0 is not in the range"),
        (["--suite", "--concurrency", "4"], 2, "remove --concurrency"),
        (["--plot", "figures.json", "--suite"], 2, "remove --suite"),
        (["--plot", "figures.json", "--record", "figures.json"], 2, "remove --record"),
        (["--plot", "figures.json", "--tune"], 2, "remove --tune"),
        (["--to", "charts"], 2, "--to works only with --plot"),
        (["--plot", "missing.json"], 1, "ingle bench --plot FILE"),
        (["--http", "--context", "512", "--output-tokens", "1"], 2, "do not fit the context of 512 tokens"),
        ([*ONE_THREAD, "--concurrency", "500", *SMALL], 2, "The load has 500 streams, but the engine runs at most"),
        (["--model", "smolm2"], 3, "smollm2"),
    ],
)
def test_errors_have_a_message_and_an_exit_status(
    environment: dict[str, str], arguments: list[str], status: int, words: str
) -> None:
    done = bench(environment, *arguments)
    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_count_what_a_decode_step_reads(tmp_path: Path, tied: bool) -> None:
    """A tied embedding counts with all its rows; a separate one counts as one row."""
    path = make_tiny(tmp_path, tied=tied).path
    model = read_model(StoredModel("tiny", path, path.stat().st_size, None, "", None, None))
    attention, mlp, norms = (64 + 32 + 32 + 64) * 64, 3 * 96 * 64, 2 * 64
    numbers = 3 * (attention + mlp + norms) + 64 + 97 * 64
    assert model.weight_bytes == 4 * (numbers if tied else numbers + 64)
    assert (model.vocab_size, model.context_length) == (97, 512)
