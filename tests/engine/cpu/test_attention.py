"""Rotary embedding, the KV store and attention, as a step runs them, against their plain twins.

Whatever a step has no business with is NaN: blocks of nobody, the null block, places behind a request's context.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import BLOCK_SIZE, RopeConfig
from engine.cpu.operations import Activation, CpuOperations
from engine.kernels import reference
from engine.kv_cache import KVCache, KVGroup
from engine.request import Request
from engine.rope import RotaryTable, rotary_table
from tests.engine.cpu.recorded import Recorded, advance, compute, layer, plain, record, sequence

SEED = 7
CONTEXT = 300
BLOCKS = 64
LAYER = 1  # of two: the other one's memory has to stay as it is

pytestmark = pytest.mark.usefixtures("cpu_kernels")


@dataclass(frozen=True)
class Shape:
    """Heads of one layer."""

    kv_heads: int
    group: int  # query heads that share a KV head
    head_dim: int
    interleaved: bool = True

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def rotary(self) -> RotaryTable:
        return rotary_table(RopeConfig(10000.0, self.head_dim, self.interleaved), None, CONTEXT + 20)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [tokens, heads, head_dim] of rows of all three."""
        heads = rows.view(len(rows), -1, self.head_dim)
        return (
            heads[:, : self.heads],
            heads[:, self.heads : self.heads + self.kv_heads],
            heads[:, self.heads + self.kv_heads :],
        )


def recorded(shape: Shape, rows: Tensor, code_cache: Path) -> Recorded:
    """Attention over rows of q, k and v."""

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
        qkv = ops.embed(batch, layer(ops, plain(rows)))
        q = ops.rope_and_store(qkv, batch, kv.layer(LAYER), shape.rotary())
        return ops.attend(q, batch, kv.layer(LAYER))

    return record(code_cache, forward, group=KVGroup((0, 1), shape.kv_heads, shape.head_dim), num_blocks=BLOCKS)


def made_up(shape: Shape, seed: int = SEED) -> Tensor:
    """Rows of q, k and v, a different one for each position of two requests."""
    return torch.randn(2 * CONTEXT, shape.width, generator=torch.Generator().manual_seed(seed))


def two_requests(rng: random.Random) -> tuple[Request, Request]:
    """Their blocks lie scattered, and none of them is the first or the last of the pool."""
    blocks = rng.sample(range(2, BLOCKS - 1), 2 * -(-CONTEXT // BLOCK_SIZE))
    half = len(blocks) // 2
    first = sequence(1, range(CONTEXT), blocks[:half])
    return first, sequence(2, range(CONTEXT, 2 * CONTEXT), blocks[half:])


def run(it: Recorded, steps: Iterator[list[tuple[Request, int]]]) -> dict[int, Tensor]:
    """What came out for each token, by its id. Now and then a step is that of two threads."""
    out: dict[int, Tensor] = {}
    for number, parts in enumerate(steps):
        batch = advance(parts, vocab_size=2 * CONTEXT, num_blocks=BLOCKS)
        out.update(zip(batch.token_ids, compute(it.step, batch, 2 if number % 8 == 1 else 1), strict=True))
    return out


def one_by_one(request: Request) -> Iterator[list[tuple[Request, int]]]:
    while request.num_computed < CONTEXT:
        yield [(request, 1)]


def at_random(requests: tuple[Request, Request], rng: random.Random) -> Iterator[list[tuple[Request, int]]]:
    """Chunks of any size, of one request or of both, in either order."""
    while left := [it for it in requests if it.num_computed < CONTEXT]:
        chosen = rng.sample(left, rng.randrange(1, len(left) + 1))
        sizes = [rng.choice([1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 19]) for _ in chosen]
        yield [(it, min(n, CONTEXT - it.num_computed)) for it, n in zip(chosen, sizes, strict=True)]


def expected(shape: Shape, it: Recorded, request: Request, rows: Tensor) -> Tensor:
    """The twins' answer, [positions, heads * head_dim], from the float16 keys and values that the pool holds."""
    pool = torch.full((BLOCKS, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim), torch.nan)
    for block in request.block_table:
        pool[block, 0], pool[block, 1] = it.pool(LAYER, block)
    rotary, positions = shape.rotary(), torch.arange(CONTEXT)
    q, _, _ = shape.split(rows[list(request.prompt_ids)])
    turned = reference.rope(q, rotary.cos[positions], rotary.sin[positions], interleaved=shape.interleaved)
    table, scale = torch.tensor(request.block_table), shape.head_dim**-0.5
    return reference.paged_attention(turned, positions, pool, table, CONTEXT, scale).flatten(1)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("group", range(1, 10))
def test_attention_equals_its_twin_however_a_prompt_is_cut(cpu_kernels: Path, head_dim: int, group: int) -> None:
    """Every context from 1 to 300 positions, as a single token and in tiles, alone and beside another request."""
    shape = Shape(1 + group % 2, group, head_dim, interleaved=group % 3 > 0)
    rng, rows = random.Random(SEED + group), made_up(shape)
    alone = recorded(shape, rows, cpu_kernels)
    first, _ = two_requests(rng)
    out = run(alone, one_by_one(first))
    torch.testing.assert_close(
        torch.stack([out[token] for token in first.prompt_ids]), expected(shape, alone, first, rows), rtol=0, atol=1e-5
    )
    both = recorded(shape, rows, cpu_kernels)
    requests = two_requests(rng)
    again = run(both, at_random(requests, rng))
    assert all(torch.equal(again[token], out[token]) for token in first.prompt_ids)
    beside = torch.stack([again[token] for token in requests[1].prompt_ids])
    torch.testing.assert_close(beside, expected(shape, both, requests[1], rows), rtol=0, atol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_keys_are_turned_and_stored_where_they_belong(cpu_kernels: Path, head_dim: int, interleaved: bool) -> None:
    shape = Shape(3, 2, head_dim, interleaved)
    rng, rows = random.Random(SEED), made_up(shape)
    it = recorded(shape, rows, cpu_kernels)
    request, _ = two_requests(rng)
    run(it, iter([[(request, 37)], [(request, 1)], [(request, 13)]]))
    context = 51
    rotary = shape.rotary()
    _, k, v = shape.split(rows[:context])
    turned = reference.rope(k, rotary.cos[:context], rotary.sin[:context], interleaved=interleaved)
    stored = [it.pool(LAYER, block) for block in request.block_table]
    keys, values = (torch.cat([pair[n] for pair in stored], dim=1).transpose(0, 1) for n in (0, 1))
    assert torch.equal(values[:context], v.half().float())
    torch.testing.assert_close(keys[:context], turned, rtol=2**-11, atol=1e-6)  # half a unit of float16
    assert keys[context:].isnan().all()
    assert values[context:].isnan().all()
    written = it.kv.pools[0].isfinite().sum()
    assert written == context * 2 * shape.kv_heads * head_dim


@pytest.mark.parametrize("size", [1e-3, 30.0, 1e3])
def test_scores_of_any_size(cpu_kernels: Path, size: float) -> None:
    """From all positions alike to one that takes all: nothing overflows, nothing is lost."""
    shape = Shape(2, 3, 64)
    rows = made_up(shape)
    rows[:, : shape.heads * 64] *= size
    it = recorded(shape, rows, cpu_kernels)
    requests = two_requests(random.Random(SEED))
    out = run(it, at_random(requests, random.Random(SEED)))
    for request in requests:
        ours = torch.stack([out[token] for token in request.prompt_ids])
        torch.testing.assert_close(ours, expected(shape, it, request, rows), rtol=0, atol=3e-6 * max(size, 3))


def test_a_value_too_large_for_the_cache_spoils_no_token_before_it(cpu_kernels: Path) -> None:
    """A later token of the same tile is nobody's business: alone or beside it, the bits are the same."""
    shape = Shape(1, 2, 32)
    rows = made_up(shape)
    rows[6, -shape.head_dim :] = 1e6
    together, alone = (recorded(shape, rows, cpu_kernels) for _ in range(2))
    first, second = (sequence(n, range(20), [5, 9]) for n in (1, 2))
    tile = run(together, iter([[(first, 8)]]))
    single = run(alone, iter([[(second, 1)] for _ in range(6)]))
    assert all(torch.equal(tile[token], single[token]) for token in range(6))
