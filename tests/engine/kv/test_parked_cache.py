"""Parked caches: an engine of the same model continues with what an earlier one has computed."""

import gc
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import BLOCK_SIZE, GroupConfig
from engine.core import Engine
from engine.kv.blocks import BlockKey, BlockPool
from engine.kv.cache import KVCache, KVGroup, LayerBlock
from engine.kv.parked_cache import ParkedCache, ParkedCopies
from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from engine.mixer_config import CacheConfig
from engine.request import Origin
from engine.sampling_params import SamplingParams
from tests.engine.hash_run import Run
from tests.engine.models.tiny_llama import MIXES, make
from tests.engine.test_hash_model import GROUPS
from tests.support.hash_model import hash_engine

PROMPT = tuple(number % 90 for number in range(3, 203))
UNSTORED = Origin(stored=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tiny"), head_dim=32, hidden=128, mlp=128, types=MIXES["Q4_0"]).path


@pytest.fixture(params=["reference", "cpu"])
def options(request: pytest.FixtureRequest, cpu_kernels: Path) -> LoadOptions:
    return LoadOptions(request.param, context_length=400, threads=1, code_cache=cpu_kernels, fingerprint="1")


def load(path: Path, options: LoadOptions, parked: ParkedCache | None = None) -> Engine[Any]:
    with open_checkpoint(path) as checkpoint:
        return load_engine(checkpoint, options, parked=parked)


def answer(engine: Engine[Any], prompt: tuple[int, ...] = PROMPT) -> list[int]:
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    request = engine.request(prompt, params, frozenset(), UNSTORED)
    engine.add(request)
    while engine.has_work:
        engine.step()
    return request.output_ids


def computed(engine: Engine[Any]) -> int:
    return engine.state().counters.computed_tokens


def test_next_engine_computes_only_what_is_absent(tiny: Path, options: LoadOptions) -> None:
    """The prompt of the second turn contains the first reply. The third turn takes it from a cache parked twice."""
    engine = load(tiny, options)
    prompt = (*PROMPT, *answer(engine), 7, 8, 9)
    for _ in range(2):
        parked = engine.park()
        assert parked is not None
        assert parked.num_bytes > 0
        engine = load(tiny, options, parked)
        assert parked.num_bytes == 0
        reply = answer(engine, prompt)
        assert computed(engine) <= 3 + BLOCK_SIZE + len(reply)
        alone = load(tiny, options)
        assert answer(alone, prompt) == reply
        assert computed(alone) > len(PROMPT)
        alone.close()
        engine._scheduler._memory.check_pools()
        prompt = (*prompt, *reply, 1, 2, 3)
    engine.close()


@pytest.mark.parametrize("change", [{"fingerprint": "2"}, {"context_length": 512}, {"fingerprint": ""}])
def test_cache_of_another_model_or_a_shorter_context_is_ignored(
    tiny: Path, options: LoadOptions, change: dict[str, Any]
) -> None:
    engine = load(tiny, options)
    expected = answer(engine)
    parked = engine.park()
    assert parked is not None
    other = load(tiny, replace(options, **change), parked)
    assert answer(other) == expected
    assert computed(other) >= len(PROMPT)
    assert parked.num_bytes > 0
    other.close()


def test_cache_of_another_kv_type_is_ignored(tiny: Path, cpu_kernels: Path) -> None:
    options = LoadOptions("cpu", context_length=400, threads=1, code_cache=cpu_kernels, fingerprint="1")
    engine = load(tiny, options)
    answer(engine)
    other = load(tiny, replace(options, kv_type="int8"), engine.park())
    answer(other)
    assert computed(other) >= len(PROMPT)
    other.close()


def test_blank_blocks_take_no_memory_and_read_as_zeros(tiny: Path, options: LoadOptions) -> None:
    engine = load(tiny, options)
    answer(engine)
    kv = engine._runner._model.kv  # type: ignore[attr-defined]
    (pool,), (index,) = kv.pools, engine._scheduler.device_pools
    kept = {block: pool[block].clone() for block in index.in_eviction_order()}
    blank = [block for block in range(1, len(pool)) if block not in kept]
    pool[blank] = 1
    parked = engine.park()
    assert parked is not None
    assert parked.num_bytes == len(kept) * kv.block_bytes[0]
    assert all((pool[block] == content).all() for block, content in kept.items())
    inner = [block for block in blank if {block - 1, block + 1} < {*blank}]
    assert inner
    assert (pool[inner] == 0).all()


def test_parked_cache_is_freed_without_the_garbage_collector(tiny: Path, options: LoadOptions) -> None:
    engine = load(tiny, options)
    answer(engine)
    pool = weakref.ref(engine._runner._model.kv.pools[0])  # type: ignore[attr-defined]
    gc.disable()
    parked = engine.park()
    assert pool() is not None
    del parked, engine
    assert pool() is None
    gc.enable()


def test_empty_and_unparkable_caches_are_closed(tiny: Path, options: LoadOptions) -> None:
    assert load(tiny, options).park() is None
    engine, _ = hash_engine()
    answer(engine)
    assert engine.park() is None
    assert engine.park() is None


def cached(pool: BlockPool, numbers: Iterable[int], content: Tensor) -> None:
    """Cache a block for each of the numbers in a pool, the last one as the most recently used."""
    for number in numbers:
        (block,) = pool.allocate(1)
        content[block] = number
        pool.publish(block, *named(number))
        pool.release([block])


def named(number: int) -> tuple[BlockKey, tuple[int, ...]]:
    return BlockKey(str(number).encode()), (number,) * BLOCK_SIZE


@pytest.mark.parametrize("room", [3, 7, 20])
@pytest.mark.parametrize("host_size", [4, 9, 20])
def test_copies_are_those_of_the_blocks_that_were_used_last(host_size: int, room: int) -> None:
    """The device caches blocks 10 to 17, and the host pool blocks 1 to 12 as far as they fit."""
    group = KVGroup((0,), CacheConfig(1, 2), LayerBlock((1, 2), torch.float32))
    kv, device, host = KVCache([group], [9], [host_size]), BlockPool(9), BlockPool(host_size)
    cached(host, range(1, 13), kv.host_pools[0])
    cached(device, range(10, 18), kv.pools[0])
    parked = ParkedCopies(("salt",), kv, [device], [host])
    assert parked.num_bytes == group.block_bytes * host.num_cached
    host.check_consistency()
    by_last_use = [*range(17, 9, -1), *range(9, 0, -1)]
    kept = set(by_last_use[: host_size - 1])
    assert {number for number in range(18) if host.find(*named(number))} == kept
    other = KVCache([group], [room])
    (index,) = parked.take_index(other)
    index.check_consistency()
    found = {number: index.find(*named(number)) for number in by_last_use if index.find(*named(number))}
    assert list(found) == by_last_use[: min(room, host_size) - 1]
    assert all((other.pools[0][block] == number).all() for number, block in found.items())
    assert parked.num_bytes == 0
    assert list(index.in_eviction_order()) == [found[number] for number in reversed(list(found))]


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_adopted_index_finds_the_right_blocks_of_every_group(groups: tuple[GroupConfig, ...]) -> None:
    """The next token of the hash model depends on each block, so a wrong one would change the output."""
    first, runner = hash_engine(groups=groups)
    run = Run(first)
    requests = [run.submit((*PROMPT[:100], number), max_tokens=30, ignore_eos=True) for number in range(3)]
    run.run_out()
    first.close()
    second, next_runner = hash_engine(groups=groups)
    next_runner.pools = runner.pools
    second.adopt(first._scheduler.device_pools)
    again = Run(second)
    for request in requests:
        again.submit((*request.prompt_ids, *request.output_ids, 1, 2), max_tokens=10, ignore_eos=True)
    again.run_out()
    again.check()
    assert computed(second) < 3 * len(requests[0].prompt_ids)
