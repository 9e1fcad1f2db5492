"""The sizes of CUDA graphs, and the batches that fit them."""

import pytest

from engine.backends.cuda.graph_sizes import GraphSize, GraphSizes
from engine.batch import Batch

LARGEST = GraphSize(128, 32768)


def batch_of(counts: list[int], context: int = 100, rows: int | None = None) -> Batch:
    starts = [sum(counts[:number]) for number in range(len(counts) + 1)]
    tokens = [0] * starts[-1]
    return Batch(tokens, tokens, (), (), starts, [context] * len(counts), range(starts[-1] if rows is None else rows))


def test_number_of_graphs_stays_small() -> None:
    """Each graph takes memory and time at load: 11 sizes of one token for 4 contexts, and 9 of several for 2."""
    sizes = GraphSizes(LARGEST).largest_first
    assert len(sizes) == 11 * 4 + 9 * 2
    assert max(size.tokens for size in sizes) == 128
    assert [size.tokens for size in sizes] == sorted((size.tokens for size in sizes), reverse=True)


@pytest.mark.parametrize(
    ("counts", "requests", "queries"),
    [
        ([1], 1, 1), ([1] * 3, 4, 1), ([1] * 16, 16, 1), ([1] * 100, 128, 1),
        ([2], 1, 2), ([3], 1, 4), ([5], 1, 8), ([8], 1, 8),
        ([4, 1], 2, 4), ([1, 8], 2, 8), ([2] * 8, 8, 2), ([3, 1, 1], 4, 4),
    ],
)  # fmt: skip
def test_batch_runs_in_the_smallest_size_that_it_fits(counts: list[int], requests: int, queries: int) -> None:
    assert GraphSizes(LARGEST).fitting(batch_of(counts)) == GraphSize(requests, 1024, queries)
    assert GraphSizes(LARGEST).fitting(batch_of(counts, 1025)) == GraphSize(
        requests, 4096 if queries == 1 else 32768, queries
    )


@pytest.mark.parametrize("counts", [[9], [8, 8, 8], [3] * 5, [2] * 9, [1] * 129, [100, 1]])
def test_larger_batches_have_no_graph(counts: list[int]) -> None:
    assert GraphSizes(LARGEST).fitting(batch_of(counts)) is None


def test_several_tokens_may_have_fewer_logit_rows() -> None:
    """A grammar forces tokens from which nothing is sampled. With one token each, all logits are computed."""
    assert GraphSizes(LARGEST).fitting(batch_of([4], rows=1)) == GraphSize(1, 1024, 4)
    assert GraphSizes(LARGEST).fitting(batch_of([1, 1], rows=1)) is None


@pytest.mark.parametrize("requests", [1, 2, 3, 8])
def test_no_size_exceeds_the_largest_step(requests: int) -> None:
    for size in GraphSizes(GraphSize(requests, 64)).largest_first:
        assert size.tokens <= requests
        assert size.rows <= requests
