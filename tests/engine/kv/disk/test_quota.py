"""How much all files may take: what was used longest ago goes first."""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.kv.blocks import BlockKey
from engine.kv.disk.quota import (
    GIB,
    MAX_LIMIT,
    MIN_LIMIT,
    SWEEP_FRACTION,
    UNFINISHED_MAX_AGE,
    Quota,
    automatic_limit,
    cached_files,
)
from engine.kv.disk.segment_file import DATA_START
from tests.engine.kv.disk.known_blocks import SIZES, filled, keys_of, new_store, read_back

COUNT = 20  # blocks of a file
FILE = DATA_START + COUNT * SIZES[0]  # bytes


def some_file(root: Path, name: str, size: int, used: float, *, model: str = "model") -> Path:
    path = root / model / name[:2] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (used, used))
    return path


def test_files_of_all_models_are_counted_and_nothing_else(tmp_path: Path) -> None:
    there = {
        some_file(tmp_path, "ab-0-1.run", 10, 5.0),
        some_file(tmp_path, "cd-0-1.run", 20, 6.0),
        some_file(tmp_path, "ab-0-1.run", 30, 7.0, model="other"),
    }
    some_file(tmp_path, "ab-0-1.tmp", 40, 5.0)
    some_file(tmp_path, "ab-0-1.txt", 40, 5.0)
    (tmp_path / "note.run").write_bytes(b"a file of somebody else")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "model", target_is_directory=True)
    (tmp_path / "model" / "ef").symlink_to(tmp_path / "model" / "ab", target_is_directory=True)
    found = list(cached_files(tmp_path))
    assert {file.path for file in found} == there
    assert sorted((file.size, file.used) for file in found) == [(10, 5 * 10**9), (20, 6 * 10**9), (30, 7 * 10**9)]


def test_no_folder_is_no_files(tmp_path: Path) -> None:
    assert not list(cached_files(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("free", "kept", "limit"),
    [
        (400 * GIB, 0, 40 * GIB),
        (360 * GIB, 40 * GIB, 40 * GIB),  # what is kept already changes nothing
        (50 * GIB, 0, MIN_LIMIT),
        (9000 * GIB, 0, MAX_LIMIT),
        (10 * GIB, 0, 5 * GIB),  # never more than half
        (0, 10 * GIB, 5 * GIB),
        (0, 0, 0),
    ],
)
def test_automatic_limit(free: int, kept: int, limit: int) -> None:
    assert automatic_limit(free, kept) == limit


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    paths = [some_file(tmp_path, f"{number:02}-0-1.run", 100, number) for number in (3, 1, 4, 2, 5)]
    Quota(tmp_path, 320).charge(1)
    assert [path for path in paths if path.exists()] == [paths[0], paths[2], paths[4]]


def test_some_room_is_made_at_once(tmp_path: Path) -> None:
    """So that not every write looks through all files."""
    paths = [some_file(tmp_path, f"{number:02}-0-1.run", 100, number) for number in range(65)]
    quota = Quota(tmp_path, 6400)
    quota.charge(1)
    assert sum(path.exists() for path in paths) == 62  # a part in SWEEP_FRACTION below the limit
    for number in range(100, 102):
        some_file(tmp_path, f"{number}-0-1.run", 99, time.time())
        quota.charge(99)
    assert sum(path.exists() for path in paths) == 62
    some_file(tmp_path, "99-0-1.run", 1000, time.time())
    quota.charge(1000)
    assert not paths[3].exists()
    assert sum(file.size for file in cached_files(tmp_path)) <= 6400 - 6400 // SWEEP_FRACTION


def test_nothing_is_looked_at_before_something_is_written(tmp_path: Path) -> None:
    path = some_file(tmp_path, "ab-0-1.run", 100, 1.0)
    quota = Quota(tmp_path, 10)
    quota.charge(0)
    assert path.exists()
    quota.enforce()
    assert not path.exists()


def test_a_limit_of_nothing(tmp_path: Path) -> None:
    some_file(tmp_path, "ab-0-1.run", 100, 1.0)
    Quota(tmp_path, 0).charge(1)
    assert not list(cached_files(tmp_path))


@dataclass
class _Usage:
    free: int


def test_a_limit_that_follows_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [some_file(tmp_path, f"{number:02}-0-1.run", 1000, number) for number in range(10)]
    quota = Quota(tmp_path, None)
    for free, left in ((10_000, 10), (2_000, 5), (0, 2)):  # half of 20,000, of 12,000, of 5,000
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: _Usage(free))
        quota.enforce()
        assert sum(path.exists() for path in paths) == left


def test_what_was_begun_long_ago_is_swept(tmp_path: Path) -> None:
    old = some_file(tmp_path, "ab-0-1.tmp", 10, time.time() - UNFINISHED_MAX_AGE - 60)
    new = some_file(tmp_path, "ab-0-2.tmp", 10, time.time() - UNFINISHED_MAX_AGE + 60)
    Quota(tmp_path, 1 << 30).charge(1)
    assert not old.exists()
    assert new.exists()


def test_a_file_that_somebody_else_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some_file(tmp_path, "ab-0-1.run", 100, 1.0)
    (tmp_path / "model" / "ab" / "ab-0-2.run").mkdir()
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [*real(path), "ab-0-3.run", "ab-0-3.tmp"])
    Quota(tmp_path, 0).charge(1)
    assert not (tmp_path / "model" / "ab" / "ab-0-1.run").exists()


# -- with a store


def chain_of(name: str, segments: int) -> list[list[BlockKey]]:
    return [keys_of(f"{name} {number}", COUNT) for number in range(segments)]


def test_the_end_of_a_chain_goes_before_its_beginning_and_what_was_touched_stays(tmp_path: Path) -> None:
    one = new_store(tmp_path, 10 * FILE)
    chains = {name: chain_of(name, 4) for name in "abc"}
    for name in "ab":
        for keys in chains[name]:
            one.write(0, keys[0], filled(keys))
        one.touch(0, [keys[0] for keys in chains[name]])
        time.sleep(0.01)
    one.touch(0, [keys[0] for keys in chains["a"]])  # it is used again
    for keys in chains["c"]:
        one.write(0, keys[0], filled(keys))
    there = {name: [bool(read_back(one, 0, keys[0])) for keys in chain] for name, chain in chains.items()}
    assert there["a"] == [True] * 4
    assert there["c"] == [True] * 4
    assert there["b"] in ([True, True, False, False], [True, False, False, False])
    assert sum(file.size for file in cached_files(tmp_path)) <= 10 * FILE


def test_a_small_limit_holds_for_several_that_write(tmp_path: Path) -> None:
    stores = [new_store(tmp_path, 5 * FILE) for _ in range(3)]
    for number in range(40):
        keys = keys_of(number, COUNT)
        disk = stores[number % 3]
        disk.write(0, keys[0], filled(keys))
        assert read_back(disk, 0, keys[0]) == set(keys)
        assert (
            sum(file.size for file in cached_files(tmp_path)) <= 5 * FILE + 3 * FILE
        )  # each looks after it has written
