"""Damaged files and failing writes, with a whole engine.

A damaged file is a miss with at most one log line. It causes no error and no wrong token, and its blocks are computed
and written again. Engines also continue if nothing can be written.

Damage is not found in unused bytes: between the table and the data, and after the last entry of the table. Damage to
the last entry is not found if it makes the last byte of the entry's checksum zero. A killed process leaves the same
bytes, so that block counts as never written. A store that found the block before still finds the damage.
"""

import errno
import logging
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.config import BLOCK_SIZE, GroupConfig
from engine.kv.blocks import BlockKey
from engine.kv.disk import segment_file
from engine.kv.disk.quota import Quota
from engine.kv.disk.segment_file import DATA_START
from engine.kv.disk.store import WRITE_PAUSE, DiskStore
from engine.request import FinishReason, Request
from tests.engine.hash_run import Run
from tests.engine.kv.disk.refusals import Clock, Refusals
from tests.support.hash_model import block_bytes, hash_engine

KINDS = {
    "full": (GroupConfig(),),
    "windows": (GroupConfig(), GroupConfig(window=40)),
    "hybrid": (GroupConfig(), GroupConfig(recurrent=True)),
}
FINGERPRINT = bytes(range(32))
PROMPTS = [tuple(range(start, start + 100 + 17 * number)) for number, start in enumerate(range(0, 3000, 500))]
OUTPUT = 17  # tokens, so that replies end within a block after any prompt
HEADER_BYTES, ENTRY_BYTES = 112, 104


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the wait between two reads of a damaged table."""
    monkeypatch.setattr(segment_file, "READ_INTERVAL", 0.0)


def new_store(root: Path, groups: Sequence[GroupConfig], clock: Clock | None = None) -> DiskStore:
    return DiskStore(root / "model", FINGERPRINT, block_bytes(groups), Quota(root, 1 << 30), clock or Clock())


def answer(
    store: DiskStore, groups: tuple[GroupConfig, ...], prompts: Sequence[tuple[int, ...]], seed: int = 0
) -> list[Request]:
    """Run the prompts together. Every token must be right, and no request may fail."""
    run = Run(hash_engine(seed=seed, num_blocks=200, groups=groups, store=store)[0])
    requests = [run.submit(prompt, ignore_eos=True, max_tokens=OUTPUT) for prompt in prompts]
    run.run_out()
    run.check()
    assert set(run.finished.values()) == {FinishReason.LENGTH}
    return requests


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.run"))


# -- ways to damage a file


@dataclass(frozen=True)
class Damaged:
    """A damaged file.

    `seen`: whether the damage is found when the file's blocks are looked up.
    `hides_block`: whether the last block looks as if it had never been written.
    """

    path: Path
    seen: bool = True
    hides_block: bool = False

    def is_found(self, found_before: bool) -> bool:
        """Return whether a store finds the damage. A hidden block is missed by a store that found it before."""
        return self.seen or (self.hides_block and found_before)


# a way to damage a file, given another file to swap content with
Way = Callable[[random.Random, Path, Path], list[Damaged]]


def num_blocks(path: Path) -> int:
    """Return the number of blocks in a file whose table has no gaps."""
    table = path.read_bytes()[HEADER_BYTES:DATA_START]
    entries = [table[start : start + ENTRY_BYTES] for start in range(0, 64 * ENTRY_BYTES, ENTRY_BYTES)]
    return sum(entry != bytes(ENTRY_BYTES) for entry in entries)


def block_size(path: Path) -> int:
    return (path.stat().st_size - DATA_START) // num_blocks(path)


def change(chance: random.Random, path: Path, value: Callable[[int], int]) -> list[Damaged]:
    """Change one byte. The header and the table are chosen more often than their size suggests."""
    content = bytearray(path.read_bytes())
    entries = HEADER_BYTES + num_blocks(path) * ENTRY_BYTES
    regions = [(0, HEADER_BYTES), (HEADER_BYTES, entries), (entries, DATA_START), (DATA_START, len(content))]
    offset = chance.randrange(*chance.choices(regions, (2, 4, 1, 4))[0])
    content[offset] = value(content[offset])
    path.write_bytes(content)
    # the entry that the reader takes for the last one
    if entries - ENTRY_BYTES <= offset < HEADER_BYTES + 64 * ENTRY_BYTES:
        end = HEADER_BYTES + ((offset - HEADER_BYTES) // ENTRY_BYTES + 1) * ENTRY_BYTES
        seen = content[end - 1] != 0
        return [Damaged(path, seen, not seen and offset < entries)]
    return [Damaged(path, not entries <= offset < DATA_START)]


def flip_bit(chance: random.Random, path: Path, other: Path) -> list[Damaged]:
    return change(chance, path, lambda byte: byte ^ 1 << chance.randrange(8))


def change_byte(chance: random.Random, path: Path, other: Path) -> list[Damaged]:
    return change(chance, path, lambda byte: (byte + chance.randrange(1, 256)) % 256)


def truncate(chance: random.Random, path: Path, other: Path) -> list[Damaged]:
    os.truncate(path, chance.randrange(chance.choice((HEADER_BYTES, DATA_START, path.stat().st_size))))
    return [Damaged(path)]


def swap_files(chance: random.Random, path: Path, other: Path) -> list[Damaged]:
    contents = path.read_bytes(), other.read_bytes()
    for it, content in zip((other, path), contents, strict=True):
        it.write_bytes(content)
    return [Damaged(path), Damaged(other)]


def swap_blocks(chance: random.Random, path: Path, other: Path) -> list[Damaged]:
    """Swap the data of two blocks of one file, or of two files."""
    size = block_size(path)
    if num_blocks(path) > 1 and chance.random() < 0.5:
        content = bytearray(path.read_bytes())
        one, two = (
            slice(DATA_START + it * size, DATA_START + (it + 1) * size)
            for it in chance.sample(range(num_blocks(path)), 2)
        )
        content[one], content[two] = content[two], content[one]
        path.write_bytes(content)
        return [Damaged(path)]
    if block_size(other) != size:
        return swap_files(chance, path, other)
    contents = [bytearray(it.read_bytes()) for it in (path, other)]
    index = chance.randrange(min(num_blocks(path), num_blocks(other)))
    part = slice(DATA_START + index * size, DATA_START + (index + 1) * size)
    contents[0][part], contents[1][part] = contents[1][part], contents[0][part]
    for it, content in zip((path, other), contents, strict=True):
        it.write_bytes(content)
    return [Damaged(path), Damaged(other)]


def forge(path: Path, offset: int, new: bytes) -> list[Damaged]:
    """Write other header fields with a valid checksum."""
    content = bytearray(path.read_bytes())
    content[offset : offset + len(new)] = new
    content[HEADER_BYTES - 4 : HEADER_BYTES] = struct.pack("<I", zlib.crc32(content[: HEADER_BYTES - 4]))
    path.write_bytes(content)
    return [Damaged(path)]


def other_version(chance: random.Random, path: Path, other: Path) -> list[Damaged]:
    return forge(path, 8, struct.pack("<I", chance.choice((0, 2, 1 << 31))))


def other_model(chance: random.Random, path: Path, other: Path) -> list[Damaged]:
    return forge(path, 28, chance.randbytes(32))


def other_kind(chance: random.Random, path: Path, other: Path) -> list[Damaged]:
    """Change the group or the block size in the header."""
    return forge(path, *chance.choice([(16, struct.pack("<I", 7)), (20, struct.pack("<Q", block_size(path) // 2))]))


def link(chance: random.Random, path: Path, other: Path) -> list[Damaged]:
    """Replace the file by a link to it, to another file, to itself, or to nothing."""
    moved = path.with_suffix(".moved")
    path.rename(moved)
    path.symlink_to(chance.choice((moved, other, path.with_suffix(".nowhere"), path)))
    return [Damaged(path)]


def other_mode(chance: random.Random, path: Path, other: Path) -> list[Damaged]:
    path.chmod(0o600 | chance.randrange(1, 0o100))
    return [Damaged(path)]


def folder(chance: random.Random, path: Path, other: Path) -> list[Damaged]:
    path.unlink()
    path.mkdir()
    return [Damaged(path)]


def pipe(chance: random.Random, path: Path, other: Path) -> list[Damaged]:
    path.unlink()
    os.mkfifo(path, 0o600)
    return [Damaged(path)]


def empty(chance: random.Random, path: Path, other: Path) -> list[Damaged]:
    os.truncate(path, 0)
    return [Damaged(path)]


def random_bytes(chance: random.Random, path: Path, other: Path) -> list[Damaged]:
    """Replace the whole file, or all of its data, by random bytes."""
    start = chance.choice((0, DATA_START))
    path.write_bytes(path.read_bytes()[:start] + chance.randbytes(path.stat().st_size - start))
    return [Damaged(path)]


WAYS: tuple[Way, ...] = (
    *(flip_bit, flip_bit, flip_bit, change_byte, truncate, truncate, swap_files, swap_blocks, swap_blocks),
    *(other_version, other_model, other_kind, link, other_mode, folder, pipe, empty, random_bytes),
)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_damaged_files_are_misses_and_logged_once(
    tmp_path: Path, corruptions: int, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    groups, chance = KINDS[kind], random.Random(kind)
    whole = tmp_path / "whole"
    first = answer(new_store(whole, groups), groups, PROMPTS)
    prompts = [(*it.prompt_ids, *it.output_ids, *range(4000, 4020)) for it in first]
    number = damaged = 0
    while damaged < corruptions // len(KINDS):
        number += 1
        trial = tmp_path / str(number)
        damaged += _damage(trial, whole, groups, prompts, chance, caplog)
        shutil.rmtree(trial)


def _damage(
    root: Path,
    whole: Path,
    groups: tuple[GroupConfig, ...],
    prompts: Sequence[tuple[int, ...]],
    chance: random.Random,
    caplog: pytest.LogCaptureFixture,
) -> int:
    """Damage some files, run engines over them, and return the number of damaged files."""
    shutil.copytree(whole, root)
    caplog.clear()
    second, found_before = new_store(root, groups), chance.random() < 0.4
    if found_before:
        for path in files(root):
            second.find(*_names(path))
    victims = chance.sample(there := files(root), len(there))
    damaged = [
        it
        for path, other in zip(victims[::2], victims[1::2], strict=True)
        for it in chance.choice(WAYS)(chance, path, other)
    ]
    answer(second, groups, prompts, seed=1)
    logged = _logged(caplog)
    for it in damaged:
        if len(groups) == 1:  # with several groups, not all blocks of a file are needed
            assert logged.count(it.path) == it.is_found(found_before), (it, found_before, caplog.messages)
        assert logged.count(it.path) <= it.is_found(found_before)
    assert set(logged) <= {it.path for it in damaged}
    caplog.clear()
    third = answer(new_store(root, groups), groups, prompts, seed=2)
    if len(groups) == 1:
        assert [it.cache.disk for it in third] == [(len(it.prompt_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE for it in third]
        assert all(path.is_dir() for path in _logged(caplog))
    return len(damaged)


def _logged(caplog: pytest.LogCaptureFixture) -> list[Path]:
    """Return the files that the log lines name."""
    logged = []
    for record in caplog.records:
        assert (record.name, record.levelno) == ("engine.kv.disk.store", logging.WARNING), record
        assert isinstance(record.args, tuple)
        logged.append(record.args[0])
    return logged  # type: ignore[return-value]


def _names(path: Path) -> tuple[int, BlockKey]:
    """Return the group and the first key of a file."""
    header = segment_file.SegmentHeader.from_bytes(path.read_bytes()[:HEADER_BYTES])
    return header.group, header.first_key


# -- writing fails


@pytest.mark.parametrize(("error", "lasting"), [(errno.ENOSPC, False), (errno.ENOSPC, True), (errno.EROFS, True)])
def test_requests_continue_when_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int, lasting: bool
) -> None:
    """Writing fails from the third call on, from the sixth, and so on. The next engine continues from files."""
    groups = KINDS["hybrid"]
    first = 0
    while True:
        first += 3
        root, clock = tmp_path / str(first), Clock()
        root.mkdir()
        store = new_store(root, groups, clock)
        refusals = Refusals(first, 10**9 if lasting else first, error)
        caplog.clear()
        run = Run(hash_engine(num_blocks=200, groups=groups, store=store)[0])
        with monkeypatch.context() as patch:
            refusals.install(patch)
            _answer_on(run, PROMPTS[0])
        if refusals.calls < first:
            break
        assert store.is_paused
        clock.now += WRITE_PAUSE
        _answer_on(run, PROMPTS[0])  # the blocks of this request are queued for writing again
        (again,) = answer(new_store(root, groups), groups, PROMPTS[:1], seed=2)
        assert again.cache.disk == (len(PROMPTS[0]) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert len(caplog.records) == 1
        assert "writing the KV cache" in caplog.messages[0]
    assert first > 10


def _answer_on(run: Run, prompt: tuple[int, ...]) -> None:
    request = run.submit(prompt, ignore_eos=True, max_tokens=OUTPUT)
    run.run_out()
    run.check()
    assert run.finished[request.id] is FinishReason.LENGTH


def test_files_in_a_read_only_folder_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    groups = KINDS["full"]
    answer(new_store(tmp_path, groups), groups, PROMPTS)
    with monkeypatch.context() as patch:
        Refusals(1, 10**9, errno.EROFS).install(patch)
        found = answer(new_store(tmp_path, groups), groups, [(*prompt, *range(4000, 4050)) for prompt in PROMPTS])
    assert [it.cache.disk for it in found] == [len(prompt) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS]
    assert len(caplog.records) == 1


# -- deleted files


def test_quota_keeps_the_start_of_a_chain(tmp_path: Path) -> None:
    """The files of one prompt exceed the limit."""
    groups = KINDS["full"]
    limit = 4 * (DATA_START + 64 * block_bytes(groups)[0])  # four segments
    prompt = tuple(number % 4999 for number in range(64 * BLOCK_SIZE * 7))
    for seed in range(2):
        store = DiskStore(tmp_path / "model", FINGERPRINT, block_bytes(groups), Quota(tmp_path, limit))
        run = Run(hash_engine(seed=seed, num_blocks=600, budget=1024, groups=groups, store=store)[0])
        request = run.submit(prompt, ignore_eos=True, max_tokens=1)
        run.run_out()
        run.check()
        assert sum(path.stat().st_size for path in files(tmp_path)) <= limit
    assert request.cache.disk >= 2 * 64 * BLOCK_SIZE  # a sweep frees more than needed, so three of four segments stay
