"""Records of running servers exist while the server lives, and are removed after it exits or crashes."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from app.client.running_server import find_instances
from app.errors import AppError
from app.process import instance
from app.process.instance import Instance, recorded, running_instances, stop_instance, withdraw
from app.settings.settings import Settings, load_settings
from tests.support.processes import HANGING_SECONDS, Started

ROOT = Path(__file__).parents[3]

HOLDER = """
import os, signal, sys, time
from app.settings.settings import load_settings
from app.process.instance import Instance, recorded
port, on_term = int(sys.argv[2]), sys.argv[3]
signal.signal(signal.SIGTERM, signal.SIG_IGN if on_term == "stay" else signal.default_int_handler)
me = Instance(os.getpid(), port, f"http://127.0.0.1:{port}", "smollm2:135m", "/m.gguf", "2026-01-01T00:00:00+00:00")
with recorded(me, load_settings(state_dir=sys.argv[1])):
    try:
        print("recorded", flush=True)
        time.sleep(1000)
    except KeyboardInterrupt:
        pass
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return load_settings(state_dir=tmp_path / "state")


@pytest.fixture
def held(settings: Settings) -> Iterator["Holders"]:
    with ExitStack() as stack:
        yield Holders(settings, stack)


class Holders:
    """Starts processes that hold a server record, and kills them after the test."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self._settings = settings
        self._stack = stack

    def start(self, port: int, on_term: str = "end") -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", HOLDER, str(self._settings.state_dir), str(port), on_term]
        process = self._stack.enter_context(Started(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        self._stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "recorded\n"
        return process


def made(port: int = 4645, model: str = "smollm2:135m", path: str = "/m.gguf") -> Instance:
    return Instance(os.getpid(), port, f"http://127.0.0.1:{port}", model, path, "2026-01-01T00:00:00+00:00")


def left(settings: Settings) -> list[str]:
    return sorted(path.name for path in (settings.state_dir / "servers").iterdir())


def test_no_records_before_the_first_server(settings: Settings) -> None:
    assert running_instances(settings) == []
    assert find_instances(settings) == []
    assert not settings.state_dir.exists()


def test_record_exists_while_the_server_runs(settings: Settings) -> None:
    with recorded(made(), settings):
        assert running_instances(settings) == [made()]
        assert find_instances(settings) == [made()]
    assert running_instances(settings) == []
    assert left(settings) == []


@pytest.mark.parametrize(
    ("model", "path", "title"),
    [
        ("m.gguf", "/models/m.gguf", "m"),
        ("/models/m.gguf", "/models/m.gguf", "m"),
        ("./qwen", "/models/qwen", "qwen"),
        ("smollm2:135m", "/models/smollm2/weights.gguf", "smollm2:135m"),
    ],
)
def test_file_has_one_title_for_all_of_its_paths(model: str, path: str, title: str) -> None:
    assert made(model=model, path=path).title == title


def test_record_is_private(settings: Settings) -> None:
    (settings.state_dir / "servers").mkdir(parents=True, mode=0o755)
    with recorded(made(), settings):
        assert stat.S_IMODE((settings.state_dir / "servers").stat().st_mode) == 0o700
        modes = {stat.S_IMODE(path.stat().st_mode) for path in (settings.state_dir / "servers").iterdir()}
        assert modes == {0o600}


def test_servers_are_sorted_by_port(settings: Settings) -> None:
    with recorded(made(10000), settings), recorded(made(4645), settings), recorded(made(9), settings):
        assert [one.port for one in running_instances(settings)] == [9, 4645, 10000]


def test_record_of_a_killed_server_is_removed(settings: Settings, held: Holders) -> None:
    process = held.start(4645)
    assert [one.pid for one in running_instances(settings)] == [process.pid]
    process.kill()
    process.wait(HANGING_SECONDS)
    assert left(settings) == ["4645.json", "4645.lock"]
    assert running_instances(settings) == []
    assert left(settings) == []


def test_reused_process_id_is_not_a_running_server(settings: Settings) -> None:
    with recorded(made(), settings):
        record = (settings.state_dir / "servers" / "4645.json").read_bytes()
    (settings.state_dir / "servers" / "4645.json").write_bytes(record)
    assert running_instances(settings) == []
    assert left(settings) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff"])
def test_invalid_record_is_ignored(settings: Settings, content: bytes) -> None:
    with recorded(made(), settings):
        (settings.state_dir / "servers" / "4645.json").write_bytes(content)
        assert running_instances(settings) == []


def test_server_waits_until_a_stopping_server_removes_its_record(settings: Settings, held: Holders) -> None:
    leaving = held.start(4645)
    leaving.send_signal(signal.SIGTERM)
    process = held.start(4645)
    assert [one.pid for one in running_instances(settings)] == [process.pid]


def test_withdrawing_a_record_twice_raises_no_error(settings: Settings) -> None:
    with recorded(made(), settings):
        withdraw(made(), settings)
        withdraw(made(), settings)
        assert running_instances(settings) == []


def test_stopping_waits_for_the_process_to_end(settings: Settings, held: Holders) -> None:
    process = held.start(4645)
    [server] = running_instances(settings)
    stop_instance(server, settings)
    assert process.wait(HANGING_SECONDS) == 0
    assert left(settings) == []
    stop_instance(server, settings)


def test_server_that_does_not_stop_is_an_error_with_its_pid(
    settings: Settings, held: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "_STOP_SECONDS", 0.2)
    process = held.start(4645, "stay")
    [server] = running_instances(settings)
    with pytest.raises(AppError, match=f"pid {process.pid}") as problem:
        stop_instance(server, settings)
    assert problem.value.remedy == f"kill -9 {process.pid}"
    assert running_instances(settings) == [server]
