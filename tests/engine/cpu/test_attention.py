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
from engine.operations import Attention
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


def recorded(shape: Shape, rows: Tensor, code_cache: Path, kv_type: torch.dtype = torch.float16) -> Recorded:
    """Attention over rows of q, k and v."""

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
        qkv = ops.embed(batch, layer(ops, plain(rows)))
        attention = Attention(shape.head_dim**-0.5, shape.rotary())
        q = ops.rope_and_store(qkv, batch, kv.layer(LAYER), attention)
        return ops.attend(q, batch, kv.layer(LAYER), attention)

    group = KVGroup((0, 1), shape.kv_heads, shape.head_dim)
    return record(code_cache, forward, group=group, num_blocks=BLOCKS, kv_type=kv_type)


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
    """The twins' answer, [positions, heads * head_dim], from the keys and values that the pool holds."""
    pool = torch.full((BLOCKS, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim), torch.nan)
    for block in request.block_table:
        pool[block, 0], pool[block, 1] = it.pool(LAYER, block)
    rotary, positions = shape.rotary(), torch.arange(CONTEXT)
    q, _, _ = shape.split(rows[list(request.prompt_ids)])
    turned = reference.rope(q, rotary.cos[positions], rotary.sin[positions], interleaved=shape.interleaved)
    table, scale = torch.tensor(request.block_table), shape.head_dim**-0.5
    return reference.paged_attention(turned, positions, pool, table, CONTEXT, reference.ScoreRule(scale)).flatten(1)


GROUPS = [*((torch.float16, group) for group in range(1, 10)), *((torch.int8, group) for group in (1, 2, 3, 4, 9))]


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize(("kv_type", "group"), GROUPS)
def test_attention_equals_its_twin_however_a_prompt_is_cut(
    cpu_kernels: Path, head_dim: int, kv_type: torch.dtype, group: int
) -> None:
    """Every context from 1 to 300 positions, as a single token and in tiles, alone and beside another request."""
    shape = Shape(1 + group % 2, group, head_dim, interleaved=group % 3 > 0)
    rng, rows = random.Random(SEED + group), made_up(shape)
    alone = recorded(shape, rows, cpu_kernels, kv_type)
    first, _ = two_requests(rng)
    out = run(alone, one_by_one(first))
    torch.testing.assert_close(
        torch.stack([out[token] for token in first.prompt_ids]), expected(shape, alone, first, rows), rtol=0, atol=1e-5
    )
    both = recorded(shape, rows, cpu_kernels, kv_type)
    requests = two_requests(rng)
    again = run(both, at_random(requests, rng))
    assert all(torch.equal(again[token], out[token]) for token in first.prompt_ids)
    beside = torch.stack([again[token] for token in requests[1].prompt_ids])
    torch.testing.assert_close(beside, expected(shape, both, requests[1], rows), rtol=0, atol=1e-5)


STORED = 51  # tokens, in three steps


def held(it: Recorded, request: Request) -> tuple[Tensor, Tensor]:
    """Keys and values [STORED, kv_heads, head_dim] that a request's blocks hold. Nothing else has changed."""
    run(it, iter([[(request, 37)], [(request, 1)], [(request, 13)]]))
    written = -(-STORED // BLOCK_SIZE)
    blocks, last = request.block_table[:written], request.block_table[written - 1]
    everything = it.kv.pools[0].view(torch.uint8)
    assert (everything[[block for block in range(BLOCKS) if block not in blocks]] == 0xFF).all()
    assert (everything[:, 1 - LAYER] == 0xFF).all()
    for part, spoiled in zip(it.elements(LAYER, last), it.elements(LAYER, 0), strict=True):
        behind = slice(STORED % BLOCK_SIZE, None)
        torch.testing.assert_close(part[:, behind], spoiled[:, behind], rtol=0, atol=0, equal_nan=True)
    pools = [it.pool(LAYER, block) for block in blocks]
    k, v = (torch.cat([pool[n] for pool in pools], dim=1).transpose(0, 1) for n in (0, 1))
    assert k[STORED:].isnan().all()
    assert v[STORED:].isnan().all()
    return k[:STORED], v[:STORED]


def turned_keys(shape: Shape, rows: Tensor) -> tuple[Tensor, Tensor]:
    """What is to be stored: keys and values [STORED, kv_heads, head_dim]."""
    rotary, (_, k, v) = shape.rotary(), shape.split(rows[:STORED])
    return reference.rope(k, rotary.cos[:STORED], rotary.sin[:STORED], interleaved=shape.interleaved), v


@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_keys_are_turned_and_stored_where_they_belong(cpu_kernels: Path, head_dim: int, interleaved: bool) -> None:
    shape = Shape(3, 2, head_dim, interleaved)
    rows = made_up(shape)
    request, _ = two_requests(random.Random(SEED))
    k, v = held(recorded(shape, rows, cpu_kernels), request)
    turned, values = turned_keys(shape, rows)
    assert torch.equal(v, values.half().float())
    torch.testing.assert_close(k, turned, rtol=2**-11, atol=1e-6)  # half a unit of float16


def as_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of how integers are made: x [..., head_dim] as codes, and the scale of each head."""
    top = x.abs().amax(-1, keepdim=True)
    return (x * torch.where(top > 1e-30, torch.tensor(127.0) / top, 0)).round(), top * (1 / 127)


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1, 1e6])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_integers_have_a_scale_for_each_token_and_head(cpu_kernels: Path, head_dim: int, size: float) -> None:
    """Of values, all bits are the twin's; a key that the rotation left next to a half may be rounded either way."""
    shape = Shape(3, 2, head_dim)
    rows = made_up(shape) * size * torch.rand(2 * CONTEXT, 1, generator=torch.Generator().manual_seed(SEED))
    rows[5] = 0
    request, _ = two_requests(random.Random(SEED))
    k, v = held(recorded(shape, rows, cpu_kernels, torch.int8), request)
    turned, values = turned_keys(shape, rows)
    codes, scales = as_int8(values)
    assert codes[6:].abs().amax(-1).eq(127).all()
    assert torch.equal(v, codes * scales)
    assert ((k - turned).abs() <= 0.501 * as_int8(turned)[1]).all()


@pytest.mark.parametrize("size", [0, 1e-38])
def test_what_is_too_small_for_a_scale_is_zero(cpu_kernels: Path, size: float) -> None:
    shape = Shape(1, 2, 32)
    request, _ = two_requests(random.Random(SEED))
    k, v = held(recorded(shape, made_up(shape) * size, cpu_kernels, torch.int8), request)
    assert not k.any()
    assert not v.any()


@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf])
def test_a_value_that_is_not_a_number_does_not_become_one_as_an_integer(cpu_kernels: Path, spoiled: float) -> None:
    """Whoever sees that token sees it, and nobody before it."""
    shape = Shape(1, 2, 32)
    rows = made_up(shape)
    rows[6, -3] = spoiled
    out = run(recorded(shape, rows, cpu_kernels, torch.int8), iter([[(sequence(1, range(20), [5, 9]), 9)]]))
    assert [token for token, row in out.items() if row.isnan().all()] == [6, 7, 8]
    assert all(out[token].isfinite().all() for token in range(6))


@pytest.mark.parametrize("kv_type", [torch.float16, torch.int8])
@pytest.mark.parametrize("size", [1e-3, 30.0, 1e3])
def test_scores_of_any_size(cpu_kernels: Path, size: float, kv_type: torch.dtype) -> None:
    """From all positions alike to one that takes all: nothing overflows, nothing is lost."""
    shape = Shape(2, 3, 64)
    rows = made_up(shape)
    rows[:, : shape.heads * 64] *= size
    it = recorded(shape, rows, cpu_kernels, kv_type)
    requests = two_requests(random.Random(SEED))
    out = run(it, at_random(requests, random.Random(SEED)))
    for request in requests:
        ours = torch.stack([out[token] for token in request.prompt_ids])
        torch.testing.assert_close(ours, expected(shape, it, request, rows), rtol=0, atol=3e-6 * max(size, 3))


@pytest.mark.parametrize("kv_type", [torch.float16, torch.int8])
def test_a_value_too_large_for_the_cache_spoils_no_token_before_it(cpu_kernels: Path, kv_type: torch.dtype) -> None:
    """A later token of the same tile is nobody's business: alone or beside it, the bits are the same."""
    shape = Shape(1, 2, 32)
    rows = made_up(shape)
    rows[6, -shape.head_dim :] = 1e6 if kv_type is torch.float16 else torch.inf
    together, alone = (recorded(shape, rows, cpu_kernels, kv_type) for _ in range(2))
    first, second = (sequence(n, range(20), [5, 9]) for n in (1, 2))
    tile = run(together, iter([[(first, 8)]]))
    single = run(alone, iter([[(second, 1)] for _ in range(6)]))
    assert all(torch.equal(tile[token], single[token]) for token in range(6))
