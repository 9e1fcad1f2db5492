"""`ingle run` with a server in the background, which it starts, uses again, and leaves to end by itself."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.process.instance import Instance, running_instances, stop_instance
from app.settings.settings import Settings, load_settings
from tests.app.forked_program import ForkedProgram
from tests.app.long_reply import WITHOUT_END
from tests.support.processes import HANGING_SECONDS, until

QUESTION = ("What is the capital of France?", "-t", "0", "-n", "8", "--json", "-q")


@pytest.fixture
def environment(smollm2: Path, cpu_kernels: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment in which the model is stored. Servers that are still running at the end are stopped."""
    own = {"INGLE_MODELS_DIR": str(smollm2.parent), "INGLE_OFFLINE": "1", "XDG_CONFIG_HOME": str(tmp_path)}
    own |= {"INGLE_STATE_DIR": str(tmp_path / "state"), "INGLE_KV_DISK_GB": "0", "HF_HUB_CACHE": str(tmp_path / "hub")}
    yield {**os.environ, **own}
    settings = settings_in(tmp_path)
    for instance in running_instances(settings):
        stop_instance(instance, settings)


def settings_in(tmp_path: Path) -> Settings:
    return load_settings(state_dir=tmp_path / "state")


def servers(tmp_path: Path) -> list[Instance]:
    return running_instances(settings_in(tmp_path))


def engine_processes(tmp_path: Path) -> list[int]:
    """Return the pids of the engine processes whose state folder is in `tmp_path`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            variables = (folder / "environ").read_bytes()
        except OSError:  # the process has ended
            continue
        if b"app.chat_backend.engine.child" in command and str(tmp_path).encode() in variables:
            found.append(int(folder.name))
    return found


def ingle(environment: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    with ForkedProgram(environment, *arguments, stdout=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=HANGING_SECONDS)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def answer(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    done = ingle(environment, "run", *QUESTION, *arguments)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert isinstance(content, dict)
    return content


def test_later_runs_use_the_server_of_the_first(environment: dict[str, str], smollm2: Path, tmp_path: Path) -> None:
    first = answer(environment)
    [server] = servers(tmp_path)
    assert server.kind == "chat"
    assert server.port != load_settings().port
    assert answer(environment)["text"] == first["text"] == answer(environment, "--once")["text"]
    assert servers(tmp_path) == [server]
    assert answer(environment, "--threads", "1")["text"] == first["text"]  # in its own process
    listed = json.loads(ingle(environment, "ps", "--json").stdout)
    assert [model["state"] for model in listed[0]["models"]] == ["loaded"]
    assert ingle(environment, "unload", "smollm2:135m").returncode == 0
    assert answer(environment)["text"] == first["text"]
    assert servers(tmp_path) == [server]
    assert ingle(environment, "stop").returncode == 0
    assert engine_processes(tmp_path) == []


def test_server_ends_after_its_last_request(environment: dict[str, str], tmp_path: Path) -> None:
    answer({**environment, "INGLE_KEEP_ALIVE_S": "0"})
    until(lambda: not engine_processes(tmp_path))
    assert servers(tmp_path) == []


def test_run_with_own_process_leaves_no_server(environment: dict[str, str], tmp_path: Path) -> None:
    answer(environment, "--once")
    assert not (tmp_path / "state" / "servers").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["hi", "--model", "smolm2"], 3, "smollm2"),
        (["hi", "--model", "qwen3:0.6b"], 5, "offline mode is on"),
        (["hi", "--model", "BROKEN"], 1, "broken.gguf"),
        (["word " * 9000], 1, "8,192"),
    ],
)
def test_errors_of_the_server_are_those_of_an_own_process(
    environment: dict[str, str], smollm2: Path, tmp_path: Path, arguments: list[str], status: int, words: str
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(smollm2.read_bytes()[:2_000_000])
    arguments = [str(broken) if word == "BROKEN" else word for word in arguments]
    served, alone = (ingle(environment, "run", *arguments, *once) for once in ((), ("--once",)))
    assert served.returncode == alone.returncode == status, served.stderr
    assert words in served.stderr
    errors, errors_alone = (re.findall(r"^error: .*", one.stderr, re.M) for one in (served, alone))
    assert errors == errors_alone
    if words != "8,192":
        assert engine_processes(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_of_the_start_ends_the_server(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    with ForkedProgram(environment, "run", "hi") as process:
        until(lambda: bool(engine_processes(tmp_path)))
        time.sleep(0.5)
        process.send_signal(number)
        assert process.wait(HANGING_SECONDS) == 130
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert engine_processes(tmp_path) == []


def test_interrupt_of_the_answer_keeps_the_server(environment: dict[str, str], tmp_path: Path) -> None:
    with ForkedProgram(environment, "run", *WITHOUT_END, "-q", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANGING_SECONDS) == 130
    assert len(servers(tmp_path)) == 1
    assert answer(environment)["text"]


def test_two_runs_at_once_start_one_server(environment: dict[str, str], tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    with (
        ForkedProgram(environment, "run", *QUESTION, stdout=pipe) as one,
        ForkedProgram(environment, "run", *QUESTION, stdout=pipe) as other,
    ):
        assert one.wait(HANGING_SECONDS) == other.wait(HANGING_SECONDS) == 0
    assert len(servers(tmp_path)) == 1
