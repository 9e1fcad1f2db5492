"""The files of one model: lookups by any process, damage, deletion, failing disks, and concurrency."""

import errno
import itertools
import os
import random
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.kv.blocks import BlockKey
from engine.kv.disk import segment_file, store
from engine.kv.disk.quota import Quota
from engine.kv.disk.segment_file import DATA_START, SEGMENT_BLOCKS
from engine.kv.disk.store import WRITE_PAUSE, DiskMiss, DiskStore
from tests.engine.kv.disk.known_blocks import FINGERPRINT, SIZES, data_of, filled, keys_of, new_store, read_back
from tests.engine.kv.disk.refusals import Clock, Refusals
from tests.support.processes import Started

ROOT = Path(__file__).parents[4]
GROUPS = range(len(SIZES))


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.run"))


def write_all(store: DiskStore, keys: list[BlockKey], first_key: BlockKey | None = None) -> int:
    """Write the blocks of all groups, and return the number of bytes."""
    return sum(store.write(group, first_key or keys[0], filled(keys, group)) for group in GROUPS)


def assert_holds(store: DiskStore, keys: list[BlockKey], first_key: BlockKey | None = None) -> None:
    for group in GROUPS:
        assert read_back(store, group, first_key or keys[0]) == set(keys)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [record.getMessage() for record in caplog.records]


Warnings = Callable[[], list[str]]


# -- writing and finding


def test_empty_store_finds_no_blocks_and_creates_no_folder(tmp_path: Path) -> None:
    assert not new_store(tmp_path).find(0, keys_of("chain")[0])
    assert not list(tmp_path.iterdir())


def test_growing_segment_is_found_by_all_stores(tmp_path: Path) -> None:
    keys = keys_of("chain")
    one, two = new_store(tmp_path), new_store(tmp_path)
    for stop in (1, 2, 30, SEGMENT_BLOCKS):
        assert write_all(one, keys[:stop], keys[0]) > 0
        for other in (one, two, new_store(tmp_path)):
            assert_holds(other, keys[:stop], keys[0])
    assert len(files(tmp_path)) == len(SIZES)
    assert write_all(one, keys) == write_all(two, keys) == 0  # all blocks are stored already


def test_stores_write_one_segment_to_separate_files(tmp_path: Path) -> None:
    keys = keys_of("chain", 30)
    one, two = new_store(tmp_path), new_store(tmp_path)
    write_all(one, keys[:10], keys[0])
    write_all(two, keys[:20], keys[0])
    write_all(one, keys, keys[0])
    for other in (one, two, new_store(tmp_path)):
        assert_holds(other, keys)
    assert len(files(tmp_path)) == 2 * len(SIZES)
    blocks = (10 + 10 + 10) * sum(SIZES)
    heads = len(files(tmp_path)) * segment_file.DATA_START
    assert sum(path.stat().st_size for path in files(tmp_path)) == blocks + heads


def test_forks_within_a_segment_need_several_files(tmp_path: Path) -> None:
    trunk = keys_of("trunk", 10)
    ends = [keys_of(f"end {number}", SEGMENT_BLOCKS - 10) for number in range(4)]
    one = new_store(tmp_path)
    write_all(one, trunk)
    for end in ends:
        write_all(one, end, trunk[0])
    assert_holds(new_store(tmp_path), [*trunk, *itertools.chain(*ends)], trunk[0])
    assert len(files(tmp_path)) == 4 * len(SIZES)  # 10 + 4 * 54 blocks


def test_many_chains_share_one_folder(tmp_path: Path) -> None:
    chains = [keys_of(number, 3) for number in range(300)]
    one = new_store(tmp_path)
    for keys in chains:
        write_all(one, keys)
    for other in (one, new_store(tmp_path)):
        for keys in chains:
            assert_holds(other, keys)


def test_blocks_of_another_process_are_found(tmp_path: Path) -> None:
    keys = keys_of("chain", 5)
    here = new_store(tmp_path)
    assert not here.find(0, keys[0])
    source = (
        "import sys; from pathlib import Path; from tests.engine.kv.disk.known_blocks import *;"
        "keys = keys_of('chain', 5); store = new_store(Path(sys.argv[1]));"
        "[store.write(group, keys[0], filled(keys, group)) for group in range(len(SIZES))]"
    )
    subprocess.run([sys.executable, "-c", source, tmp_path], cwd=ROOT, check=True)
    assert_holds(here, keys)


def test_files_of_another_model_are_a_miss(tmp_path: Path, warnings: Warnings) -> None:
    keys = keys_of("chain", 5)
    write_all(new_store(tmp_path), keys)
    other = DiskStore(tmp_path / "model", bytes(32), SIZES, Quota(tmp_path, None))
    assert not other.find(0, keys[0])
    assert not other.find(0, keys[0])
    assert len(warnings()) == 1


@pytest.mark.parametrize("sizes", [(SIZES[0] + 1,), (SIZES[1],)])
def test_blocks_of_another_size_are_a_miss(tmp_path: Path, sizes: tuple[int, ...], warnings: Warnings) -> None:
    keys = keys_of("chain", 5)
    write_all(new_store(tmp_path), keys)
    other = DiskStore(tmp_path / "model", FINGERPRINT, sizes, Quota(tmp_path, None))
    assert not other.find(0, keys[0])
    assert "another group or size" in warnings()[0]


def test_renamed_file_is_a_miss(tmp_path: Path, warnings: Warnings) -> None:
    keys, other = keys_of("chain", 5), keys_of("other", 5)
    write_all(new_store(tmp_path), keys)
    write_all(new_store(tmp_path), other)
    by_name = {path.name[:32]: path for path in files(tmp_path) if path.name[33] == "0"}
    os.replace(by_name[keys[0][:16].hex()], by_name[other[0][:16].hex()])
    assert not new_store(tmp_path).find(0, other[0])
    assert "another segment" in warnings()[0]


def test_changed_folders_are_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are listed again after a change, and for a while after it, because their timestamps are coarse."""
    listed: list[Path] = []
    real = os.listdir

    def list_it(path: Path) -> list[str]:
        listed.append(path)
        return real(path)

    keys, more = keys_of("chain", 3), keys_of("chain", 3)[:1] + keys_of("more", 2)
    one, two = new_store(tmp_path), new_store(tmp_path)
    write_all(one, keys)
    folder = files(tmp_path)[0].parent
    monkeypatch.setattr(os, "listdir", list_it)
    os.utime(folder, ns=(0, time.time_ns() + 3600 * 10**9))  # a change that stays recent for the whole test
    assert_holds(two, keys)
    assert_holds(two, keys)
    assert len(listed) == 2 * len(SIZES)
    os.utime(folder, ns=(0, time.time_ns() - 10**9))
    assert_holds(two, keys)
    listed.clear()
    assert_holds(two, keys)
    assert not listed
    write_all(new_store(tmp_path), more, keys[0])
    assert_holds(two, keys + more[1:], keys[0])
    for path in files(tmp_path):
        path.unlink()
    assert not two.find(0, keys[0])


def test_file_heads_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of("chain", 3)
    write_all(new_store(tmp_path), keys)
    other = new_store(tmp_path)
    found = other.find(0, keys[0])
    monkeypatch.setattr(store, "open_segment", None)
    assert other.find(0, keys[0]) == found


def test_remembered_heads_and_own_files_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_HEADS", 3)
    monkeypatch.setattr(store, "MAX_OWN_FILES", 3)
    chains = [keys_of(number, 3) for number in range(10)]
    one = new_store(tmp_path)
    for keys in chains + chains:
        write_all(one, keys[:2])
    for keys in chains:
        write_all(one, keys)
        assert_holds(one, keys)
        assert len(one._heads) <= 3
        assert len(one._own_files) <= 3


# -- changed and damaged files


@pytest.mark.parametrize("found_before", [False, True])
def test_swapped_files_of_two_groups_are_misses(tmp_path: Path, warnings: Warnings, found_before: bool) -> None:
    """Blocks of the two groups have the same keys and tokens, so only the group differs."""
    sizes = (100, 100)
    new = [DiskStore(tmp_path / "model", FINGERPRINT, sizes, Quota(tmp_path, None)) for _ in range(2)]
    keys = keys_of("chain", 5)
    for group in GROUPS:
        new[0].write(group, keys[0], filled(keys, group, 100))
    if found_before:
        blocks = [list(new[1].find(group, keys[0]).values()) for group in GROUPS]
    one, two = files(tmp_path)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    for group in GROUPS:
        if found_before:
            with pytest.raises(DiskMiss):
                new[1].read(blocks[group], lambda position, data: pytest.fail("this is of the other group"))
        assert not new[1].find(group, keys[0])
    assert len(warnings()) == 2
    assert not files(tmp_path)


def test_entry_replaced_after_lookup_is_a_miss(tmp_path: Path, warnings: Warnings) -> None:
    keys = keys_of("chain", 5)
    one = new_store(tmp_path)
    write_all(one, keys)
    blocks = list(one.find(0, keys[0]).values())
    block = blocks[2]
    with block.path.open("r+b") as file:
        seed = segment_file._seed(2, block.header.identity)
        known = segment_file.read_head(file.raw).entries[2]  # type: ignore[arg-type]
        file.seek(segment_file._entry_starts()[2])
        file.write(replace(known, token_ids=(0,) * len(known.token_ids)).to_bytes(seed))
    with pytest.raises(DiskMiss):
        one.read(blocks, lambda position, data: None)
    assert len(warnings()) == 1


def test_damaged_file_that_cannot_be_deleted_is_logged_once(
    tmp_path: Path, warnings: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is not found again, although its head is valid."""
    keys = keys_of("chain", 5)
    one = new_store(tmp_path)
    write_all(one, keys)
    blocks = list(one.find(0, keys[0]).values())
    with blocks[0].path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([data_of(keys[-1], 0, SIZES[0])[-1] ^ 1]))

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(Path, "unlink", refuse)
    for _ in range(2):
        with pytest.raises(DiskMiss):
            one.read(blocks, lambda position, data: None)
        assert not one.find(0, keys[0])
    assert len(warnings()) == 1


def test_file_deleted_after_lookup_is_a_miss_without_a_warning(tmp_path: Path, warnings: Warnings) -> None:
    keys = keys_of("chain", 5)
    one = new_store(tmp_path)
    write_all(one, keys)
    blocks = list(one.find(0, keys[0]).values())
    for path in files(tmp_path):
        path.unlink()
    with pytest.raises(DiskMiss):
        one.read(blocks, lambda position, data: None)
    assert not one.find(0, keys[0])
    assert write_all(one, keys) == 5 * sum(SIZES)
    assert_holds(one, keys)
    assert not warnings()


def test_file_deleted_during_an_append_is_replaced(
    tmp_path: Path, warnings: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of("chain", 5)
    one = new_store(tmp_path)
    write_all(one, keys[:2], keys[0])
    append = segment_file.append

    def late(path: Path, *rest: object) -> None:
        path.unlink()
        append(path, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(store, "append", late)
        assert write_all(one, keys[:4], keys[0]) == 0
    assert not one.is_paused
    write_all(one, keys)
    assert_holds(one, keys)
    assert not warnings()


def test_unreadable_file_is_ignored_for_a_while_and_kept(
    tmp_path: Path, warnings: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of("chain", 5)
    write_all(new_store(tmp_path), keys)

    def refuse(*arguments: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    clock = Clock()
    other = DiskStore(tmp_path / "model", FINGERPRINT, SIZES, Quota(tmp_path, 1 << 30), clock)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        assert not other.find(0, keys[0])
        assert not other.find(0, keys[0])
    assert len(warnings()) == 1
    assert not other.find(0, keys[0])
    clock.now += WRITE_PAUSE
    assert_holds(other, keys)
    assert_holds(new_store(tmp_path), keys)


def test_damaged_own_file_is_replaced_by_a_new_one(tmp_path: Path, warnings: Warnings) -> None:
    keys = keys_of("chain", 5)
    one = new_store(tmp_path)
    write_all(one, keys[:2], keys[0])
    for path in files(tmp_path):
        path.unlink()
        path.mkdir()
    assert write_all(one, keys) == 5 * sum(SIZES)
    assert_holds(one, keys)
    assert len(warnings()) == len(SIZES)


# -- forget and touch


@pytest.mark.parametrize("harm", ["killed before the entries", "torn", "cannot be opened"])
def test_forget_deletes_files_that_may_hold_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    keys, other = keys_of("chain", 5), keys_of("other", 5)
    write_all(new_store(tmp_path), other)
    write_all(new_store(tmp_path), keys)
    one = new_store(tmp_path)
    for path in (path for path in files(tmp_path) if path.name.startswith(keys[0][:16].hex())):
        content = path.read_bytes()
        first = segment_file._TABLE_START if harm == "killed before the entries" else segment_file._TABLE_START + 60
        if harm != "cannot be opened":
            path.write_bytes(content[:first].ljust(DATA_START, b"\0") + content[DATA_START:])
    if harm == "cannot be opened":
        with monkeypatch.context() as patched:
            patched.setattr(store, "open_segment", Mock(side_effect=OSError(errno.EMFILE, "too many open files")))
            assert not any(one.find(group, keys[0]) for group in GROUPS)
    assert one.forget(set(keys), [keys[0], other[0]]) == len(SIZES)
    assert len(files(tmp_path)) == len(SIZES)
    assert_holds(new_store(tmp_path), other)


def test_forget_deletes_all_copies_of_a_block(tmp_path: Path) -> None:
    """Several files hold the same block."""
    keys, more, other = keys_of("chain", 5), keys_of("more", 5), keys_of("other", 5)
    one = new_store(tmp_path)
    write_all(one, keys)
    for path in files(tmp_path):
        twin = path.with_name(path.name[:-5] + ("0" if path.name[-5] != "0" else "1") + ".run")
        twin.write_bytes(path.read_bytes())
        twin.chmod(0o600)
    write_all(one, other)
    assert one.forget(set(more), [keys[0]]) == 0
    assert one.forget({keys[3]}, [keys[0], other[0]]) == 2 * len(SIZES)
    for anyone in (one, new_store(tmp_path)):
        assert not anyone.find(0, keys[0])
        assert_holds(anyone, other)
    assert len(files(tmp_path)) == len(SIZES)


def test_touch_makes_the_start_of_a_chain_the_most_recent(tmp_path: Path) -> None:
    segments = [keys_of(number, 2) for number in range(4)]
    one = new_store(tmp_path)
    for keys in reversed(segments):
        write_all(one, keys)
    one.touch(0, [keys[0] for keys in segments])
    paths = [next(iter(one.find(0, keys[0]).values())).path for keys in segments]
    assert sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True) == paths


# -- permissions


@pytest.mark.parametrize("mask", [0, 0o022, 0o377, 0o777])
def test_folders_and_files_are_private_under_any_umask(tmp_path: Path, mask: int) -> None:
    root = tmp_path / "root"
    before = os.umask(mask)
    try:
        write_all(new_store(root), keys_of("chain", 5))
    finally:
        os.umask(before)
    modes = {path.is_dir(): stat.S_IMODE(path.stat().st_mode) for path in (root, *root.rglob("*"))}
    assert modes == {True: 0o700, False: 0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (root, *root.rglob("*"))} == {0o700, 0o600}


# -- failing disks


def write_several(disk: DiskStore) -> None:
    for name in ("one", "two"):
        keys = keys_of(name, 20)
        for start in (0, 5, 6):
            write_all(disk, keys[start : start + 10], keys[0])


@pytest.mark.parametrize(("error", "lasting"), [(errno.ENOSPC, False), (errno.ENOSPC, True), (errno.EROFS, True)])
def test_store_recovers_from_failing_writes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seed: int,
    error: int,
    lasting: bool,
) -> None:
    """Writing fails at one call, or from one call on. Each iteration starts to fail at a later call."""
    first, chance = 0, random.Random(seed)
    while True:
        first += chance.randint(1, 4)
        root, clock = tmp_path / str(first), Clock()
        root.mkdir()
        disk = DiskStore(root / "model", FINGERPRINT, SIZES, Quota(root, 1 << 30), clock)
        refusals = Refusals(first, 10**9 if lasting else first, error)
        caplog.clear()
        with monkeypatch.context() as patch:
            refusals.install(patch)
            write_several(disk)
            if refusals.calls < first:
                break
            assert disk.is_paused
            calls = refusals.calls
            write_several(disk)
            assert refusals.calls == calls  # writing is paused
            clock.now += WRITE_PAUSE
            write_several(disk)
            # new blocks, because all blocks above may be stored: a torn entry is valid if its last byte is zero
            write_all(disk, keys_of("new", 5))
            assert disk.is_paused == lasting
        for reader in (disk, new_store(root)):
            for name in ("one", "two"):
                for group in GROUPS:
                    read_back(reader, group, keys_of(name)[0])
        clock.now += WRITE_PAUSE
        write_several(disk)
        assert not disk.is_paused
        for reader in (disk, new_store(root)):
            for name in ("one", "two"):
                assert_holds(reader, keys_of(name, 16))
        assert len(caplog.records) == 1
        assert not list(root.rglob("*.tmp"))
    assert first > 20


def test_full_disk_causes_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs took the space, so the automatic limit falls."""
    disk = new_store(tmp_path, None)
    for number in range(20):
        write_all(disk, keys_of(number, 20))
    kept = sum(path.stat().st_size for path in files(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda path: _Usage(0))
    with monkeypatch.context() as patch:
        Refusals(1, 10**9, errno.ENOSPC).install(patch)
        write_all(disk, keys_of("more", 20))
    assert 0 < sum(path.stat().st_size for path in files(tmp_path)) <= kept // 2


@dataclass
class _Usage:
    free: int


# -- concurrency


def test_lookups_do_not_wait_for_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of("chain", 5)
    one = new_store(tmp_path)
    write_all(one, keys[:2], keys[0])
    found: list[set[BlockKey]] = []
    append = segment_file.append

    def slow(*arguments: object) -> None:
        looking = threading.Thread(target=lambda: found.append(read_back(one, 0, keys[0])), daemon=True)
        looking.start()
        looking.join(30)
        append(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "append", slow)
    one.write(0, keys[0], filled(keys))
    assert found == [set(keys[:2])]


@dataclass
class Workers:
    """Threads that run until the first one finishes. Raises the first problem in any of them."""

    ended: threading.Event = field(default_factory=threading.Event)
    problems: list[BaseException] = field(default_factory=list)

    def run(self, work: Callable[[], Iterator[None]], *others: Callable[[], Iterator[None]]) -> None:
        threads = [threading.Thread(target=self._work, args=(it,)) for it in others]
        for thread in threads:
            thread.start()
        self._work(work)
        self.ended.set()
        for thread in threads:
            thread.join()
        if self.problems:
            raise self.problems[0]

    def _work(self, work: Callable[[], Iterator[None]]) -> None:
        try:
            for _ in work():
                if self.ended.is_set():
                    return
        except BaseException as problem:  # noqa: BLE001 - raised by `run`
            self.problems.append(problem)
            self.ended.set()


def test_concurrent_reads_writes_and_sweeps_raise_no_error(tmp_path: Path, warnings: Warnings) -> None:
    shared, names, read, gone = new_store(tmp_path), range(12), [0], [0]

    def write() -> Iterator[None]:
        chance = random.Random(1)
        for _ in range(600):
            keys, start = keys_of(chance.choice(names)), chance.randrange(SEGMENT_BLOCKS)
            write_all(shared, keys[start : start + 8], keys[0])
            yield

    def reading(seed: int, disk: DiskStore) -> Callable[[], Iterator[None]]:
        def work() -> Iterator[None]:
            chance = random.Random(seed)
            while True:
                try:
                    read[0] += len(read_back(disk, chance.choice(GROUPS), keys_of(chance.choice(names), 1)[0]))
                except DiskMiss as miss:
                    assert isinstance(miss.__cause__, FileNotFoundError)
                yield

        return work

    def give_up() -> Iterator[None]:
        quota = Quota(tmp_path, 300_000)
        while True:
            there = len(files(tmp_path))
            quota.enforce()
            gone[0] += there > len(files(tmp_path))
            time.sleep(0.005)
            yield

    Workers().run(write, reading(4, shared), reading(5, new_store(tmp_path)), give_up)
    assert not warnings()
    assert read[0] > 1000
    assert gone[0] > 3


# -- killed processes


def test_blocks_written_before_a_kill_are_found(tmp_path: Path, kills: int, warnings: Warnings) -> None:
    """All blocks that the process reported are found, and all found blocks are right. Another store reads meanwhile."""
    chance, watcher = random.Random(0), new_store(tmp_path)
    for seed in range(kills):
        command = [sys.executable, "-m", "tests.engine.kv.disk.writer", str(seed), str(tmp_path)]
        with Started(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            said = [child.stdout.readline()]
            until = time.monotonic() + chance.random() * 0.1
            while time.monotonic() < until:
                for group in GROUPS:
                    read_back(watcher, group, keys_of(f"{seed} 0", 1)[0])
            child.kill()
            said += child.stdout.readlines()
        written = [line.split() for line in said if line.endswith("\n")]
        for segment in {int(number) for number, _ in written} | {int(written[-1][0]) + 1}:
            keys = keys_of(f"{seed} {segment}")
            done = max((int(stop) for number, stop in written if int(number) == segment), default=0)
            for disk in (watcher, new_store(tmp_path)):
                for group in GROUPS:
                    assert read_back(disk, group, keys[0]) >= set(keys[:done])
    assert not warnings()
