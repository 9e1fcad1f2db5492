"""Every write of a file fails once: no file is cut or left over, and the next attempt works."""

import hashlib
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from app.errors import AppError
from app.models.transfer.incoming import receive
from app.settings.boxes import Box, keep_box
from app.whole_file import write_whole
from quant.safetensors_writer import Entry, SafetensorsWriter
from tests.support.failing_writes import ERRORS, failing_call, files_of_at_most
from tests.torture import killed_connect

CONTENT = random.Random(0).randbytes(300_000)
Write = Callable[[Path], None]


def record(folder: Path) -> None:
    write_whole(folder / "record.json", CONTENT[:9000], 0o600)


def box(folder: Path) -> None:
    keep_box(Box("desk", "https://desk:4645", "key", "00" * 32), folder)


def download(folder: Path) -> None:
    with receive(folder / "model.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest()) as incoming:
        for start in range(0, len(CONTENT), 1000):
            incoming.write(CONTENT[start : start + 1000])


def quantized_weights(folder: Path) -> None:
    """Write two shards of 300 kB and their index."""
    with SafetensorsWriter(folder, 300_000) as writer:
        for name in ("a", "b", "c", "d"):
            writer.add(Entry(name, "U8", (150_000,), CONTENT[:150_000]))


def small_weights(folder: Path) -> None:
    """Write tensors that stay in the buffer of the file until it is flushed."""
    with SafetensorsWriter(folder) as writer:
        for name in ("a", "b"):
            writer.add(Entry(name, "U8", (64,), CONTENT[:64]))


def settings_of_clients(folder: Path) -> None:
    killed_connect.connect(folder)


OPERATIONS: Mapping[str, Write] = {
    "a record": record,
    "a machine": box,
    "a download": download,
    "quantized weights": quantized_weights,
    "small weights": small_weights,
    "settings of clients": settings_of_clients,
}


REPLACING = ("a record", "a machine", "a download")  # operations that may replace an older file


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def prepared(root: Path) -> Iterator[Path]:
    """Yield an empty folder for settings and files, beside the state of the program, and remove both."""
    folder = root / "user" / "files"
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(root / "user")


def check(folder: Path, write: Write, after: Mapping[str, bytes]) -> None:
    """Check that each file is whole after a failure, and that the same operation then works."""
    left = contents(folder.parent)
    assert not [name for name in left if "partial" in name]
    assert {name: data for name, data in left.items() if after.get(name) != data} == {}
    write(folder)
    assert contents(folder.parent) == after


def check_old(folder: Path, write: Write, failing: AbstractContextManager[object]) -> None:
    """Check that the files of an earlier success stay whole when the same operation fails."""
    before = contents(folder.parent)
    with failing, suppress(OSError, AppError):
        write(folder)
    assert contents(folder.parent) == before


def result_of(root: Path, write: Write) -> dict[str, bytes]:
    with prepared(root) as folder:
        write(folder)
        result = contents(folder.parent)
    assert result
    return result


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_failed_call_leaves_no_part_of_a_file(tmp_path: Path, name: str, error: int) -> None:
    """The first call that opens, renames, or syncs a file fails, then the second, and so on."""
    write, number = OPERATIONS[name], 0
    after = result_of(tmp_path, write)
    while True:
        number += 1
        with prepared(tmp_path) as folder:
            with failing_call(error, number) as failing, suppress(OSError, AppError):
                write(folder)
            if failing.calls < number:
                break
            check(folder, write, after)
            if name in REPLACING:
                check_old(folder, write, failing_call(error, number))
    print(f"{name}: {number - 1} calls")
    assert number > 3


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit for the size of files")
@pytest.mark.parametrize("name", OPERATIONS)
def test_file_that_cannot_grow_leaves_no_part_of_a_file(tmp_path: Path, name: str) -> None:
    """Files can have at most 0, 7, 63, ... bytes."""
    write = OPERATIONS[name]
    after = result_of(tmp_path, write)
    failed = 0
    for size in (8**power - 1 for power in range(7)):
        with prepared(tmp_path) as folder:
            with files_of_at_most(size):
                try:
                    write(folder)
                    break
                except (OSError, AppError):
                    failed += 1
            check(folder, write, after)
    assert failed > 1
