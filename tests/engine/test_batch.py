from dataclasses import replace

import pytest

from engine.batch import build_batch
from engine.config import BLOCK_SIZE, GroupConfig
from engine.sampling_params import SamplingParams
from engine.step import BlockCopy, StepPlan
from tests.support.held_request import HeldRequest


def plan(*parts: tuple[list[int], list[int], int, int]) -> StepPlan:
    """Return a plan with parts given as (prompt, block table, tokens computed before, tokens in this step)."""
    return StepPlan(
        tuple(
            HeldRequest(n, tuple(ids), SamplingParams(), num_computed=done, block_tables=(table,)).next_part(count)
            for n, (ids, table, done, count) in enumerate(parts)
        )
    )


def test_batch_concatenates_the_tokens_of_all_requests() -> None:
    batch = build_batch(
        plan((list(range(40)), [7, 3, 9], 14, 5), ([50, 51], [4], 0, 2), ([60, 61, 62], [5], 0, 1)),
        vocab_size=100,
        num_blocks=10,
    )
    assert batch.token_ids == [14, 15, 16, 17, 18, 50, 51, 60]
    assert batch.positions == [14, 15, 16, 17, 18, 0, 1, 0]
    b = BLOCK_SIZE
    assert batch.slot_mappings[0] == [
        7 * b + 14,
        7 * b + 15,
        3 * b,
        3 * b + 1,
        3 * b + 2,
        4 * b,
        4 * b + 1,
        5 * b,
    ]
    assert batch.block_tables[0] == [[7, 3, 9], [4], [5]]
    assert batch.query_starts == [0, 5, 7, 8]
    assert batch.context_lengths == [19, 2, 1]
    assert batch.logit_rows == [6]


@pytest.mark.parametrize(
    ("ids", "table", "tokens", "message"),
    [
        ([1, 100], [1], 2, "vocabulary"),
        ([1, -1], [1], 2, "vocabulary"),
        ([1], [10], 1, "pool"),
        ([1], [0], 1, "pool"),
        ([1], [-1], 1, "pool"),
        ([1] * 17, [1], 17, "needs 2 blocks"),
    ],
)
def test_out_of_range_indices_raise(ids: list[int], table: list[int], tokens: int, message: str) -> None:
    with pytest.raises(IndexError, match=message):
        build_batch(plan((ids, table, 0, tokens)), vocab_size=100, num_blocks=10)


@pytest.mark.parametrize(("source", "target"), [(-1, 1), (10, 1), (1, 0), (1, -1), (1, 10)])
def test_states_outside_of_the_pool_raise(source: int, target: int) -> None:
    def built(copy: BlockCopy) -> list[list[int]]:
        [part] = plan(([1], [1], 0, 1)).scheduled
        step = StepPlan((replace(part, copies=(copy,)),))
        batch = build_batch(step, vocab_size=100, num_blocks=10, groups=[GroupConfig(recurrent=True)])
        return [list(states) for states in batch.block_tables[0]]

    assert built(BlockCopy(0, 0, 9)) == [[0, 9]]
    with pytest.raises(IndexError, match="a state of request 0 is not in the pool of 10"):
        built(BlockCopy(0, source, target))
