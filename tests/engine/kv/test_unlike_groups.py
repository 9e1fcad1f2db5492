"""KV groups whose blocks differ in size by a factor of 65,536, in all tiers.

The full run is `pytest tests/engine/kv/test_unlike_groups.py --requests 100000`.
"""

import random
from pathlib import Path

import pytest

from engine.config import BLOCK_SIZE, CHECKPOINT_TOKENS, GroupConfig, Preemption
from engine.kv.budget import with_host_pools
from engine.kv.disk.quota import Quota
from engine.kv.disk.store import DiskStore
from engine.request import Origin, ServiceClass
from tests.engine.hash_run import Run
from tests.engine.test_hash_model import Load
from tests.support.hash_model import block_bytes, hash_engine

MIB = 1 << 20
GROUPS = (
    GroupConfig(block_bytes=3 << 10),
    GroupConfig(window=24, block_bytes=16),
    GroupConfig(recurrent=True, block_bytes=MIB),
)


@pytest.mark.share(2, "preemption")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", Preemption)
def test_random_load_with_restarts_gives_no_wrong_token(
    preemption: Preemption, depth: int, requests: int, tmp_path: Path
) -> None:
    """Most requests are stored in files, of which the quota holds few, because their states are large."""
    rng = random.Random(f"{preemption} {depth}")
    load, left, tiers = Load(rng), requests // 6, set[str]()
    while left > 0:
        run = _engine(rng, preemption, depth, tmp_path)
        for _ in range(min(left, 150)):
            origin = Origin(rng.choice(list(ServiceClass)), stored=rng.random() < 0.8)
            run.submit(load.prompt(), origin, max_tokens=rng.randrange(1, 40), ignore_eos=rng.random() < 0.8)
            for _ in range(rng.choice([0, 1, 2, 5])):
                run.step()
            if rng.random() < 0.1:
                run.abort(rng.randrange(1, len(run.requests) + 1))
        left -= 150
        run.run_out()
        run.check()
        found = run.engine.state().counters.prompts
        tiers |= {name for name in ("device", "host", "disk") if getattr(found, name)}
    assert tiers >= {"device", "disk"}
    assert ("host" in tiers) or preemption is Preemption.RECOMPUTE


def _engine(rng: random.Random, preemption: Preemption, depth: int, folder: Path) -> Run:
    """Return an engine with small pools, which finds the files of the engine before it."""
    groups = with_host_pools(GROUPS, 6 * MIB)
    store = DiskStore(folder / "model", bytes(32), block_bytes(groups), Quota(folder, 64 * MIB))
    engine, _ = hash_engine(
        seed=rng.randrange(1 << 30), num_blocks=26, depth=depth, budget=48, groups=groups, preemption=preemption,
        failing_moves=0.05, store=store,
    )  # fmt: skip
    return Run(engine)


def test_host_pools_hold_about_as_many_tokens_in_every_group() -> None:
    groups = with_host_pools(GROUPS, 64 * MIB)
    tokens = [(group.host_blocks - 1) * group.block_tokens for group in groups]
    assert tokens[0] == tokens[1]
    assert 0 <= tokens[0] - tokens[2] < CHECKPOINT_TOKENS
    size = sum((group.host_blocks - 1) * group.block_bytes for group in groups)
    assert 63 * MIB < size <= 64 * MIB


def test_host_pools_have_a_block_for_each_group_in_any_memory() -> None:
    assert [group.host_blocks for group in with_host_pools(GROUPS, BLOCK_SIZE)] == [2, 2, 2]
