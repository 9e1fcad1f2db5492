"""The size limit of all files, and deletion of the least recently used ones."""

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

COUNT = 20  # blocks per file
FILE = DATA_START + COUNT * SIZES[0]  # bytes


def some_file(root: Path, name: str, size: int, used: float, *, model: str = "model") -> Path:
    path = root / model / name[:2] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (used, used))
    return path


def test_cached_files_lists_segment_files_of_all_models_only(tmp_path: Path) -> None:
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


def test_missing_folder_has_no_files(tmp_path: Path) -> None:
    assert not list(cached_files(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("free", "kept", "limit"),
    [
        (400 * GIB, 0, 40 * GIB),
        (360 * GIB, 40 * GIB, 40 * GIB),  # existing cache files count as free space
        (50 * GIB, 0, MIN_LIMIT),
        (9000 * GIB, 0, MAX_LIMIT),
        (10 * GIB, 0, 5 * GIB),  # the limit is at most half of the space
        (0, 10 * GIB, 5 * GIB),
        (0, 0, 0),
    ],
)
def test_automatic_limit_is_a_bounded_share_of_the_space(free: int, kept: int, limit: int) -> None:
    assert automatic_limit(free, kept) == limit


def test_least_recently_used_files_are_deleted_first(tmp_path: Path) -> None:
    paths = [some_file(tmp_path, f"{number:02}-0-1.run", 100, number) for number in (3, 1, 4, 2, 5)]
    Quota(tmp_path, 320).charge(1)
    assert [path for path in paths if path.exists()] == [paths[0], paths[2], paths[4]]


def test_a_sweep_frees_more_than_needed(tmp_path: Path) -> None:
    """If a sweep freed only what is needed, every write would check all files."""
    paths = [some_file(tmp_path, f"{number:02}-0-1.run", 100, number) for number in range(65)]
    quota = Quota(tmp_path, 6400)
    quota.charge(1)
    assert sum(path.exists() for path in paths) == 62  # 1 / SWEEP_FRACTION below the limit
    for number in range(100, 102):
        some_file(tmp_path, f"{number}-0-1.run", 99, time.time())
        quota.charge(99)
    assert sum(path.exists() for path in paths) == 62
    some_file(tmp_path, "99-0-1.run", 1000, time.time())
    quota.charge(1000)
    assert not paths[3].exists()
    assert sum(file.size for file in cached_files(tmp_path)) <= 6400 - 6400 // SWEEP_FRACTION


def test_files_are_not_swept_before_the_first_write(tmp_path: Path) -> None:
    path = some_file(tmp_path, "ab-0-1.run", 100, 1.0)
    quota = Quota(tmp_path, 10)
    quota.charge(0)
    assert path.exists()
    quota.enforce()
    assert not path.exists()


def test_zero_limit_deletes_all_files(tmp_path: Path) -> None:
    some_file(tmp_path, "ab-0-1.run", 100, 1.0)
    Quota(tmp_path, 0).charge(1)
    assert not list(cached_files(tmp_path))


@dataclass
class _Usage:
    free: int


def test_automatic_limit_follows_the_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [some_file(tmp_path, f"{number:02}-0-1.run", 1000, number) for number in range(10)]
    quota = Quota(tmp_path, None)
    # the limit is half of the free and used bytes: of 20,000, 12,000, and 5,000
    for free, left in ((10_000, 10), (2_000, 5), (0, 2)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: _Usage(free))
        quota.enforce()
        assert sum(path.exists() for path in paths) == left


def test_old_unfinished_files_are_deleted(tmp_path: Path) -> None:
    old = some_file(tmp_path, "ab-0-1.tmp", 10, time.time() - UNFINISHED_MAX_AGE - 60)
    new = some_file(tmp_path, "ab-0-2.tmp", 10, time.time() - UNFINISHED_MAX_AGE + 60)
    Quota(tmp_path, 1 << 30).charge(1)
    assert not old.exists()
    assert new.exists()


def test_files_deleted_by_other_processes_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some_file(tmp_path, "ab-0-1.run", 100, 1.0)
    (tmp_path / "model" / "ab" / "ab-0-2.run").mkdir()
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [*real(path), "ab-0-3.run", "ab-0-3.tmp"])
    Quota(tmp_path, 0).charge(1)
    assert not (tmp_path / "model" / "ab" / "ab-0-1.run").exists()


# -- limits that a store applies


def chain_of(name: str, segments: int) -> list[list[BlockKey]]:
    return [keys_of(f"{name} {number}", COUNT) for number in range(segments)]


def test_ends_of_unused_chains_are_deleted_first(tmp_path: Path) -> None:
    one = new_store(tmp_path, 10 * FILE)
    chains = {name: chain_of(name, 4) for name in "abc"}
    for name in "ab":
        for keys in chains[name]:
            one.write(0, keys[0], filled(keys))
        one.touch(0, [keys[0] for keys in chains[name]])
        time.sleep(0.01)
    one.touch(0, [keys[0] for keys in chains["a"]])  # chain a is used again
    for keys in chains["c"]:
        one.write(0, keys[0], filled(keys))
    there = {name: [bool(read_back(one, 0, keys[0])) for keys in chain] for name, chain in chains.items()}
    assert there["a"] == [True] * 4
    assert there["c"] == [True] * 4
    assert there["b"] in ([True, True, False, False], [True, False, False, False])
    assert sum(file.size for file in cached_files(tmp_path)) <= 10 * FILE


def test_several_stores_respect_a_small_limit(tmp_path: Path) -> None:
    stores = [new_store(tmp_path, 5 * FILE) for _ in range(3)]
    for number in range(40):
        keys = keys_of(number, COUNT)
        disk = stores[number % 3]
        disk.write(0, keys[0], filled(keys))
        assert read_back(disk, 0, keys[0]) == set(keys)
        # Each store sweeps after its writes, so each may exceed the limit by one file.
        assert sum(file.size for file in cached_files(tmp_path)) <= 5 * FILE + 3 * FILE
