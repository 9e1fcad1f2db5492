"""`ingle serve`, `ps`, `stop`, and a `run` that uses the server, with real processes and the real model."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.command_line import ingle
from tests.app.forked_program import ForkedProgram
from tests.app.long_reply import WITHOUT_END
from tests.app.opened_file import wait_until_opened
from tests.support.processes import HANGING_SECONDS, Started, until

ROOT = Path(__file__).parents[3]
PROGRAM = [sys.executable, "-m", "app"]
ENDLESS = {
    "model": "smollm2:135m",
    "messages": [{"role": "user", "content": "Count upwards."}],
    "stream": True,
    "ignore_eos": True,
}


@dataclass
class Server:
    """A running process of `ingle serve` that is ready."""

    process: "subprocess.Popen[str]"
    environment: dict[str, str]
    url: str  # "http://127.0.0.1:PORT"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ingle(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run another command as the same user, within the test process."""
        done = ingle(self.environment, *arguments)
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

    def ingle_process(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run another command as the same user in a new process."""
        own = self.environment | environment
        return subprocess.run([*PROGRAM, *arguments], cwd=ROOT, env=own, capture_output=True, text=True, check=False)

    def listed(self) -> list[dict[str, Any]]:
        servers: list[dict[str, Any]] = json.loads(self.ingle("ps", "--json").stdout)
        return servers

    def records(self) -> list[Path]:
        return list(Path(self.environment["INGLE_STATE_DIR"], "servers").iterdir())

    def children(self) -> list[int]:
        """Return the children of all threads of the server."""
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


Start = Callable[..., Server]


@pytest.fixture(scope="module")
def start(smollm2: Path, cpu_kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Return a function that starts servers, each with a separate home. They end with the test."""
    with ExitStack() as stack:

        def started(*arguments: str, home: Path | None = None) -> Server:
            home = home or tmp_path_factory.mktemp("home")
            environment = environment_of(smollm2, home)
            process = stack.enter_context(serve(environment, "--context", "2048", *arguments))
            stack.callback(process.kill)
            return ready(process, environment)

        yield started


def environment_of(model: Path, home: Path) -> dict[str, str]:
    """Return an environment in which the model is stored and offline mode is on."""
    own = {
        "INGLE_MODELS_DIR": str(model.parent),
        "INGLE_OFFLINE": "1",
        "INGLE_THREADS": "1",
        "INGLE_STATE_DIR": str(home / "state"),
        "INGLE_KV_DISK_DIR": str(home / "kv"),
        "XDG_CONFIG_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
    }
    return {**os.environ, **own}


def serve(environment: dict[str, str], *arguments: str) -> "subprocess.Popen[str]":
    return ForkedProgram(environment, "serve", "--port", "0", *arguments)


def ready(process: "subprocess.Popen[str]", environment: dict[str, str]) -> Server:
    """Return the server after it has printed that it is ready."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if found := re.search(r"is ready at (http://127\.0\.0\.1:\d+)/v1", line):
            return Server(process, environment, found[1])
    raise AssertionError("".join(said))


@pytest.fixture(scope="module")
def server(start: Start) -> Server:
    """A server for tests that do not change it."""
    return start()


@pytest.fixture(scope="module")
def other(start: Start) -> Server:
    """A second server, for a test that reads its whole log and a later test that stops it."""
    return start()


def test_server_is_ready_on_both_loopback_addresses(server: Server) -> None:
    for address in ("127.0.0.1", "[::1]", "localhost"):
        health = httpx.get(f"http://{address}:{server.port}/health", trust_env=False)
        assert health.status_code == 200
        assert health.json()["status"] == "ok"


def test_engine_report_has_memory_and_disk_use(server: Server) -> None:
    report = httpx.get(f"{server.url}/inglenook/engine", trust_env=False).json()
    assert report["block_bytes"] > 0
    assert report["disk"]["total"] > report["disk"]["used"] >= 0
    assert report["gpu"] is None


def test_ps_lists_the_server(server: Server) -> None:
    [listed] = server.listed()
    assert listed["pid"] == server.process.pid
    assert listed["api_url"] == f"{server.url}/v1"
    assert (listed["kind"], listed["model"]) == ("server", "smollm2:135m")
    assert (listed["status"], listed["running"], listed["waiting"]) == ("ok", 0, 0)
    assert listed["started_at"] <= "9999"
    table = server.ingle("ps").stdout.splitlines()
    assert table[0].split() == ["PID", "KIND", "MODEL", "STATUS", "SINCE", "URL"]
    assert table[1].split()[:4] == [str(server.process.pid), "server", "smollm2:135m", "ok"]
    assert table[1].endswith(f"{server.url}/v1")


def test_ps_counts_running_requests(server: Server) -> None:
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=ENDLESS, timeout=600) as response:
        assert response.status_code == 200
        next(lines := response.iter_lines())
        assert [one["running"] for one in server.listed()] == [1]
        next(lines)


def test_error_names_the_ingle_server_on_the_port(server: Server) -> None:
    done = ingle(server.environment, "serve", "--port", str(server.port))
    assert done.returncode == 1
    said = done.stderr.decode()
    assert f"in use by ingle itself, which serves smollm2:135m (pid {server.process.pid})" in said
    assert f"ingle stop {server.port}" in said


def test_error_names_the_program_on_the_port(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = server.ingle("serve", "--port", str(port))
    assert done.returncode == 1
    assert f"error: port {port} is in use by" in done.stderr
    assert f"(pid {os.getpid()})" in done.stderr
    assert "--port" in done.stderr
    assert len(server.records()) == 2  # the record and the lock of the running server


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.2", "::", "example.org"])  # noqa: S104
def test_serving_other_machines_needs_a_key(server: Server, host: str) -> None:
    done = ingle(server.environment, "serve", "--host", host)
    assert done.returncode == 2
    assert b"--api-key-file" in done.stderr


@pytest.fixture
def no_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which a process that imports torch fails."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    return {"PYTHONPATH": str(tmp_path)}


def test_run_uses_a_running_server(server: Server, no_torch: dict[str, str]) -> None:
    question = ("run", "What is the capital of France?", "-t", "0")
    done = server.ingle_process(*question, **no_torch)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert done.stderr == ""
    answer = json.loads(server.ingle_process(*question, "--json", **no_torch).stdout)
    assert answer["text"] == done.stdout.rstrip("\n")
    assert answer["usage"]["cached_tokens"] > 0


def test_run_gives_the_same_answer_with_and_without_a_server(server: Server, no_torch: dict[str, str]) -> None:
    flags = ("--top-k", "20", "--min-p", "0.02", "--top-p", "0.9", "--repetition-penalty", "1.2", "-t", "1.1")
    question = (
        "run",
        "Name a river.",
        "-s",
        "Be brief.",
        "-n",
        "12",
        "--seed",
        "11",
        "--stop",
        "zzz",
        "--json",
        *flags,
    )
    attached = json.loads(server.ingle_process(*question, **no_torch).stdout)
    own = json.loads(ingle(server.environment, *question, "--context", "2048", "--kv-disk-gb", "0").stdout)
    assert attached.keys() == own.keys()
    for part in ("model", "text", "finish_reason", "seed"):
        assert attached[part] == own[part]
    for usage in (attached["usage"], own["usage"]):
        cached, details = usage.pop("cached_tokens"), usage.pop("prompt_tokens_details")
        assert details["cached_tokens"] == details["device_tokens"] == cached
        assert details["computed_tokens"] == usage["prompt_tokens"] - cached
    assert attached["usage"] == own["usage"]
    assert details["miss"] == {"reason": "first_time", "position": 0}
    assert attached["timings"].keys() == own["timings"].keys()
    assert attached["timings"]["ttft_ms"] > 0


def test_server_and_run_use_the_same_default_sampling(server: Server) -> None:
    question = "What is the capital of France?"
    own = json.loads(ingle(server.environment, "run", question, "--json", "--kv-disk-gb", "0", "-q").stdout)
    body = {"model": "smollm2:135m", "messages": [{"role": "user", "content": question}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, trust_env=False, timeout=600).json()
    assert answer["choices"][0]["message"]["content"] == own["text"]
    assert "Paris" in own["text"]


def test_sampling_defaults_generic_tools_and_images_can_be_turned_off(start: Start, tmp_path: Path) -> None:
    (tmp_path / "inglenook").mkdir()
    (tmp_path / "inglenook" / "config.toml").write_text('images = "refuse"\n', encoding="utf-8")
    server = start("--sampling-defaults", "none", "--no-generic-tools", home=tmp_path)
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}]}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, trust_env=False).status_code == 400
    assert httpx.get(f"{server.url}/props", trust_env=False).json()["tool_support"] == "none"
    [model] = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
    assert model["default_sampling"] is None
    answer = json.loads(server.ingle("run", "What is the capital of France?", "--json").stdout)
    assert "Paris" in answer["text"]  # `ingle run` uses its own default sampling


def test_every_request_is_logged_in_a_line(other: Server) -> None:
    assert other.process.stderr is not None
    for part in ("37 computed; no similar prompt before; first token after", "first token after"):
        assert other.ingle("run", "What is the capital of France?", "-n", "3").returncode == 0
        line = other.process.stderr.readline()
        assert re.match(r"\d\d:\d\d:\d\d smollm2:135m interactive; prompt \d+: \d+ device, 0 RAM, 0 disk, ", line)
        assert part in line
        assert re.search(r"; 3 tokens at [\d.]+/s$", line.rstrip("\n"))
        assert "France" not in line
    shown = other.ingle("logs").stdout.splitlines()
    assert f" {other.port} smollm2:135m is ready at {other.url}/v1" in shown[-3]
    assert [" 3 tokens at " in one for one in shown[-2:]] == [True, True]
    assert "France" not in "".join(shown)


@pytest.mark.parametrize(
    "flags", [["--context", "64"], ["--threads", "1"], ["--kernels", "reference"], ["--kv-disk-gb", "1"]]
)
def test_run_with_an_engine_option_starts_an_engine(server: Server, no_torch: dict[str, str], flags: list[str]) -> None:
    done = server.ingle_process("run", "hi", "-n", "1", *flags, **no_torch)
    assert done.returncode == 1
    assert "torch was imported" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["word " * 3000], 1, "context holds 2,048"),
        (["hi", "--temperature", "-1"], 2, "temperature"),
        (["hi", "--model", "smolm2"], 3, "smollm2"),
    ],
)
def test_run_with_a_server_reports_errors(
    server: Server, no_torch: dict[str, str], arguments: list[str], status: int, words: str
) -> None:
    done = server.ingle_process("run", *arguments, **no_torch)
    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_file_is_served_under_aliases_and_found_by_path(start: Start, smollm2: Path, no_torch: dict[str, str]) -> None:
    server = start("--model", str(smollm2), "--served-model-name", "mine,other")
    listed = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
    assert [(model["id"], model["root"]) for model in listed[:2]] == [("mine", "mine"), ("other", "mine")]
    assert str(smollm2) not in [model["id"] for model in listed]
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    for name, served in (("other", "other"), (str(smollm2), "mine"), (None, "mine")):
        body = {**asked, "model": name}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, trust_env=False, timeout=60).json()
        assert reply["model"] == served
    done = server.ingle_process("run", "hi", "-n", "1", "--model", str(smollm2), **no_torch)
    assert done.returncode == 0, done.stderr
    assert [listed["model"] for listed in server.listed()] == [str(smollm2)]


def test_interrupted_run_ends_its_request(server: Server) -> None:
    with ForkedProgram(server.environment, "run", *WITHOUT_END, "-q", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        assert [one["running"] for one in server.listed()] == [1]
        process.send_signal(signal.SIGINT)
        assert process.wait(HANGING_SECONDS) == 130
    assert any(server.listed()[0]["running"] == 0 for _ in range(100))


def follow(server: Server, act: Callable[[], object]) -> list[str]:
    """Read an endless reply, call `act` after its first text, and read to the end. Return its events."""
    events = []
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=ENDLESS, timeout=600) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line:
                events.append(line.removeprefix("data: "))
            if len(events) == 3:
                act()
                act = int
    return events


@pytest.mark.share(2)
@pytest.mark.parametrize("way", ["SIGINT", "SIGTERM", "SIGHUP", "SIGTERM SIGTERM SIGHUP", "stop"])
def test_stopping_ends_streams_with_an_error_and_leaves_no_processes(start: Start, way: str) -> None:
    server = start()
    children = server.children()
    assert children, "the child that renders chat templates"
    stops = []

    def stop() -> None:
        if way == "stop":
            command = [*PROGRAM, "stop", str(server.port)]
            stops.append(Started(command, cwd=ROOT, env=server.environment, stderr=subprocess.PIPE))
        else:
            for name in way.split():  # several signals, as if two programs sent one each
                server.process.send_signal(signal.Signals[name])

    events = follow(server, stop)
    for stopping in stops:
        with stopping:
            assert stopping.wait(HANGING_SECONDS) == 0
    assert "error" in json.loads(events[-1]), events[-3:]
    assert server.process.wait(HANGING_SECONDS) == 0
    assert server.process.stderr is not None
    assert "Traceback" not in server.process.stderr.read()
    assert server.records() == []
    until(lambda: not [child for child in children if Path(f"/proc/{child}").exists()])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


def test_ctrl_c_ends_a_stopping_server_at_once(other: Server) -> None:
    """SIGINT arrives in time, because stopping takes at least some hundredths of a second."""
    other.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + HANGING_SECONDS
    while other.process.poll() is None:
        assert time.monotonic() < deadline
        other.process.send_signal(signal.SIGINT)
        time.sleep(0.005)
    assert other.process.returncode == 130
    assert other.records() == []


def test_killed_server_is_not_listed(start: Start) -> None:
    server = start()
    assert server.records()
    server.process.kill()
    server.process.wait(HANGING_SECONDS)
    assert server.records()
    assert server.listed() == []
    assert server.records() == []
    done = server.ingle("stop")
    assert done.returncode == 3
    assert "No server is running." in done.stderr
    assert "try: ingle serve" in server.ingle("ps").stderr


def test_servers_are_stopped_by_process_id_or_all_at_once(start: Start, tmp_path: Path) -> None:
    first, second = start(home=tmp_path), start(home=tmp_path)
    assert {one["port"] for one in first.listed()} == {first.port, second.port}
    done = first.ingle("stop")
    assert done.returncode == 2
    assert str(first.port) in done.stderr
    assert first.ingle("stop", "1").returncode == 3
    pid = next(one["pid"] for one in first.listed() if one["port"] == first.port)
    assert first.ingle("stop", str(pid)).returncode == 0
    assert [one["port"] for one in first.listed()] == [second.port]
    assert first.ingle("stop", "--all").returncode == 0
    assert (first.process.wait(HANGING_SECONDS), second.process.wait(HANGING_SECONDS)) == (0, 0)
    assert first.records() == []


def test_interrupt_while_loading_leaves_no_state_files(smollm2: Path, tmp_path: Path) -> None:
    with serve(environment_of(smollm2, tmp_path)) as process:
        wait_until_opened(process, smollm2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANGING_SECONDS) == 130
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    # all servers of a user share the key and the log, so they stay
    assert {path.name for path in (tmp_path / "state").iterdir()} <= {"own-key", "server.log"}
