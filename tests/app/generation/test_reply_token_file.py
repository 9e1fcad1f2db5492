"""The file of generated ids: its contents, its permissions, and its handling of errors."""

import logging
import os
import sqlite3
import stat
import threading
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.generation.reply_token_file import FILE_NAME, MAX_SPANS_PER_PART, OVERHEAD, Changes, ReplyTokenFile, TokenSpan

PLACE = b"p" * 32


def generated(number: int, *, part_key: bytes = PLACE, used: int = 0, length: int = 10) -> TokenSpan:
    prefix_key = number.to_bytes(32, "little")
    return TokenSpan(part_key, prefix_key, number, array("I", range(number, number + length)), stored=True, used=used)


def write(file: ReplyTokenFile, *several: TokenSpan) -> None:
    file.apply(Changes(written=list(several)))


def numbers(several: Iterable[TokenSpan]) -> list[int]:
    return [one.ids[0] for one in several]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_written_spans_are_found_by_other_readers(tmp_path: Path) -> None:
    write(ReplyTokenFile(tmp_path), generated(1, used=5), generated(2, used=4), generated(3, part_key=b"elsewhere"))
    found = ReplyTokenFile(tmp_path).find(PLACE)
    assert numbers(found) == [2, 1]  # in order of last use, most recent last
    assert found[1].ids == array("I", range(1, 11))
    assert (found[1].prefix_key, found[1].prefix_characters, found[1].used) == (generated(1).prefix_key, 1, 5)


def test_file_is_created_with_the_first_row(tmp_path: Path) -> None:
    file = ReplyTokenFile(tmp_path / "folder")
    assert file.find(PLACE) == []
    file.apply(Changes(forgotten={b"lead"}))
    assert not (tmp_path / "folder").exists()


def test_files_are_readable_only_by_their_owner(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        file = ReplyTokenFile(tmp_path / "folder")
        write(file, generated(1))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "folder").iterdir()}
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700
    assert modes == dict.fromkeys((FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"), 0o600)


def test_least_recently_used_spans_are_dropped(tmp_path: Path) -> None:
    file = ReplyTokenFile(tmp_path, max_size=3 * (10 + OVERHEAD))
    write(file, *(generated(number, used=number) for number in range(3)))
    write(file, generated(0, used=9))
    write(file, generated(7, used=8))
    assert numbers(file.find(PLACE)) == [2, 7, 0]


def test_newest_spans_of_a_part_are_found(tmp_path: Path) -> None:
    file = ReplyTokenFile(tmp_path)
    write(file, *(generated(number, used=number) for number in range(MAX_SPANS_PER_PART + 5)))
    assert numbers(file.find(PLACE)) == list(range(5, MAX_SPANS_PER_PART + 5))


def test_forgotten_spans_leave_no_trace(tmp_path: Path) -> None:
    file = ReplyTokenFile(tmp_path)
    secret = generated(77_777, length=500)
    write(file, generated(1), secret)
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert secret.ids.tobytes()[:200] in written
    file.apply(Changes(forgotten={secret.prefix_key}))
    assert numbers(file.find(PLACE)) == [1]
    file.close()
    left = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert secret.ids.tobytes()[:200] not in left
    assert secret.prefix_key not in left


def test_deleted_file_is_created_again(tmp_path: Path) -> None:
    """A user may clear the folder while a server runs."""
    file = ReplyTokenFile(tmp_path)
    write(file, generated(1))
    assert numbers(file.find(PLACE)) == [1]
    for path in tmp_path.glob(f"{FILE_NAME}*"):
        path.unlink()
    assert file.find(PLACE) == []
    write(file, generated(2))
    assert numbers(file.find(PLACE)) == numbers(ReplyTokenFile(tmp_path).find(PLACE)) == [2]


def test_write_waits_for_a_busy_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite itself does not always wait while another connection creates the file."""
    monkeypatch.setattr("app.generation.reply_token_file._BUSY_SECONDS", 0.0)
    maker = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
    maker.execute("BEGIN EXCLUSIVE")
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            maker.execute("COMMIT")

    monkeypatch.setattr("app.generation.reply_token_file.time", SimpleNamespace(sleep=sleep))
    write(file := ReplyTokenFile(tmp_path), generated(1))
    maker.close()
    assert len(pauses) == 3
    assert sum(pauses) > 0.5
    write(file, generated(2))
    assert numbers(file.find(PLACE)) == [1, 2]
    assert not warnings(caplog)


def test_processes_share_the_file(tmp_path: Path) -> None:
    files = [ReplyTokenFile(tmp_path) for _ in range(4)]

    def write_some(file: ReplyTokenFile, first: int) -> None:
        for number in range(first, first + 50):
            write(file, generated(number, used=number))
            file.find(PLACE)

    threads = [threading.Thread(target=write_some, args=(file, 50 * n)) for n, file in enumerate(files)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for file in files:
        assert numbers(file.find(PLACE)) == list(range(200))


def flip(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    for position in range(100, len(damaged), 3):
        damaged[position] ^= 0x55
    path.write_bytes(damaged)


def of_another_version(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "no database": lambda path: path.write_bytes(b"something else" * 1000),
    "another version": of_another_version,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("first", ["find", "write"])
def test_damaged_file_is_renamed_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object], first: str
) -> None:
    before = ReplyTokenFile(tmp_path)
    write(before, *(generated(number) for number in range(300)))
    before.close()
    damage(tmp_path / FILE_NAME)
    file = ReplyTokenFile(tmp_path)
    if first == "find":
        assert file.find(PLACE) == []
    write(file, generated(1))
    write(file, generated(2))
    assert numbers(file.find(PLACE)) == ([1, 2] if first == "find" else [2])
    [warning] = warnings(caplog)
    assert "was renamed" in warning
    assert (tmp_path / FILE_NAME).with_suffix(".damaged").exists()
    assert numbers(ReplyTokenFile(tmp_path).find(PLACE)) == numbers(file.find(PLACE))


def test_truncated_file_raises_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = ReplyTokenFile(tmp_path)
    write(before, *(generated(number) for number in range(300)))
    before.close()
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    for length in (0, 1, 99, 100, 5000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        caplog.clear()
        file = ReplyTokenFile(tmp_path)
        known = set(numbers(file.find(PLACE)))
        write(file, generated(1000, used=1), generated(1001, used=1))
        write(file, generated(1002, used=1))
        assert known <= set(range(300))
        assert 1002 in numbers(file.find(PLACE))
        assert len(warnings(caplog)) <= 1
        file.close()


def test_malformed_rows_are_ignored(tmp_path: Path) -> None:
    file = ReplyTokenFile(tmp_path)
    write(file, generated(1))
    rows = [
        ("lead", 1, b"1234", 0),
        (b"lead", "one", b"1234", 0),
        (b"lead", None, b"1234", 0),
        (b"lead", 1, b"12345", 0),
        (b"lead", 1, b"", 0),
        (b"lead", 1, b"1234", 1.5),
    ]
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.executemany(
            "INSERT INTO replies (place, lead, lead_characters, ids, used) VALUES (?, ?, ?, ?, ?)",
            [(PLACE, *row) for row in rows],
        )
    connection.close()
    assert numbers(file.find(PLACE)) == [1]


def test_unwritable_folder_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "folder").write_text("no folder")
    file = ReplyTokenFile(tmp_path / "folder" / "deeper")
    for number in range(3):
        write(file, generated(number))
        assert file.find(PLACE) == []
    [warning] = warnings(caplog)
    assert "only in memory" in warning


def test_full_disk_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = ReplyTokenFile(tmp_path)
    write(file, generated(1))
    connection = file._writer.writable()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}").fetchone()
    for number in range(3):
        write(file, generated(number, length=100_000))
    [warning] = warnings(caplog)
    assert "full" in warning
    assert numbers(ReplyTokenFile(tmp_path).find(PLACE)) == [1]
