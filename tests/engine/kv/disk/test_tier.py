"""Blocks in files: the next engine finds them, and they never cause a wrong token."""

import queue
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.config import BLOCK_SIZE, GroupConfig, Preemption, Restore
from engine.core import Engine
from engine.kv.blocks import BlockKey
from engine.kv.disk import tier
from engine.kv.disk.quota import Quota
from engine.kv.disk.segment_file import DiskBlock
from engine.kv.disk.store import DiskStore
from engine.kv.transfers import ReadBlocks, WriteBlocks
from engine.request import PROGRAM, Origin, Request, ServiceClass, TokenEvent
from engine.sampling_params import SamplingParams
from engine.thread import EngineThread
from tests.app.server.live_server import Clock
from tests.engine.hash_run import Run
from tests.support.hash_model import HashRunner, HashTicket, LateHandle, LateTransfer, block_bytes, hash_engine

FULL = (GroupConfig(),)
KINDS = {
    "full": FULL,
    "windows": (GroupConfig(), GroupConfig(window=40)),
    "hybrid": (GroupConfig(), GroupConfig(recurrent=True)),
    "recurrent": (GroupConfig(recurrent=True),),
}
UNSTORED = Origin(stored=False)
FINGERPRINT = bytes(range(32))


@pytest.fixture
def new_store(tmp_path: Path) -> Callable[[Sequence[GroupConfig]], DiskStore]:
    """Return a function that opens a new store on the same folder, as another process would."""

    def store(groups: Sequence[GroupConfig] = FULL) -> DiskStore:
        return DiskStore(tmp_path / "model", FINGERPRINT, block_bytes(groups), Quota(tmp_path, 1 << 30))

    return store


NewStore = Callable[..., DiskStore]


def new_run(store: DiskStore, groups: tuple[GroupConfig, ...] = FULL, **options: object) -> tuple[Run, HashRunner]:
    engine, runner = hash_engine(num_blocks=200, groups=groups, store=store, **options)  # type: ignore[arg-type]
    return Run(engine), runner


def answer(run: Run, prompt: tuple[int, ...], origin: Origin = PROGRAM, *, max_tokens: int = 40) -> Request:
    """Run one request to its end, and write its blocks."""
    request = run.submit(prompt, origin, ignore_eos=True, max_tokens=max_tokens)
    run.run_out()
    run.check()
    return request


def full_blocks(tokens: int) -> int:
    return tokens // BLOCK_SIZE * BLOCK_SIZE


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.run"))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_next_engine_reads_blocks_from_files(new_store: NewStore, kind: str) -> None:
    groups = KINDS[kind]
    first = answer(new_run(new_store(groups), groups)[0], tuple(range(300)))
    run, runner = new_run(new_store(groups), groups, seed=1)
    prompt = (*first.prompt_ids, *first.output_ids, *range(1000, 1020))
    second = answer(run, prompt)
    found = full_blocks(339)
    assert (second.cache.disk, second.cache.device, second.cache.host) == (found, 0, 0)
    assert second.cache.restore_seconds > 0
    assert runner.computed_tokens == len(prompt) - found + 39
    counters = run.engine.state().counters
    assert (counters.prompts.disk, counters.prompts.cached, counters.disk_misses) == (found, found, 0)
    assert counters.disk_read_bytes > 0


def test_blocks_on_the_device_are_not_read_from_files(new_store: NewStore) -> None:
    run, _ = new_run(new_store())
    first = answer(run, tuple(range(300)))
    written = run.engine.state().counters.disk_written_bytes
    again = answer(run, first.prompt_ids)
    assert (again.cache.device, again.cache.disk) == (full_blocks(299), 0)
    counters = run.engine.state().counters
    assert written > 0
    assert counters.disk_read_bytes == 0
    assert counters.disk_written_bytes == written  # nothing was written again


def test_disk_blocks_extend_a_prefix_match_on_the_device(new_store: NewStore) -> None:
    answer(new_run(new_store())[0], tuple(range(300)))
    run, _ = new_run(new_store())
    answer(run, tuple(range(100)))
    longer = answer(run, tuple(range(300)))
    assert (longer.cache.device, longer.cache.disk) == (96, full_blocks(299) - 96)


@pytest.mark.parametrize("depth", [1, 2])
def test_other_requests_run_while_files_are_read(
    new_store: NewStore, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Another request gets one token per step, and the reader joins it when its read has ended."""
    known = answer(new_run(new_store())[0], tuple(range(300)))
    run, _ = new_run(new_store(), depth=depth)
    block_transfer = run.engine._scheduler._memory.transfers.block_transfer
    assert isinstance(block_transfer, LateTransfer)
    begin, handles = block_transfer.read, list[LateHandle]()

    def held(reads: Sequence[ReadBlocks]) -> LateHandle:
        handles.append(begin(reads))
        handles[-1].checks_left = 10**9
        return handles[-1]

    with monkeypatch.context() as patch:
        patch.setattr(block_transfer, "read", held)
        patch.setattr(block_transfer, "wait", lambda: pytest.fail("there is something to compute"))
        reader = run.submit(known.prompt_ids, ignore_eos=True, max_tokens=5)
        other = run.submit(tuple(range(500, 520)), ignore_eos=True, max_tokens=100)
        run.step()
        for count in range(1, 60):
            assert (len(run.outputs[other.id]), len(run.outputs[reader.id])) == (count, 0)
            run.step()
        [ticket] = handles
        ticket.checks_left = 0
        while reader.id not in run.finished:
            run.step()
    assert other.id not in run.finished
    run.run_out()
    run.check()
    assert reader.cache.disk == full_blocks(299)


def test_blocks_read_from_files_are_not_written_again(
    new_store: NewStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(new_run(new_store())[0], tuple(range(300)), max_tokens=1)
    before = [(path, path.stat().st_size) for path in files(tmp_path)]
    run, _ = new_run(new_store())
    block_transfer = run.engine._scheduler._memory.transfers.block_transfer
    assert isinstance(block_transfer, LateTransfer)
    monkeypatch.setattr(block_transfer, "write", None)
    answer(run, tuple(range(300)), max_tokens=1)
    assert run.engine.state().counters.disk_read_bytes > 0
    assert run.engine.state().counters.disk_written_bytes == 0
    assert [(path, path.stat().st_size) for path in files(tmp_path)] == before


def test_unstored_request_writes_no_files(new_store: NewStore, tmp_path: Path) -> None:
    answer(new_run(new_store())[0], tuple(range(300)), UNSTORED)
    assert not files(tmp_path)
    second = answer(new_run(new_store())[0], tuple(range(300)))
    assert second.cache.cached == 0


def test_blocks_of_an_unstored_request_are_written_for_a_stored_one(new_store: NewStore) -> None:
    run, _ = new_run(new_store())
    answer(run, tuple(range(200)), UNSTORED)
    shared = answer(run, (*range(200), *range(900, 1000)), max_tokens=1)
    assert shared.cache.device == 192
    again = answer(new_run(new_store())[0], shared.prompt_ids)
    assert again.cache.disk == full_blocks(299)


def test_different_salts_share_no_files(new_store: NewStore) -> None:
    answer(new_run(new_store())[0], tuple(range(300)), Origin(cache_salt="one"))
    assert answer(new_run(new_store())[0], tuple(range(300)), Origin(cache_salt="two")).cache.cached == 0
    assert answer(new_run(new_store())[0], tuple(range(300)), Origin(cache_salt="one")).cache.disk == full_blocks(299)


def test_all_branches_of_a_chain_are_found(new_store: NewStore) -> None:
    run, _ = new_run(new_store())
    trunk = tuple(range(500))
    ends = [tuple(range(first, first + 600)) for first in (1000, 2000, 3000)]
    for end in ends:
        answer(run, trunk + end, max_tokens=1)
    for end in ends:
        assert answer(new_run(new_store())[0], trunk + end).cache.disk == full_blocks(1099)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_file_deleted_after_lookup_is_a_miss(new_store: NewStore, tmp_path: Path, kind: str) -> None:
    """The files are deleted between the lookup and the read."""
    groups = KINDS[kind]
    answer(new_run(new_store(groups), groups)[0], tuple(range(300)))
    store = new_store(groups)
    run, runner = new_run(store, groups)
    request = run.submit(tuple(range(300)), ignore_eos=True, max_tokens=5)
    found = run.engine._scheduler._memory.match(request, 18)
    assert found
    assert any(found.disk_blocks)
    for path in files(tmp_path):
        path.unlink()
    run.run_out()
    run.check()
    assert request.cache.cached == 0
    assert runner.computed_tokens == 304
    counters = run.engine.state().counters
    assert (counters.disk_misses, counters.prompt_tokens, counters.prompts.cached) == (1, 300, 0)


def test_equal_key_with_other_tokens_in_files_is_a_miss(new_store: NewStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are written with other tokens for the same keys."""
    write = DiskStore.write

    def write_others(store: DiskStore, group: int, first_key: BlockKey, blocks: Sequence[Any]) -> int:
        return write(store, group, first_key, [(key, (7,) * BLOCK_SIZE, data) for key, _, data in blocks])

    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "write", write_others)
        answer(new_run(new_store())[0], tuple(range(300)))
    assert answer(new_run(new_store())[0], tuple(range(300)), max_tokens=1).cache.cached == 0


def test_forgotten_blocks_are_in_no_tier(new_store: NewStore, tmp_path: Path) -> None:
    run, _ = new_run(new_store())
    first = answer(run, tuple(range(3000)), max_tokens=1)
    other = answer(run, (*range(100), *range(4000, 4100)), max_tokens=1)
    run.engine.forget(first.prompt_ids, kept=100)
    for engine in (run, new_run(new_store())[0]):
        assert answer(engine, other.prompt_ids, max_tokens=1).cache.cached <= full_blocks(199)
        assert answer(engine, first.prompt_ids, UNSTORED, max_tokens=1).cache.cached <= 96
        engine.engine.forget(first.prompt_ids, kept=100)
    kept = answer(run, (*range(100), *range(4000, 4100)), max_tokens=1)
    assert kept.cache.device == full_blocks(199)


@pytest.mark.share(2, "kind")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_random_restarts_give_no_wrong_token(new_store: NewStore, kind: str, seed: int) -> None:
    """Engines with small pools, all classes, swaps, and failing copies are abandoned at random moments, and new ones
    start.
    """
    chance, groups = random.Random(seed), KINDS[kind]
    stems = [tuple(chance.randrange(5000) for _ in range(chance.randrange(20, 400))) for _ in range(4)]
    from_files = 0
    for number in range(6):
        engine, _ = hash_engine(
            seed=10 * seed + number,
            num_blocks=chance.choice((40, 80)),
            depth=chance.choice((1, 2)),
            host_blocks=chance.choice((0, 20)),
            preemption=chance.choice(list(Preemption)),
            failing_moves=0.05,
            groups=groups,
            store=new_store(groups),
        )
        run = Run(engine)
        for _ in range(12):
            stem = chance.choice(stems)
            prompt = (*stem[: chance.randrange(1, len(stem))], *(chance.randrange(5000) for _ in range(10)))
            origin = Origin(chance.choice(list(ServiceClass)), stored=chance.random() < 0.8)
            run.submit(prompt, origin, chance.choice((1, 1, 3)), max_tokens=chance.randrange(1, 60))
            for _ in range(chance.randrange(8)):
                run.step()
        if number % 2:
            run.run_out()
            run.check()
        from_files += engine.state().counters.prompts.disk
    assert from_files > 0


def test_writes_continue_without_requests(new_store: NewStore) -> None:
    run, _ = new_run(new_store())
    run.submit(tuple(range(3000)), max_tokens=1)
    while run.engine.has_requests:
        run.step()
    assert run.engine.has_work
    while run.engine.has_work:
        assert not run.engine.step()
    run.engine.assert_empty()
    assert answer(new_run(new_store())[0], tuple(range(3000)), max_tokens=1).cache.disk == full_blocks(2999)


def test_engine_has_work_until_all_blocks_are_written(new_store: NewStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has work during every disk lookup, because another thread may read `has_work` then."""
    store = new_store()
    run, _ = new_run(store)
    run.submit(tuple(range(3000)), max_tokens=1)
    while run.engine.has_requests:
        run.step()
    find, looks = store.find, []

    def watched(group: int, first_key: BlockKey) -> Mapping[BlockKey, DiskBlock]:
        looks.append(run.engine.has_work)
        return find(group, first_key)

    monkeypatch.setattr(store, "find", watched)
    run.run_out()
    assert set(looks) == {True}


def test_writes_during_steps_are_batched(new_store: NewStore) -> None:
    clock = Clock()
    engine, _ = hash_engine(num_blocks=200, store=new_store(), write_delay=0.5, clock=clock)
    run = Run(engine)
    run.submit(tuple(range(100)), ignore_eos=True, max_tokens=500)
    written = engine.state().counters
    for _ in range(60):
        run.step()
    assert engine.state().counters.disk_written_bytes == written.disk_written_bytes == 0
    clock.seconds += 0.5
    for _ in range(20):
        run.step()
    assert engine.state().counters.disk_written_bytes >= 8 * block_bytes(FULL)[0]
    before = engine.state().counters.disk_written_bytes
    run.step()
    run.run_out()  # without requests, writes are not delayed
    assert engine.state().counters.disk_written_bytes > before


def test_large_states_do_not_make_writes_of_small_blocks_smaller(
    new_store: NewStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "WRITE_BATCH_BYTES", 1 << 16)
    groups = (GroupConfig(block_bytes=1 << 12), GroupConfig(recurrent=True, block_bytes=1 << 20))
    run, _ = new_run(new_store(groups), groups)
    block_transfer = run.engine._scheduler._memory.transfers.block_transfer
    assert isinstance(block_transfer, LateTransfer)
    begin, sizes = block_transfer.write, list[int]()

    def write(due: WriteBlocks) -> LateHandle:
        sizes.append(len(due.blocks) if due.group == 0 else 0)
        return begin(due)

    monkeypatch.setattr(block_transfer, "write", write)
    answer(run, tuple(range(800)))
    assert max(sizes) == 16


@contextmanager
def thread_of(engine: Engine[HashTicket]) -> Iterator[Callable[[tuple[int, ...]], None]]:
    """Run an engine's thread, and yield a function that prefills a prompt on it."""
    ends: queue.SimpleQueue[int] = queue.SimpleQueue()

    def deliver(events: Sequence[TokenEvent]) -> None:
        for event in events:
            if event.finish is not None:
                ends.put(event.request_id)

    thread = EngineThread(engine, deliver)
    thread.start()

    def read(prompt: tuple[int, ...]) -> None:
        thread.submit(prompt, [SamplingParams(max_tokens=1)], frozenset(), before=lambda request: None)
        ends.get()

    yield read
    thread.stop()


def test_idle_thread_writes_dirty_blocks(new_store: NewStore) -> None:
    engine = new_run(new_store())[0].engine
    prompt = tuple(range(3000))
    with thread_of(engine) as read:
        read(prompt)
        while engine.has_work:
            time.sleep(0.001)
        assert answer(new_run(new_store())[0], prompt, max_tokens=1).cache.disk == full_blocks(2999)


def test_stopping_thread_writes_dirty_blocks(new_store: NewStore) -> None:
    prompt = tuple(range(3000))
    with thread_of(new_run(new_store())[0].engine) as read:
        read(prompt)
    assert answer(new_run(new_store())[0], prompt, max_tokens=1).cache.disk == full_blocks(2999)


def test_slow_files_are_skipped_and_retried_later(new_store: NewStore) -> None:
    """Each skip raises the assumed read rate until the engine tries to read again."""
    answer(new_run(new_store())[0], tuple(range(600)), max_tokens=1)
    engine, runner = hash_engine(num_blocks=200, store=new_store(), restore=Restore.AUTO)
    run = Run(engine)
    costs = engine._scheduler.costs
    costs.steps.fixed, costs.steps.per_token, costs.read_rate = 1e-9, 1e-6, 1e3
    skipped = answer(run, tuple(range(600)), max_tokens=1)
    assert (skipped.cache.cached, skipped.cache.skipped) == (0, full_blocks(599))
    assert runner.computed_tokens == 600
    assert costs.read_rate > 1e3
    other = Run(hash_engine(num_blocks=200, store=new_store(), restore=Restore.AUTO)[0])
    assert answer(other, tuple(range(600)), max_tokens=1).cache.disk == full_blocks(599)
