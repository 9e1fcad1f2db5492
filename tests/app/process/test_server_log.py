"""The log file of servers: private, limited in size, shared by several processes, and read across its replacement."""

import io
import json
import logging
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from app.generation import request_log
from app.process import server_log
from app.process.server_log import LogFile, LogReader, log_path, logged_to, parse_line, previous_path
from tests.support.processes import until

ROOT = Path(__file__).parents[3]
WRITE = """
import logging, sys
from pathlib import Path
from app.process import server_log
server_log.MAX_BYTES = 60_000  # reached once: a reader may miss a file that is replaced before it looks
file = server_log.LogFile(Path(sys.argv[1]), int(sys.argv[2]))
for number in range(500):
    file.handle(logging.makeLogRecord({"msg": f"line {number}", "levelname": "INFO"}))
"""


@pytest.fixture
def file(tmp_path: Path) -> LogFile:
    return LogFile(tmp_path / "state", 4645)


def write(file: LogFile, message: str) -> None:
    file.handle(logging.makeLogRecord({"msg": message, "levelname": "INFO"}))


def messages(path: Path) -> list[str]:
    with closing(LogReader(path)) as reader:
        return [line.message for line in reader.read()]


def test_lines_are_objects_in_a_private_file(file: LogFile, tmp_path: Path) -> None:
    path = log_path(tmp_path / "state")
    write(file, "first\nsecond")
    [content] = path.read_bytes().splitlines()
    line = json.loads(content)
    assert (line["port"], line["level"], line["message"]) == (4645, "info", "first\nsecond")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_full_file_replaces_the_previous_one(file: LogFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "MAX_BYTES", 2000)
    for number in range(200):
        write(file, f"line {number}")
    path = log_path(tmp_path / "state")
    assert path.stat().st_size < 2200
    assert previous_path(path).stat().st_size < 2200
    kept = [*messages(previous_path(path)), *messages(path)]
    assert kept == [f"line {number}" for number in range(200)][-len(kept) :]
    assert len(kept) > 10


def test_servers_write_to_the_same_file_at_the_same_time(tmp_path: Path) -> None:
    log_path(tmp_path).touch()
    with closing(LogReader(log_path(tmp_path))) as reader:
        assert reader.read() == []
        command = [sys.executable, "-c", WRITE, str(tmp_path)]
        servers = [subprocess.Popen([*command, str(port)], cwd=ROOT) for port in (1, 2)]
        found = []
        while any(server.poll() is None for server in servers):
            found += reader.read()
        found += reader.read()
    assert previous_path(log_path(tmp_path)).exists()
    for port in (1, 2):
        assert [line.message for line in found if line.port == port] == [f"line {number}" for number in range(500)]


def test_reader_waits_for_the_end_of_a_line(tmp_path: Path, file: LogFile) -> None:
    write(file, "whole")
    path = log_path(tmp_path / "state")
    content = path.read_bytes()
    with closing(LogReader(path)) as reader, path.open("ab") as added:
        assert [line.message for line in reader.read()] == ["whole"]
        added.write(content[:20])
        added.flush()
        assert reader.read() == []
        added.write(content[20:])
        added.flush()
        assert [line.message for line in reader.read()] == ["whole"]


def test_damaged_lines_are_skipped() -> None:
    assert [parse_line(line) for line in (b"", b"{}", b"[1]", b"\xff", b'{"time": 1, "new": 2}')] == [None] * 5


def test_unwritable_file_is_ignored(file: LogFile, tmp_path: Path) -> None:
    log_path(tmp_path / "state").mkdir()
    write(file, "lost")


def test_warnings_are_printed_as_without_a_file(file: LogFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, stderr = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])  # those of the test runner
    monkeypatch.setattr(sys, "stderr", stderr)
    with logged_to(file):
        logging.getLogger("app.models.residency.residents").info("loaded")
        logging.getLogger("engine.core").info("noise")
        logging.getLogger("engine.core").warning("slow")
    logging.getLogger("app.models.residency.residents").info("afterwards")
    assert messages(log_path(tmp_path / "state")) == ["loaded", "slow"]
    assert stderr.getvalue() == "slow\n"
    assert root.handlers == []


def test_request_log_is_written_to_the_file_and_printed(file: LogFile, tmp_path: Path) -> None:
    said: list[str] = []
    with request_log.write_request_log(said.append, file):
        request_log.log.info("hash normal; prompt %d", 7)
        until(lambda: bool(said))
    assert messages(log_path(tmp_path / "state")) == ["hash normal; prompt 7"]
    assert said[0].endswith(" hash normal; prompt 7")
