"""Unused memory in allocated blocks: half a block per request, and no more."""

import random

import pytest

from engine.config import BLOCK_SIZE
from tests.engine.hash_run import Run
from tests.support.hash_model import hash_engine

HALF_A_BLOCK = (BLOCK_SIZE - 1) / 2


@pytest.mark.parametrize(("shortest", "longest", "reply"), [(1, 120, 60), (150, 600, 200)])
def test_waste_is_half_a_block_per_request(shortest: int, longest: int, reply: int) -> None:
    rng = random.Random(longest)
    engine, _ = hash_engine(num_blocks=2000, running=24, budget=512)
    run = Run(engine)
    allocated = used = holders = 0
    for _ in range(60):
        prompt = tuple(rng.randrange(5000) for _ in range(rng.randrange(shortest, longest)))
        run.submit(prompt, max_tokens=rng.randrange(1, reply), ignore_eos=True)
    while engine.has_work:
        run.step()
        running = engine._scheduler._requests.running.values()
        pool = engine._scheduler._memory.groups[0].pool
        allocated += BLOCK_SIZE * (pool.num_usable - pool.num_free)
        used += sum(request.num_scheduled for request in running)
        holders += len(running)
    waste, theory = 1 - used / allocated, HALF_A_BLOCK * holders / allocated
    assert abs(waste - theory) < 0.005
    if shortest >= 150:  # chats typically have at least this length
        assert waste < 0.04
    run.check()
