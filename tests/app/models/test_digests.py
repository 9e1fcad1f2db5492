"""File digests are computed once, and again after the file has changed."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.models.digests import remembered_sha256
from app.progress import Report, SilentProgress, Unit
from tests.support.processes import Started

ROOT = Path(__file__).parents[3]


class Recorder(SilentProgress):
    """Records the progress. Calls `meanwhile` each time a part of a file has been read."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.tasks: list[tuple[str, int | None]] = []
        self.lines: list[str] = []
        self._meanwhile = meanwhile

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        self.tasks.append((label, total))
        yield lambda done: self._meanwhile()

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my.gguf"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def records(tmp_path: Path) -> Path:
    return tmp_path / "models" / ".digests"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_file_is_hashed_once(file: Path, records: Path) -> None:
    progress = Recorder()
    for _ in range(3):
        assert remembered_sha256(file, records, progress) == sha256(b"weights")
    assert progress.tasks == [("Hashing my.gguf, once", 7)]
    assert progress.lines == []


def test_relative_path_is_the_same_file(file: Path, records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    progress = Recorder()
    remembered_sha256(file, records, progress)
    remembered_sha256(Path(file.name), records, progress)
    assert len(progress.tasks) == 1


def write_in_place(file: Path) -> None:
    file.write_bytes(b"Weights")


def replace_it(file: Path) -> None:
    """Replace the file with another one that has the same size and modification time."""
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    other = file.with_suffix(".new")
    other.write_bytes(b"Weights")
    os.utime(other, ns=times)
    os.replace(other, file)


@pytest.mark.parametrize("change", [write_in_place, replace_it])
def test_changed_file_is_hashed_again(file: Path, records: Path, change: Callable[[Path], None]) -> None:
    progress = Recorder()
    os.utime(file, ns=(0, 0))
    remembered_sha256(file, records, progress)
    change(file)
    for _ in range(2):
        assert remembered_sha256(file, records, progress) == sha256(b"Weights")
    assert len(progress.tasks) == 2


def test_file_on_another_device_is_hashed_again(file: Path, records: Path) -> None:
    remembered_sha256(file, records, Recorder())
    [record] = records.iterdir()
    content = json.loads(record.read_bytes())
    status = file.stat()
    assert content["identity"] == [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]
    content["identity"][0] += 1
    record.write_text(json.dumps(content))
    remembered_sha256(file, records, progress := Recorder())
    assert len(progress.tasks) == 1


@pytest.mark.parametrize("content", ["", "\xff", "[]", "{}", '{"identity": IDENTITY, "sha256": 2}', "null"])
def test_invalid_record_is_ignored(file: Path, records: Path, content: str) -> None:
    remembered_sha256(file, records, Recorder())
    [record] = records.iterdir()
    identity = json.dumps(json.loads(record.read_bytes())["identity"])
    record.write_text(content.replace("IDENTITY", identity), encoding="latin-1")
    progress = Recorder()
    assert remembered_sha256(file, records, progress) == sha256(b"weights")
    assert len(progress.tasks) == 1
    remembered_sha256(file, records, progress)
    assert len(progress.tasks) == 1


def test_file_that_changes_while_it_is_hashed_is_not_recorded(file: Path, records: Path) -> None:
    remembered_sha256(file, records, Recorder(lambda: write_in_place(file)))
    assert not records.exists()
    assert remembered_sha256(file, records, Recorder()) == sha256(b"Weights")


def test_record_that_cannot_be_saved_is_reported_in_one_line(file: Path, tmp_path: Path) -> None:
    (tmp_path / "models").touch()
    progress = Recorder()
    for reads in (1, 2):
        assert remembered_sha256(file, tmp_path / "models" / ".digests", progress) == sha256(b"weights")
        assert len(progress.tasks) == len(progress.lines) == reads
    assert "The digest of my.gguf cannot be saved" in progress.lines[0]


def test_interrupt_leaves_no_record(tmp_path: Path, records: Path) -> None:
    """The file is sparse: reading it would take minutes, but it needs no disk space."""
    large = tmp_path / "large.gguf"
    with large.open("wb") as file:
        file.truncate(1 << 38)
    code = f"""
import sys
from pathlib import Path
from app import cli
from app.models.digests import remembered_sha256
from app.progress import LineProgress
cli.ingle.main = lambda **options: remembered_sha256(Path({str(large)!r}), Path({str(records)!r}), LineProgress())
sys.exit(cli.main())
"""
    process = Started([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("Hashing large.gguf, once")
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert not records.exists()
