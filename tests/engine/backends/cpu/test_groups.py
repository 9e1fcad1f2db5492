"""Layers of several KV groups in one program. Each group has its own slots, block tables, and window."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.reference import ReferenceOperations
from engine.batch import Batch
from engine.config import BLOCK_SIZE, GroupConfig
from engine.kv.blocks import NULL_BLOCK
from engine.kv.cache import KVCache
from engine.model_config import RopeConfig
from engine.operations import Attention, Operations
from engine.rope import rotary_table
from tests.engine.backends.cpu.recorded import Recorded, advance, compute, plain, record, sequence, spoil
from tests.support.held_request import HeldRequest
from tests.support.kv_groups import kv_group

SEED = 21
CONTEXT = 180
BLOCKS = 64
WINDOWS = (None, 20, 140)
GROUPS = tuple(map(GroupConfig, WINDOWS))
SHAPES = [((2,), 1, 32), ((0, 3), 2, 32), ((1,), 1, 64)]  # layers, KV heads, head dimension
LAYERS = [kv_group(*it) for it in SHAPES]
WIDTH = 64

pytestmark = pytest.mark.usefixtures("plain_layouts")

_made = torch.Generator().manual_seed(SEED)
ROWS = torch.randn(2 * CONTEXT, WIDTH, generator=_made)
# for each layer, weights to q, k, and v, and from the attention output; two query heads share a KV head
WEIGHTS = {
    layer: (
        torch.randn(4 * kv_heads * head_dim, WIDTH, generator=_made) / 8,
        torch.randn(WIDTH, 2 * kv_heads * head_dim, generator=_made) / 30,
    )
    for layers, kv_heads, head_dim in SHAPES
    for layer in layers
}
ATTENTIONS = {
    layer: Attention(0.05, rotary_table(RopeConfig(1e4, head_dim, interleaved=False), None, 320), window=window)
    for (layers, _, head_dim), window in zip(SHAPES, WINDOWS, strict=True)
    for layer in layers
}


def layers(ops: Operations, batch: Batch, kv: KVCache) -> Any:
    """Run all layers in order."""
    x = ops.embed(batch, ops.weights.linear([plain(ROWS)]))
    for layer, attention in sorted(ATTENTIONS.items()):
        into, back = (ops.weights.linear([plain(weight)]) for weight in WEIGHTS[layer])
        q = ops.rope_and_store(ops.linear(x, into), batch, kv.layer(layer), attention)
        x = ops.linear(ops.attend(q, batch, kv.layer(layer), attention), back, x)
    return x


def tables(rng: random.Random) -> list[list[int]]:
    """Return scattered blocks for one request, different ones in each group."""
    return [rng.sample(range(2, BLOCKS - 1), -(-CONTEXT // BLOCK_SIZE)) for _ in GROUPS]


def release(request: HeldRequest, pools: tuple[Tensor, ...]) -> None:
    """Release the blocks that the next token does not see, and fill them with NaN."""
    for window, table, pool in zip(WINDOWS, request.block_tables, pools, strict=True):
        first = 0 if window is None else max(0, request.num_computed + 1 - window)
        for index in range(first // BLOCK_SIZE):
            if table[index] != NULL_BLOCK:
                spoil(pool[table[index]])
                table[index] = NULL_BLOCK


def batches(it: Recorded, requests: list[HeldRequest], rng: random.Random) -> Iterator[Batch]:
    """Yield batches with chunks of random size. Blocks are released after each."""
    while left := [request for request in requests if request.num_computed < CONTEXT]:
        chosen = rng.sample(left, rng.randint(1, len(left)))
        parts = [(at, min(rng.choice([1, 1, 2, 7, 8, 9, 19]), CONTEXT - at.num_computed)) for at in chosen]
        yield advance(parts, vocab_size=len(ROWS), num_blocks=BLOCKS, groups=GROUPS)
        for request in chosen:
            release(request, it.kv.pools)


def plain_answer(ids: range) -> Tensor:
    """Return the output of the reference kernels in one step."""
    kv = KVCache(LAYERS, [BLOCKS] * len(LAYERS))
    request = sequence(0, ids, *tables(random.Random(SEED)))
    batch = advance([(request, CONTEXT)], vocab_size=len(ROWS), num_blocks=BLOCKS, groups=GROUPS)
    answer: Tensor = layers(ReferenceOperations(keep_dequantized=True), batch, kv)
    return answer


@pytest.mark.parametrize("kv_type", [torch.float16, torch.int8])
def test_each_kv_group_uses_its_own_slots_and_tables(cpu_kernels: Path, kv_type: torch.dtype) -> None:
    it = record(cpu_kernels, layers, groups=LAYERS, num_blocks=BLOCKS, kv_type=kv_type)
    rng, out, singles = random.Random(SEED), dict[int, Tensor](), dict[int, Tensor]()
    alone = sequence(1, range(CONTEXT), *tables(rng))
    for _ in range(CONTEXT):
        batch = advance([(alone, 1)], vocab_size=len(ROWS), num_blocks=BLOCKS, groups=GROUPS)
        singles.update(zip(batch.token_ids, compute(it.step, batch, rng.choice([1, 1, 2])), strict=True))
        release(alone, it.kv.pools)
    halves = [rng.sample(range(2, BLOCKS - 1), 2 * -(-CONTEXT // BLOCK_SIZE)) for _ in GROUPS]
    both = [
        sequence(2 + half, range(CONTEXT * half, CONTEXT * (1 + half)), *(blocks[half::2] for blocks in halves))
        for half in range(2)
    ]
    for batch in batches(it, both, rng):
        out.update(zip(batch.token_ids, compute(it.step, batch, rng.choice([1, 1, 2])), strict=True))
    assert all(torch.equal(out[token], row) for token, row in singles.items())
    error = {torch.float16: 1e-3, torch.int8: 2e-2}[kv_type]
    for half in range(2):
        ids = range(CONTEXT * half, CONTEXT * (1 + half))
        torch.testing.assert_close(torch.stack([out[token] for token in ids]), plain_answer(ids), rtol=0, atol=error)


def test_too_long_block_table_is_rejected_in_any_group(cpu_kernels: Path) -> None:
    it = record(cpu_kernels, layers, groups=LAYERS, num_blocks=BLOCKS, context=48)
    for number in range(3):
        long = [[1, 2, 3]] * 3
        long[number] = [1, 2, 3, 4]
        batch = advance([(sequence(1, [5], *long), 1)], vocab_size=len(ROWS), num_blocks=BLOCKS, groups=GROUPS)
        with pytest.raises(IndexError, match="block table is longer"):
            it.step.fill(batch)
