"""`ingle logs`: the last lines, one server, JSON, and following the file across its replacement and restarts."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.process.server_log import LogFile, log_path, previous_path
from tests.app.command_line import ingle
from tests.app.forked_program import ForkedProgram

if sys.platform == "win32":
    pytest.skip("the tests send signals", allow_module_level=True)


def write(state: Path, message: str, port: int = 4645, level: str = "INFO") -> None:
    LogFile(state, port).handle(logging.makeLogRecord({"msg": message, "levelname": level}))


def logs(state: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    done = ingle({"INGLE_STATE_DIR": str(state)}, "logs", *arguments)
    return subprocess.CompletedProcess(arguments, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_last_lines_of_both_files_are_shown(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path, f"line {number}")
    log_path(tmp_path).rename(previous_path(log_path(tmp_path)))
    write(tmp_path, "engine\nfailed", level="ERROR")
    done = logs(tmp_path, "-n", "3")
    assert [line.split(" ", 2)[2] for line in done.stdout.splitlines()[:3]] == [
        "4645 line 1", "4645 line 2", "4645 error: engine"
    ]  # fmt: skip
    assert done.stdout.endswith("\nfailed\n")
    assert len(logs(tmp_path).stdout.splitlines()) == 5
    assert logs(tmp_path, "-n", "0").stdout == ""


def test_port_selects_a_server_and_json_escapes_control_characters(tmp_path: Path) -> None:
    write(tmp_path, "first", port=1)
    write(tmp_path, "second\x1b[2J", port=2)
    [line] = logs(tmp_path, "--port", "2", "--json").stdout.splitlines()
    assert json.loads(line)["message"] == "second\x1b[2J"
    assert "\x1b" not in line + logs(tmp_path).stdout


def test_no_log_yet_is_status_3(tmp_path: Path) -> None:
    done = logs(tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"No server has written a line to {log_path(tmp_path)}.\n"


@pytest.mark.parametrize("exists", [True, False])
def test_follow_continues_across_replacement_and_ends_with_an_interrupt(exists: bool, tmp_path: Path) -> None:
    if exists:
        write(tmp_path, "earlier")
    environment = {**os.environ, "INGLE_STATE_DIR": str(tmp_path)}
    with ForkedProgram(environment, "logs", "-f", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if exists:
            assert process.stdout.readline().endswith("earlier\n")
        for number in range(3):
            write(tmp_path, f"before {number}")
            write(tmp_path, f"after {number}", port=number)
            assert process.stdout.readline().endswith(f"before {number}\n")
            assert process.stdout.readline().endswith(f"{number} after {number}\n")
            log_path(tmp_path).rename(previous_path(log_path(tmp_path)))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
