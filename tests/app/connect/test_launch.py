"""Processes of clients: environment, files, signals, and exit status."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from app.connect.clients import find_client
from app.connect.connection import Connection
from app.connect.launch import NotInstalled, NotLaunchable, find_program, launcher, prepared, run_here, without_proxy
from tests.support.processes import HANGING_SECONDS, until

CONNECTION = Connection("http://127.0.0.1:4645", "org/model:Q4_K_M", 40_960, has_tools=True, key="key of the user")
RUN = "import sys; from app.connect.launch import *; sys.exit(end_like(run_here(sys.argv[1:], dict(os.environ))))"


def program(folder: Path, name: str, code: str) -> Path:
    path = folder / name
    path.write_text(f"#!{sys.executable} -S\n{code}\n", encoding="utf-8")
    path.chmod(0o700)
    return path


def test_client_gets_its_environment_and_files(tmp_path: Path) -> None:
    code = (
        "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ), open(sys.argv[2]).read()], open('out', 'w'))"
    )
    program(tmp_path, "pi", code)
    environment = {"PATH": str(tmp_path), "OWN": "kept", "NO_PROXY": "example.org"}
    with prepared(find_client("pi"), CONNECTION, environment) as process:
        file = Path(process.command[2])
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        run = subprocess.run([*process.command, "-p", "hi"], env=process.environment, cwd=tmp_path, check=False)
    arguments, variables, text = json.loads((tmp_path / "out").read_text())
    assert run.returncode == 0
    assert arguments[-4:] == ["--model", "org/model:Q4_K_M", "-p", "hi"]
    assert variables["OWN"] == "kept"
    assert variables["INGLE_API_KEY"] == "key of the user"
    assert variables["NO_PROXY"] == "example.org,127.0.0.1,localhost,::1"
    assert "40960" in text
    assert "key of the user" not in text
    assert not file.parent.exists()


def test_files_are_removed_after_an_error(tmp_path: Path) -> None:
    program(tmp_path, "pi", "")
    folders = []

    def interrupted() -> None:
        with prepared(find_client("pi"), CONNECTION, {"PATH": str(tmp_path)}) as process:
            folders.append(Path(process.command[2]).parent)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not folders[0].exists()


def test_missing_client_is_refused_with_the_command_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match="Claude Code") as refused:
        find_program(find_client("claude"), {"PATH": str(tmp_path)})
    assert "npm install" in refused.value.remedy


def test_client_with_settings_only_is_refused() -> None:
    with pytest.raises(NotLaunchable, match="Zed") as refused:
        launcher(find_client("zed"))
    assert refused.value.remedy == "ingle connect zed"


def test_proxies_of_other_machines_stay() -> None:
    assert without_proxy({"HTTP_PROXY": "http://p:1"})["HTTP_PROXY"] == "http://p:1"


@pytest.mark.parametrize("status", [0, 3, 255])
def test_exit_status_is_that_of_the_client(tmp_path: Path, status: int) -> None:
    path = program(tmp_path, "client", f"raise SystemExit({status})")
    assert run_here([str(path)], {}) == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signal_reaches_a_client_that_handles_it(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "import signal, sys, time\n"
        f"signal.signal({number:d}, lambda *_: sys.exit(42))\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').close()\n"
        "time.sleep(60)"
    )
    with started(program(tmp_path, "client", code)) as process:
        until((tmp_path / "ready").exists)
        process.send_signal(number)
        assert process.wait(HANGING_SECONDS) == 42


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_that_ends_the_client_ends_this_process(tmp_path: Path, number: signal.Signals) -> None:
    path = program(tmp_path, "client", f"import os; os.kill(os.getpid(), {number:d})")
    with started(path) as process:
        assert process.wait(HANGING_SECONDS) == -number


def test_crash_of_the_client_is_an_exit_status(tmp_path: Path) -> None:
    path = program(tmp_path, "client", f"import os; os.kill(os.getpid(), {signal.SIGKILL:d})")
    with started(path) as process:
        assert process.wait(HANGING_SECONDS) == 128 + signal.SIGKILL


def started(path: Path) -> "subprocess.Popen[bytes]":
    """Start a client as the command does, in a session without a terminal."""
    return subprocess.Popen([sys.executable, "-c", RUN, str(path)], start_new_session=True, env=dict(os.environ))
