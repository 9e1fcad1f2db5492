"""One segment file: written blocks are read back, and damage is found."""

import errno
import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.kv.blocks import BlockKey
from engine.kv.disk import segment_file
from engine.kv.disk.segment_file import (
    DATA_START,
    SEGMENT_BLOCKS,
    BadSegment,
    Head,
    SegmentHeader,
    append,
    create,
    open_segment,
    read_blocks,
    read_head,
    verify,
)
from tests.engine.kv.disk.known_blocks import FINGERPRINT, filled, keys_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

SIZE = 100
HEADER_BYTES = 112
ENTRY_BYTES = 104


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the wait between two reads of a damaged table."""
    monkeypatch.setattr(segment_file, "READ_INTERVAL", 0.0)


def header_of(first_key: BlockKey, size: int = SIZE) -> SegmentHeader:
    return SegmentHeader(FINGERPRINT, 3, size, first_key, os.urandom(16))


def new_file(path: Path, count: int, size: int = SIZE, name: str = "chain") -> list[BlockKey]:
    keys = keys_of(name, count)
    header = header_of(keys[0], size)
    create(path, header)
    append(path, header, 0, filled(keys, size=size))
    return keys


def contents(path: Path, indexes: list[int] | None = None) -> list[bytes]:
    """Return the data of some or all blocks."""
    read: dict[int, bytes] = {}
    with open_segment(path) as file:
        head = read_head(file)
        indexes = sorted(head.entries) if indexes is None else indexes
        read_blocks(file, head, indexes, lambda position, data: read.update({position: bytes(data)}))
    assert list(read) == list(range(len(indexes)))
    return list(read.values())


def head_of(path: Path) -> Head:
    with open_segment(path) as file:
        return read_head(file)


def change(path: Path, start: int, new: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(new)


def flip(path: Path, offset: int) -> None:
    change(path, offset, bytes([path.read_bytes()[offset] ^ 1 << random.randrange(8)]))


def entry_start(index: int) -> int:
    return HEADER_BYTES + index * ENTRY_BYTES


# -- round trips


@pytest.mark.parametrize("size", [1, 7, 4097, segment_file.READ_BATCH_BYTES // 3, segment_file.READ_BATCH_BYTES + 1])
def test_written_blocks_are_read_back(tmp_path: Path, size: int) -> None:
    path, keys = tmp_path / "one.run", keys_of("chain", 9)
    header, blocks = header_of(keys[0], size), filled(keys, size=size)
    create(path, header)
    assert head_of(path) == Head(header, {}, DATA_START)
    for start, stop in ((0, 1), (1, 5), (5, 9)):
        append(path, header, start, blocks[start:stop])
        head = head_of(path)
        assert head.header == header
        assert head.is_complete
        assert [(entry.key, entry.token_ids) for entry in head.entries.values()] == [it[:2] for it in blocks[:stop]]
    assert contents(path) == [bytes(data) for _, _, data in blocks]
    some = [8, 2, 3, 4, 0, 6]
    assert contents(path, some) == [bytes(blocks[index][2]) for index in some]
    assert path.stat().st_size == DATA_START + 9 * size


def test_file_holds_a_whole_segment(tmp_path: Path) -> None:
    path = tmp_path / "one.run"
    keys = new_file(path, SEGMENT_BLOCKS)
    assert [entry.key for entry in head_of(path).entries.values()] == keys
    assert entry_start(SEGMENT_BLOCKS) <= DATA_START
    assert not verify(path)


def test_only_requested_blocks_are_read(tmp_path: Path) -> None:
    path = tmp_path / "one.run"
    new_file(path, 5)
    flip(path, DATA_START + 2 * SIZE)
    assert len(contents(path, [0, 1, 3, 4])) == 4


# -- damage


def bad(path: Path) -> str:
    """Return the error of a damaged file."""
    with pytest.raises(BadSegment) as problem:
        contents(path)
    assert verify(path) == str(problem.value)
    return str(problem.value)


def test_damage_to_any_header_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "one.run"
    new_file(path, 3)
    whole = path.read_bytes()
    for offset in range(HEADER_BYTES):
        path.write_bytes(whole)
        flip(path, offset)
        assert bad(path)


def test_damaged_entry_is_found_and_a_torn_last_entry_ignored(tmp_path: Path) -> None:
    path, count = tmp_path / "one.run", 20
    new_file(path, count)
    while path.read_bytes()[entry_start(count) - 1] == 0:  # one file in 256 has a checksum that ends with zero
        path.unlink()
        new_file(path, count)
    whole = path.read_bytes()
    for index in range(count):
        path.write_bytes(whole)
        flip(path, entry_start(index) + random.randrange(ENTRY_BYTES - 1))
        assert bad(path) == f"entry {index} is damaged"
    for kept in range(ENTRY_BYTES):
        path.write_bytes(whole)
        change(path, entry_start(count - 1) + kept, bytes(ENTRY_BYTES - kept))
        head = head_of(path)
        assert sorted(head.entries) == list(range(count - 1))
        assert not head.is_complete
        assert len(contents(path)) == count - 1


def test_bytes_of_unused_entries_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "one.run"
    new_file(path, 3)
    whole = path.read_bytes()
    for offset in (entry_start(3), entry_start(40) + 102, entry_start(SEGMENT_BLOCKS), DATA_START - 1):
        path.write_bytes(whole)
        flip(path, offset)
        assert len(contents(path)) == 3


def test_damage_to_any_data_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "one.run"
    new_file(path, 2, size=50)
    whole = path.read_bytes()
    for offset in range(100):
        path.write_bytes(whole)
        flip(path, DATA_START + offset)
        assert bad(path) == f"block {offset // 50} is damaged"


def test_truncation_at_any_byte_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "one.run"
    new_file(path, 3, size=30)
    size = path.stat().st_size
    for length in (*range(size - 1, size - 95, -1), DATA_START, DATA_START - 1, HEADER_BYTES, 50, 1, 0):
        os.truncate(path, length)
        assert bad(path) == "truncated"
        with pytest.raises(BadSegment):
            head_of(path)  # the truncation is found by reading the head alone


def test_swapped_data_and_entries_are_found(tmp_path: Path) -> None:
    """Data and entries are swapped within a file, and with those of another file that holds the same blocks."""
    paths = [tmp_path / "one.run", tmp_path / "two.run"]
    for path in paths:
        new_file(path, 4)
    first, second = (path.read_bytes() for path in paths)
    for start, size, end in ((entry_start(1), ENTRY_BYTES, entry_start(2)), (DATA_START, SIZE, DATA_START + SIZE)):
        change(paths[0], end, first[start : start + size])
        assert bad(paths[0]).endswith("is damaged")
        paths[0].write_bytes(first)
    for start, stop in ((entry_start(1), entry_start(2)), (entry_start(0), DATA_START)):
        change(paths[0], start, second[start:stop])
        assert bad(paths[0]).endswith("is damaged")
        paths[0].write_bytes(first)
    assert first[DATA_START:] == second[DATA_START:]


def test_data_of_another_file_is_found(tmp_path: Path) -> None:
    paths = [tmp_path / "one.run", tmp_path / "two.run"]
    for path, name in zip(paths, "ab", strict=True):
        new_file(path, 4, name=name)
    change(paths[0], DATA_START, paths[1].read_bytes()[DATA_START:])
    assert bad(paths[0]) == "block 0 is damaged"


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [("MAGIC", b"INGLEKW\0", "not a segment file"), ("VERSION", 2, "version 2"), ("SEGMENT_BLOCKS", 32, "version")],
)
def test_other_magic_and_versions_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: object, why: str
) -> None:
    path = tmp_path / "one.run"
    with monkeypatch.context() as other:
        other.setattr(segment_file, field, value)
        create(path, header_of(keys_of("chain")[0]))
    assert why in bad(path)


def test_header_with_block_size_zero_is_rejected(tmp_path: Path) -> None:
    create(tmp_path / "one.run", header_of(keys_of("chain")[0], 0))
    assert "damaged" in bad(tmp_path / "one.run")


# -- concurrent writes


def test_table_that_is_being_written_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.run"
    new_file(path, 5)
    whole = path.read_bytes()
    change(path, entry_start(2) + 50, bytes(20))
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == segment_file.MAX_READS:
            path.write_bytes(whole)

    monkeypatch.setattr(time, "sleep", sleep)
    assert len(contents(path)) == 5
    assert len(looks) == segment_file.MAX_READS


class _Growing(FileIO):
    """A file that another process appends to just before its first read."""

    grow: Callable[[], None] | None = None

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        grow, self.grow = self.grow, None
        if grow is not None:
            grow()
        return super().readinto(buffer)


def test_file_may_grow_while_its_head_is_read(tmp_path: Path) -> None:
    path, keys = tmp_path / "one.run", keys_of("chain", 5)
    header = header_of(keys[0])
    create(path, header)
    append(path, header, 0, filled(keys[:2], size=SIZE))
    with _Growing(path) as file:
        file.grow = lambda: append(path, header, 2, filled(keys[2:], size=SIZE))
        assert len(read_head(file).entries) == 5


# -- permissions


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    yield
    os.umask(before)


@pytest.mark.parametrize("mask", [0, 0o022, 0o377, 0o777])
def test_files_have_mode_0600_under_any_umask(tmp_path: Path, mask: int) -> None:
    path = tmp_path / "one.run"
    with umask(mask):
        new_file(path, 3)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o777])
def test_files_with_permissions_for_other_users_are_rejected(tmp_path: Path, mode: int) -> None:
    new_file(tmp_path / "one.run", 3)
    (tmp_path / "one.run").chmod(mode)
    assert "other users" in bad(tmp_path / "one.run")


def test_files_of_other_users_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_file(tmp_path / "one.run", 3)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert "other users" in bad(tmp_path / "one.run")


def test_links_folders_and_pipes_are_rejected_at_once(tmp_path: Path) -> None:
    new_file(tmp_path / "one.run", 3)
    (tmp_path / "link").symlink_to(tmp_path / "one.run")
    (tmp_path / "loose").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, why in (("link", "link"), ("loose", "link"), ("folder", "regular"), ("pipe", "regular")):
        assert why in bad(tmp_path / name)


def test_link_created_after_the_check_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_file(tmp_path / "one.run", 3)
    (tmp_path / "link").symlink_to(tmp_path / "one.run")
    monkeypatch.setattr(Path, "is_symlink", lambda path: False)
    with pytest.raises(OSError, match="symbolic"):
        contents(tmp_path / "link")
    with pytest.raises(OSError, match="symbolic"):
        append(tmp_path / "link", header_of(keys_of("chain")[0]), 3, [])


def test_verify_closes_every_file(tmp_path: Path) -> None:
    new_file(tmp_path / "one.run", 3)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch(0o600)
    before = os.dup(0)
    os.close(before)
    for name in ("one.run", "folder", "empty"):
        verify(tmp_path / name)
    after = os.dup(0)
    os.close(after)
    assert after == before


def test_failed_create_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    for target in ((segment_file, "_write"), (os, "replace")):
        with monkeypatch.context() as broken:
            broken.setattr(*target, full)
            with pytest.raises(OSError, match="no space"):
                create(tmp_path / "one.run", header_of(keys_of("chain")[0]))
        assert not list(tmp_path.iterdir())


def test_verify_reports_a_missing_file(tmp_path: Path) -> None:
    assert "No such file" in verify(tmp_path / "one.run")
