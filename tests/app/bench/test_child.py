"""Programs that run beside this one: how they start, what they say when they fail, and that none is left behind."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.bench.child import Child, child
from app.bench.contender import ContenderFailed
from app.bench.llama_build import probe
from app.bench.servers import llama_server
from app.bench.workload import Load
from tests.app.bench.fake_llama import FakeLlama

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(600)"


def python(statement: str) -> list[str]:
    return [sys.executable, "-u", "-c", statement]


def test_a_conversation() -> None:
    with child("echo", python("import sys\nfor line in sys.stdin: print(line.upper(), end='')"), pipes=True) as echo:
        assert echo.ask(b"one") == b"ONE\n"
        assert echo.ask(b"two") == b"TWO\n"


def test_a_program_that_is_not_there() -> None:
    with (
        pytest.raises(ContenderFailed, match="/no/such/program does not start: No such file"),
        child("it", ["/no/such/program"]),
    ):
        pass


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_child_ends_with_what_it_was_started_for(error: type[BaseException]) -> None:
    with pytest.raises(error), child("sleeper", python("import time; time.sleep(600)")) as sleeper:  # noqa: PT012
        os.kill(sleeper.pid, 0)  # it is there
        raise error
    with pytest.raises(ProcessLookupError):
        os.kill(sleeper.pid, 0)


def test_a_child_can_tidy_up(tmp_path: Path) -> None:
    """It is asked to end before it is made to."""
    tidy = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(open('tidy', 'w').close()))"
    with child("tidy", python(f"{tidy}; print('ready'); time.sleep(600)"), pipes=True, cwd=tmp_path) as process:
        assert process.listen() == b"ready\n"
    assert (tmp_path / "tidy").exists()


def test_a_child_that_does_not_want_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.bench.child._STOP_SECONDS", 0.1)
    with child("stubborn", python(STUBBORN), pipes=True) as stubborn:
        assert stubborn.listen() == b"ready\n"
    with pytest.raises(ProcessLookupError):
        os.kill(stubborn.pid, 0)


@pytest.mark.parametrize(
    "act",
    [
        lambda process: process.listen(),
        lambda process: process.wait_for(lambda: None),
        lambda process: [process.ask(b"are you there?") for _ in range(1000)],
        lambda process: [os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT), process.ask(b"are you there?")],
    ],
)
def test_a_child_that_died_is_quoted(act: Callable[[Child], object]) -> None:
    dying = python("import sys; sys.exit('no such model')")
    with (
        pytest.raises(ContenderFailed, match=r"dying ended(?s:.*)no such model"),
        child("dying", dying, pipes=True) as process,
    ):
        act(process)


def test_a_child_that_never_gets_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.bench.child._START_SECONDS", 0.1)
    with (
        pytest.raises(ContenderFailed, match="slow does not get ready"),
        child("slow", python("import time; time.sleep(600)")) as process,
    ):
        process.wait_for(lambda: None)


def test_llama_server_is_told_its_sizes_and_measured(fake_llama: FakeLlama) -> None:
    loads = [Load(60, 8, 16), Load(500, 8)]
    with llama_server(probe(fake_llama.server), Path("/models/tiny.gguf"), 2, loads) as server:
        sample = server.measure(loads[0], loads[0].prompts(1, 100))
        assert server.name == "llama.cpp"
    assert len(sample.first_token) == 16
    [*_, arguments] = fake_llama.calls("llama-server")
    port = arguments[arguments.index("--port") + 1]
    assert arguments == [
        "-m", "/models/tiny.gguf", "--host", "127.0.0.1", "--port", port, "-t", "2", "-tb", "2",
        "-np", "16", "-c", str(16 * 512), "--no-slots", "--cache-ram", "0",
    ]  # fmt: skip
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_a_server_that_dies_in_mid_reply(fake_llama: FakeLlama) -> None:
    load = Load(8, 8)
    with (
        pytest.raises(ContenderFailed, match=r"server at 127\.0\.0\.1"),
        llama_server(probe(fake_llama.server), Path("/models/dies.gguf"), 1, [load]) as server,
    ):
        server.measure(load, load.prompts(1, 100))
