"""One layer's attention as a step runs it, and its plain twins' answer.

Whatever a step has no business with is NaN: blocks of nobody, the null block, places behind a request's context, and
blocks before its window, which it gives back as a scheduler would.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.cpu.operations import Activation, CpuOperations
from engine.batch import Batch
from engine.config import BLOCK_SIZE, GroupConfig, HeadNorm, NormKind, RopeConfig
from engine.kernels import reference
from engine.kv.blocks import NULL_BLOCK
from engine.kv.cache import KVCache, KVGroup
from engine.models.decoder import head_norm_shape
from engine.operations import Attention, HeadNorms, Norm
from engine.rope import RotaryTable, rotary_table
from tests.engine.backends.cpu.recorded import Recorded, advance, compute, layer, plain, record, sequence, spoil
from tests.support.held_request import HeldRequest

SEED = 7
CONTEXT = 300
BLOCKS = 64
LAYER = 1  # of two: the other one's memory has to stay as it is
EPSILON = 1e-5


def normal(*shape: int, seed: int = SEED) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Shape:
    """Heads of one layer."""

    kv_heads: int
    group: int  # query heads that share a KV head
    head_dim: int
    interleaved: bool = True
    rotary_dim: int | None = None  # elements of a head that turn; None: all; 0: heads do not turn
    head_norm: HeadNorm | None = None
    norm_kind: NormKind = NormKind.RMS
    softcap: float = 0.0
    window: int | None = None

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def rotary(self) -> RotaryTable | None:
        if self.rotary_dim == 0:
            return None
        return rotary_table(RopeConfig(10000.0, self.rotary_dim or self.head_dim, self.interleaved), None, CONTEXT + 20)

    @property
    def norms(self) -> HeadNorms | None:
        if self.head_norm is None:
            return None
        shapes = (head_norm_shape(self.head_norm, heads, self.head_dim) for heads in (self.heads, self.kv_heads))
        weights = (normal(*shape, seed=SEED + number) for number, shape in enumerate(shapes))
        return HeadNorms(*(Norm(weight, EPSILON, self.norm_kind) for weight in weights))

    @property
    def attention(self) -> Attention:
        return Attention(self.head_dim**-0.5, self.rotary, self.norms, self.softcap, self.window)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [tokens, heads, head_dim] of rows of all three."""
        heads = rows.view(len(rows), -1, self.head_dim)
        return (
            heads[:, : self.heads],
            heads[:, self.heads : self.heads + self.kv_heads],
            heads[:, self.heads + self.kv_heads :],
        )

    def rotated(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """q and k as they are attended with, by the twins; row t is at position t."""
        q, k, _ = self.split(rows)
        if self.norms:
            q, k = (
                reference.normalize_heads(x.flatten(1), norm, self.head_dim).view(x.shape)
                for x, norm in ((q, self.norms.q), (k, self.norms.k))
            )
        if self.rotary:
            cos, sin = self.rotary.cos[: len(rows)], self.rotary.sin[: len(rows)]
            q, k = (reference.rope(x, cos, sin, interleaved=self.interleaved) for x in (q, k))
        return q, k


@dataclass(frozen=True)
class Case:
    """Attention over rows of q, k and v: a token's id is the number of its row."""

    shape: Shape
    rows: Tensor
    it: Recorded
    released: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)  # by request and place

    @classmethod
    def recorded(cls, shape: Shape, rows: Tensor, code_cache: Path, kv_type: torch.dtype = torch.float16) -> "Case":
        attention = shape.attention  # its tensors are constants of the program

        def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
            qkv = ops.embed(batch, layer(ops, plain(rows)))
            q = ops.rope_and_store(qkv, batch, kv.layer(LAYER), attention)
            return ops.attend(q, batch, kv.layer(LAYER), attention)

        groups = [KVGroup((0, 1), shape.kv_heads, shape.head_dim)]
        return cls(shape, rows, record(code_cache, forward, groups=groups, num_blocks=BLOCKS, kv_type=kv_type))

    def run(self, steps: Iterator[list[tuple[HeldRequest, int]]]) -> dict[int, Tensor]:
        """What came out for each token, by its id. Now and then a step is that of two threads."""
        out: dict[int, Tensor] = {}
        groups = [GroupConfig(self.shape.window)]
        for number, parts in enumerate(steps):
            batch = advance(parts, vocab_size=len(self.rows), num_blocks=BLOCKS, groups=groups)
            out.update(zip(batch.token_ids, compute(self.it.step, batch, 2 if number % 8 == 1 else 1), strict=True))
            for request, _ in parts:
                self._release(request)
        return out

    def _release(self, request: HeldRequest) -> None:
        """Give back the blocks that the next token does not see."""
        rule = reference.ScoreRule(1.0, window=self.shape.window)
        for place in range(rule.first(request.num_computed) // BLOCK_SIZE):
            block = request.block_table[place]
            if block != NULL_BLOCK:
                self.released[request.id, place] = self.it.pool(LAYER, block)
                spoil(self.it.kv.pools[0][block])
                request.block_table[place] = NULL_BLOCK

    def expected(self, request: HeldRequest) -> Tensor:
        """The twins' answer, [positions, heads * head_dim], from the keys and values that the pool holds or held."""
        shape, table = self.shape, torch.arange(len(request.block_table))
        pool = torch.full((len(table), 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim), torch.nan)
        for place, block in enumerate(request.block_table):
            gone = self.released.get((request.id, place))
            pool[place, 0], pool[place, 1] = gone or self.it.pool(LAYER, block)
        q, _ = shape.rotated(self.rows[list(request.prompt_ids)])
        rule = reference.ScoreRule(shape.head_dim**-0.5, shape.softcap, shape.window)
        return reference.paged_attention(q, torch.arange(CONTEXT), pool, table, CONTEXT, rule).flatten(1)


def made_up(shape: Shape, seed: int = SEED) -> Tensor:
    """Rows of q, k and v, a different one for each position of two requests."""
    return normal(2 * CONTEXT, shape.width, seed=seed)


def two_requests(rng: random.Random) -> tuple[HeldRequest, HeldRequest]:
    """Their blocks lie scattered, and none of them is the first or the last of the pool."""
    blocks = rng.sample(range(2, BLOCKS - 1), 2 * -(-CONTEXT // BLOCK_SIZE))
    half = len(blocks) // 2
    first = sequence(1, range(CONTEXT), blocks[:half])
    return first, sequence(2, range(CONTEXT, 2 * CONTEXT), blocks[half:])


def one_by_one(request: HeldRequest) -> Iterator[list[tuple[HeldRequest, int]]]:
    while request.num_computed < CONTEXT:
        yield [(request, 1)]


def at_random(requests: tuple[HeldRequest, HeldRequest], rng: random.Random) -> Iterator[list[tuple[HeldRequest, int]]]:
    """Chunks of any size, of one request or of both, in either order."""
    while left := [it for it in requests if it.num_computed < CONTEXT]:
        chosen = rng.sample(left, rng.randrange(1, len(left) + 1))
        sizes = [rng.choice([1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 19]) for _ in chosen]
        yield [(it, min(n, CONTEXT - it.num_computed)) for it, n in zip(chosen, sizes, strict=True)]


def check_however_a_prompt_is_cut(
    shape: Shape, code_cache: Path, kv_type: torch.dtype = torch.float16, error: float = 1e-5
) -> None:
    """Every context from 1 to 300 positions, as a single token and in tiles, alone and beside another request."""
    rng, rows = random.Random(SEED + shape.group), made_up(shape)
    alone = Case.recorded(shape, rows, code_cache, kv_type)
    first, _ = two_requests(rng)
    out = alone.run(one_by_one(first))
    single = torch.stack([out[token] for token in first.prompt_ids])
    torch.testing.assert_close(single, alone.expected(first), rtol=0, atol=error)
    both = Case.recorded(shape, rows, code_cache, kv_type)
    requests = two_requests(rng)
    again = both.run(at_random(requests, rng))
    assert all(torch.equal(again[token], out[token]) for token in first.prompt_ids)
    beside = torch.stack([again[token] for token in requests[1].prompt_ids])
    torch.testing.assert_close(beside, both.expected(requests[1]), rtol=0, atol=error)
