"""A captured step of several tokens per request has the logits and the cache of the same step without a graph."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.cuda.device import CudaDevice, CudaOptions
from engine.backends.cuda.graph_sizes import GraphSize
from engine.backends.cuda.step import CudaStep
from engine.batch import Batch
from engine.kernels.sampling import sample
from engine.kernels.sampling_rows import SampleTarget, build_draws, build_rows
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.engine.backends.cuda.two_devices import Loaded, gpu, load, tokens
from tests.engine.models.family_checkpoints import make
from tests.support.held_request import HeldRequest

CACHED = 17  # tokens of each request before the step
# one family for each kind of layer that reads more of a batch than its tokens
FAMILIES = ("llama", "mistral window", "mixtral moe", "gemma4", "lfm2", "qwen3.5")


def cached_request(loaded: Loaded, count: int, *blocks: int) -> HeldRequest:
    """Return a request with CACHED computed tokens, and `count` more."""
    ids = tuple(tokens(CACHED + count, loaded.vocab_size))
    request = HeldRequest(1, ids, SamplingParams(), block_tables=tuple(list(blocks) for _ in loaded.groups))
    loaded.step((request, CACHED))
    request.num_computed = CACHED
    return request


def verification(loaded: Loaded, counts: list[int]) -> Batch:
    """Return a batch of requests with these numbers of tokens, each of which has logits. They are in the cache so far.

    As the scheduler plans it, a step reads one state and writes another.
    """
    parts = [(cached_request(loaded, count, 2 * it + 1, 2 * it + 2), count) for it, count in enumerate(counts)]
    batch = loaded.batch(*parts)
    tables = tuple(
        [[2 * it + 1, 2 * it + 2] for it in range(len(counts))] if group.recurrent else tables
        for group, tables in zip(loaded.groups, batch.block_tables, strict=True)
    )
    return Batch(
        batch.token_ids,
        batch.positions,
        batch.slot_mappings,
        tables,
        batch.query_starts,
        batch.context_lengths,
        range(len(batch.token_ids)),
    )


def result(step: CudaStep, batch: Batch, before: list[Tensor], *, captured: bool) -> tuple[Tensor, list[Tensor]]:
    """Run a step on the pools `before`. Returns its logits, and the bytes of all blocks but the null block."""
    for pool, content in zip(step.kv.pools, before, strict=True):
        pool.copy_(content)
    logits = step.launch(batch, kept=not captured).values.clone().cpu()
    return logits, [pool[1:].clone().view(torch.uint8).cpu() for pool in step.kv.pools]


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("counts", "requests", "queries"), [([2], 1, 2), ([4], 1, 4), ([1, 3], 2, 4), ([2, 1, 2], 4, 2), ([5], 1, 8)]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_captured_step_equals_the_step_without_a_graph(
    tmp_path: Path, name: str, counts: list[int], requests: int, queries: int, device: torch.device
) -> None:
    """With `deterministic`, neither padding nor the size changes any bit."""
    loaded = load(make(tmp_path, name, "folder").path, CudaDevice(gpu(device), CudaOptions(deterministic=True)))
    step = loaded.model.compute
    assert isinstance(step, CudaStep)
    batch = verification(loaded, counts)
    assert step._graphs.fitting_size(batch) == GraphSize(requests, 64, queries)
    before = [pool.clone() for pool in step.kv.pools]
    logits, blocks = result(step, batch, before, captured=True)
    wanted_logits, wanted_blocks = result(step, batch, before, captured=False)
    assert step.captures == 1
    assert step.failed_captures == 0
    assert torch.equal(logits, wanted_logits)
    assert not torch.isnan(logits).any()
    for found, wanted in zip(blocks, wanted_blocks, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [3, 1]])
def test_captured_step_draws_the_tokens_that_are_sampled_after_a_step_without_a_graph(
    tmp_path: Path, counts: list[int], device: torch.device
) -> None:
    loaded = load(make(tmp_path, "llama", "folder").path, CudaDevice(gpu(device), CudaOptions(deterministic=True)))
    step, vocabulary = loaded.model.compute, loaded.vocab_size
    assert isinstance(step, CudaStep)
    batch = verification(loaded, counts)
    for seed in range(8):
        params = [
            SamplingParams(temperature=0.0 if (seed + row) % 4 == 0 else 1.5, top_k=row * 5, top_p=0.9, seed=seed)
            for row in range(sum(counts))
        ]
        targets = [SampleTarget(row, Request(row, (0,), it), seed) for row, it in enumerate(params)]
        drawn = step.launch(batch, draws=build_draws(targets, vocabulary))
        found = drawn.tokens.tolist()
        wanted = sample(step.launch(batch, kept=True), build_rows(targets, vocabulary).to(step.gpu.device))
        assert drawn.is_drawn
        assert found == wanted.columns.token_ids.tolist()
    greedy = step.launch(batch)
    assert greedy.tokens.tolist() == greedy.values.argmax(1).tolist()
    assert step.captures == 1


def test_logits_are_in_the_order_of_the_logit_rows(tmp_path: Path, device: torch.device) -> None:
    """A grammar forces tokens from which nothing is sampled, so that the step needs only some rows."""
    loaded = load(make(tmp_path, "llama", "folder").path, CudaDevice(gpu(device), CudaOptions(deterministic=True)))
    step = loaded.model.compute
    assert isinstance(step, CudaStep)
    batch = verification(loaded, [3, 1])
    every = step.launch(batch).values.clone()
    some = Batch(
        batch.token_ids,
        batch.positions,
        batch.slot_mappings,
        batch.block_tables,
        batch.query_starts,
        batch.context_lengths,
        [1, 3],
    )
    assert torch.equal(step.launch(some).values, every[[1, 3]])
    assert step.captures == 1
