"""`ingle run` in its own process, with the real default model: both streams, exit status, signals, and pipes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.command_line import ingle
from tests.app.forked_program import ForkedProgram
from tests.app.long_reply import WITHOUT_END
from tests.app.opened_file import wait_until_opened
from tests.support.processes import HANGING_SECONDS

ROOT = Path(__file__).parents[3]


@pytest.fixture
def environment(smollm2: Path, cpu_kernels: Path, tmp_path: Path) -> dict[str, str]:
    """An environment in which the model is stored, kernels are compiled, and offline mode is on."""
    own = {"INGLE_MODELS_DIR": str(smollm2.parent), "INGLE_OFFLINE": "1", "XDG_CONFIG_HOME": str(tmp_path)}
    own["INGLE_STATE_DIR"] = str(tmp_path / "state")  # prevents the test from finding a server of the developer
    return {**os.environ, **own, "HF_HUB_CACHE": str(tmp_path / "hub")}


@pytest.fixture
def process(environment: dict[str, str]) -> Iterator[list[ForkedProgram]]:
    """A list for processes that must end with the test."""
    started: list[ForkedProgram] = []
    yield started
    for one in started:
        with one:
            one.kill()


def run(environment: dict[str, str], *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a command that computes in its own process."""
    return ingle(environment, "run", "--once", *arguments, stdin=stdin)


def test_run_prints_an_answer(environment: dict[str, str]) -> None:
    done = run(environment, "What is the capital of France?", "--temperature", "0")
    assert done.returncode == 0, done.stderr.decode()
    assert "Paris" in done.stdout.decode()
    assert b"<|im_end|>" not in done.stdout
    assert b"Traceback" not in done.stderr


def test_same_seed_gives_the_same_json_answer(environment: dict[str, str]) -> None:
    answers = []
    for _ in range(2):
        done = run(environment, "-", "--json", "--seed", "7", "-t", "1", "-n", "12", "-q", stdin=b"Name a river.\n")
        assert done.returncode == 0, done.stderr.decode()
        assert done.stderr == b""
        answers.append(json.loads(done.stdout))
    first, second = answers
    assert first["text"] == second["text"] != ""
    assert first["seed"] == 7
    assert first["model"] == "smollm2:135m"
    assert first["usage"]["completion_tokens"] <= 12
    assert first["usage"]["total_tokens"] == first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert first["timings"]["ttft_ms"] > 0


def test_continue_adds_to_the_previous_conversation(environment: dict[str, str], tmp_path: Path) -> None:
    refused = run(environment, "-c", "And of Italy?")
    assert refused.returncode == 1
    assert b"no previous answer" in refused.stderr
    options = ("--json", "-t", "0", "-n", "20", "-q")
    first = json.loads(run(environment, "What is the capital of France?", "-s", "Be brief.", *options).stdout)
    saved = tmp_path / "state" / "last-run.json"
    assert saved.stat().st_mode & 0o777 == 0o600
    assert [message["role"] for message in json.loads(saved.read_bytes())["messages"]] == [
        "system",
        "user",
        "assistant",
    ]
    second = json.loads(run(environment, "--continue", "And of Italy?", *options).stdout)
    assert second["usage"]["prompt_tokens"] > first["usage"]["total_tokens"]
    messages = json.loads(saved.read_bytes())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[2]["content"] == first["text"]
    before = saved.read_bytes()
    run(environment, "--no-save", "A secret.", *options)
    assert saved.read_bytes() == before


def test_continue_uses_the_model_of_the_previous_run_unless_another_is_named(
    environment: dict[str, str], smollm2: Path
) -> None:
    options = ("--json", "-n", "1", "-q")
    run(environment, "Hi", "--model", str(smollm2), *options)
    models = [
        json.loads(run(environment, "-c", "And?", *options, *model).stdout)["model"]
        for model in ([], ["--model", "smollm2:135m"], [])
    ]
    assert models == [str(smollm2), "smollm2:135m", "smollm2:135m"]


def test_context_beyond_the_limit_of_the_model_is_lowered_with_a_warning(environment: dict[str, str]) -> None:
    done = run(environment, "Hello", "-n", "1", "--context", "16384")
    assert done.returncode == 0
    assert "The context of the model is 8,192 tokens. --context 16384 is lowered to that." in done.stderr.decode()


def test_truncated_answer_is_reported(environment: dict[str, str]) -> None:
    done = run(environment, "Tell me a long story.", "-n", "5", "--temperature", "0")
    assert done.returncode == 0
    assert b"cut off after 5 tokens" in done.stderr


def test_stop_text_ends_the_answer(environment: dict[str, str]) -> None:
    done = run(environment, "What is the capital of France?", "--temperature", "0", "--stop", "Par", "--json")
    answer = json.loads(done.stdout)
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == "The capital of France is "


def test_system_message_is_part_of_the_prompt(environment: dict[str, str]) -> None:
    plain, with_system = (
        json.loads(run(environment, "Hi", "--json", "-n", "1", *system).stdout)["usage"]["prompt_tokens"]
        for system in ([], ["--system", "one two three four five six seven eight nine ten " * 5])
    )
    assert with_system > plain


@pytest.mark.share(2)
@pytest.mark.parametrize("phase", ["compiling", "loading", "prefill", "decode"])
def test_interrupt_stops_at_once(
    environment: dict[str, str], smollm2: Path, process: list[ForkedProgram], phase: str, tmp_path: Path
) -> None:
    if phase == "compiling":
        environment["INGLE_CACHE_DIR"] = str(tmp_path / "cache")
    question, *sampling = WITHOUT_END
    prompt = "word " * 6000 if phase == "prefill" else question
    arguments, pipe = ("run", "-", *sampling, "--threads", "1"), subprocess.PIPE
    started = ForkedProgram(environment, *arguments, stdin=pipe, stdout=pipe)
    process.append(started)
    assert started.stdin is not None
    assert started.stdout is not None
    assert started.stderr is not None
    started.stdin.write(prompt)
    started.stdin.close()
    if phase == "compiling":
        assert any("Preparing" in line for line in started.stderr)
    elif phase == "loading":
        wait_until_opened(started, smollm2)
    elif phase == "prefill":
        assert any("Reading the prompt" in line for line in started.stderr)
    else:
        assert started.stdout.read(1)  # text is streamed while thousands of tokens are still to come
        assert started.poll() is None
    started.send_signal(signal.SIGINT)
    assert started.wait(HANGING_SECONDS) == 130
    rest = started.stderr.read()
    assert "Traceback" not in rest
    if phase != "decode":
        assert "done in" not in rest  # neither the interrupted task nor a later one is reported as done
        assert started.stdout.read().strip() == ""


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["  "], 2, "empty"),
        (["hi", "--temperature", "-1"], 2, "temperature"),
        (["hi", "--max-tokens", "0"], 2, "max_tokens"),
        (["hi", "--threads", "many"], 2, "threads"),
        (["hi", "--stop", "", "--model", "smolm2"], 2, "stop"),  # refused before the model is looked up
        (["hi", "--model", "smolm2"], 3, "smollm2"),
        (["hi", "--model", "./nothing.gguf"], 3, "nothing.gguf"),
        (["word " * 9000], 1, "8,192"),
        (["hi", "--context", "8"], 1, "context"),
    ],
)
def test_errors_have_a_message_and_an_exit_status(
    environment: dict[str, str], arguments: list[str], status: int, words: str
) -> None:
    done = run(environment, *arguments)
    assert done.returncode == status, done.stderr.decode()
    assert words in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert done.stdout.strip() == b""


def test_error_names_a_damaged_model_file(environment: dict[str, str], smollm2: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(smollm2.read_bytes()[:2_000_000])
    done = run(environment, "hi", "--model", str(broken))
    assert done.returncode == 1
    assert "exceeds" in done.stderr.decode() or "past the end" in done.stderr.decode()
    assert str(broken) in done.stderr.decode()
    assert b"Traceback" not in done.stderr


def test_too_little_memory_to_start_is_reported(environment: dict[str, str]) -> None:
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({300 << 20},) * 2)"
    code = (
        f"{limit}; import sys; from app.cli import main; sys.argv = ['ingle', 'run', '--once', 'hi']; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGING_SECONDS,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: There is not enough memory" in done.stderr
    assert "Traceback" not in done.stderr


def test_closed_stdout_prints_no_error(environment: dict[str, str], process: list[ForkedProgram]) -> None:
    started = ForkedProgram(environment, "run", "--once", *WITHOUT_END, "-q", stdout=subprocess.PIPE)
    process.append(started)
    assert started.stdout is not None
    assert started.stderr is not None
    started.stdout.read(1)
    started.stdout.close()
    assert started.wait(HANGING_SECONDS) != 0
    assert started.stderr.read() == ""
