"""The guard of the network: connections to other machines are refused and recorded."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.guarded import sitecustomize

ELSEWHERE = ("192.0.2.1", 9)  # an address for documentation, which no machine has
CONNECT = f"import socket\ntry: socket.create_connection({ELSEWHERE}, 5)\nexcept OSError as error: print(error)"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(sitecustomize.LOG, str(tmp_path / "refused"))
    return tmp_path / "refused"


def test_connections_of_a_test_to_other_machines_are_refused(log: Path) -> None:
    with pytest.raises(ConnectionRefusedError, match="tests may not connect"):
        socket.create_connection(ELSEWHERE, 5)
    assert str(ELSEWHERE) in log.read_text()


def test_connections_of_a_program_to_other_machines_are_recorded_if_it_ignores_the_error(log: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CONNECT], capture_output=True, text=True, check=True)
    assert "tests may not connect" in done.stdout
    assert str(ELSEWHERE) in log.read_text()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_connections_to_this_machine_are_allowed(log: Path, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection((host, server.getsockname()[1])):
        assert not log.exists()


def test_lifted_guard_allows_connections_and_returns(log: Path) -> None:
    with sitecustomize.lifted():
        assert sitecustomize.LOG not in os.environ
    assert os.environ[sitecustomize.LOG] == str(log)
