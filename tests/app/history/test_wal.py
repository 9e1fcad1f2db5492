"""Parsing a write-ahead log gives the same result as SQLite for intact logs, and reports damaged ones."""

import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from app.history.wal import Wal, read_wal

HEADER, FRAME = 32, 24 + 4096
CHANGES = 12


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, bytes]:
    """A database whose changes are all in its write-ahead log, the bytes of the log, and the bytes of its index."""
    folder = tmp_path_factory.mktemp("sound")
    connection = sqlite3.connect(folder / "a", isolation_level=None)
    connection.execute("PRAGMA page_size = 4096")
    connection.execute("PRAGMA journal_mode = WAL").fetchall()
    connection.execute("CREATE TABLE texts (text)")
    for number in range(CHANGES):
        connection.execute("INSERT INTO texts VALUES (?)", (f"{number} " * 1000,))
    shutil.copy(folder / "a", folder / "copy")
    log, index = (folder / "a-wal").read_bytes(), (folder / "a-shm").read_bytes()
    connection.close()
    return folder / "copy", log, index


def applied_by_sqlite(database: Path, log: bytes, folder: Path) -> int:
    """Return the number of frames that SQLite applies from this log."""
    shutil.copy(database, folder / "b")
    (folder / "b-wal").write_bytes(log)
    connection = sqlite3.connect(folder / "b", isolation_level=None)
    try:
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        [_, frames, _] = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return int(frames)
    finally:
        connection.close()


def commits(log: Wal) -> list[int]:
    return [frame.index for frame in log.frames if frame.is_commit]


def flipped(log: bytes, *offsets: int) -> bytes:
    content = bytearray(log)
    for offset in offsets:
        content[offset] ^= 1 << offset % 8
    return bytes(content)


def test_sound_log_is_applied_completely(sound: tuple[Path, bytes, bytes], tmp_path: Path) -> None:
    database, log, index = sound
    for found in (read_wal(log), read_wal(log, index)):
        assert (len(found.frames), found.is_damaged, found.damage) == (found.applied, False, "")
    assert read_wal(log).applied == applied_by_sqlite(database, log, tmp_path)
    assert len(commits(read_wal(log))) == CHANGES + 1


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.share(8)
def test_damaged_log_is_applied_up_to_the_same_frame_as_in_sqlite(
    sound: tuple[Path, bytes, bytes], tmp_path: Path, seed: int
) -> None:
    database, log, index = sound
    draw = random.Random(seed)
    offsets = [draw.randrange(len(log)) for _ in range(draw.choice((1, 2, 8)))]
    damaged = flipped(log, *offsets)
    if seed % 4 == 0:
        damaged = damaged[: draw.randrange(HEADER, len(log))]
    found = read_wal(damaged, index)
    assert found.applied == applied_by_sqlite(database, damaged, tmp_path)
    assert found.is_damaged
    assert read_wal(damaged).is_damaged or len(damaged) < len(log)


def test_all_frames_of_a_damaged_log_are_read(sound: tuple[Path, bytes, bytes]) -> None:
    _, log, _ = sound
    whole = read_wal(log)
    for offset in (3, 20, 30, HEADER + 10, HEADER + 20, HEADER + 3 * FRAME + 500, len(log) - FRAME + 9, len(log) - 7):
        found = read_wal(flipped(log, offset))
        assert found.is_damaged, offset
        assert found.is_complete, offset
        assert [frame.index for frame in found.frames] == [frame.index for frame in whole.frames], offset
        changed = sum(one.content != other.content for one, other in zip(found.frames, whole.frames, strict=True))
        assert changed == ((offset - HEADER) % FRAME >= 24 and offset > HEADER), offset


def test_uncommitted_change_of_a_killed_process_is_not_damage(sound: tuple[Path, bytes, bytes]) -> None:
    _, log, index = sound
    whole = read_wal(log)
    begun = whole.frames[commits(whole)[-2]].index  # the first frame of the last change
    for size in (HEADER + begun * FRAME, HEADER + begun * FRAME + 24, HEADER + begun * FRAME + 1000):
        part = log[:size]
        of_then = bytearray(index)
        for copy in (0, 48):  # at this time, the index counted only the frames of earlier changes
            of_then[copy + 16 : copy + 20] = (begun - 1).to_bytes(4, "little")
        assert not read_wal(part, bytes(of_then)).is_damaged
        assert read_wal(part, index).is_damaged


def test_change_with_a_missing_frame_was_not_committed(sound: tuple[Path, bytes, bytes]) -> None:
    _, log, _ = sound
    whole = read_wal(log)
    begun = whole.frames[commits(whole)[-2]].index
    assert whole.frames[-1].index - begun >= 1
    hole = bytearray(log)
    hole[HEADER + (begun - 1) * FRAME : HEADER + begun * FRAME] = bytes(FRAME)
    assert (read_wal(bytes(hole)).applied, read_wal(bytes(hole)).is_damaged) == (begun - 1, False)
    # the change before that one was committed, so a missing frame in it is damage
    before = whole.frames[commits(whole)[-3]].index
    hole[HEADER + (before - 1) * FRAME : HEADER + before * FRAME] = bytes(FRAME)
    assert read_wal(bytes(hole)).is_damaged


def test_frames_of_an_older_log_are_ignored(sound: tuple[Path, bytes, bytes], tmp_path: Path) -> None:
    database, log, _ = sound
    shutil.copy(database, tmp_path / "c")
    connection = sqlite3.connect(tmp_path / "c", isolation_level=None)
    connection.execute("CREATE TABLE texts (text)")
    for number in range(20):
        connection.execute("INSERT INTO texts VALUES (?)", (f"{number} " * 1000,))
    connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
    connection.execute("INSERT INTO texts VALUES ('new')")
    content = (tmp_path / "c-wal").read_bytes()
    connection.close()
    found = read_wal(content)
    assert len(content) > 10 * FRAME
    assert 0 < len(found.frames) == found.applied < 5
    assert not found.is_damaged
    assert not read_wal(flipped(content, len(content) - 100)).is_damaged
    assert read_wal(flipped(content, HEADER + 100)).is_damaged
    assert log != content


@pytest.mark.parametrize("content", [b"", bytes(32), bytes(9000)])
def test_empty_or_zeroed_log_is_sound(content: bytes) -> None:
    assert read_wal(content) == Wal()


@pytest.mark.parametrize("content", [b"x", b"some text\n" * 900, b"\x37\x7f\x06\x82", bytes(40) + b"x"])
def test_log_of_another_format_is_damaged(content: bytes) -> None:
    found = read_wal(content)
    assert (found.is_damaged, found.is_complete, found.applied) == (True, False, 0)
    assert found.damage == "its log of recent changes is damaged"
