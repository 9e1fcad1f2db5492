"""A test case for attention: one layer run as a step, and the result of the reference implementation.

Everything that a step must not read is NaN: unused blocks, the null block, slots after a request's context, and blocks
before its window, which are released as a scheduler would.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.cpu.buffers import Activation
from engine.backends.cpu.operations import CpuOperations
from engine.batch import Batch
from engine.config import BLOCK_SIZE, GroupConfig
from engine.kernels import reference
from engine.kv.blocks import NULL_BLOCK
from engine.kv.cache import KVCache
from engine.model_config import HeadNorm, NormKind, RopeConfig
from engine.models.mixer_loader import head_norm_shape
from engine.operations import Attention, HeadNorms, Norm
from engine.rope import RotaryTable, rotary_table
from tests.engine.backends.cpu.recorded import Recorded, advance, compute, layer, plain, record, sequence, spoil
from tests.support.held_request import HeldRequest
from tests.support.kv_groups import kv_group

SEED = 7
CONTEXT = 300
BLOCKS = 64
LAYER = 1  # index of the second of two layers; the memory of the first must not change
EPSILON = 1e-5


def normal(*shape: int, seed: int = SEED) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Shape:
    """The heads of one layer."""

    kv_heads: int
    group: int  # query heads per KV head
    head_dim: int
    interleaved: bool = True
    rotary_dim: int | None = None  # elements per head that are rotated; None: all; 0: none
    head_norm: HeadNorm | None = None
    norm_kind: NormKind = NormKind.RMS
    softcap: float = 0.0
    window: int | None = None
    sinks: float = 0.0  # spread of the sinks; 0: none
    span: int = 0  # see `RopeConfig`
    value_norm: bool = False

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
        rope = RopeConfig(10000.0, self.rotary_dim or self.head_dim, self.interleaved, span=self.span)
        return rotary_table(rope, None, CONTEXT + 20)

    @property
    def norms(self) -> HeadNorms | None:
        if self.head_norm is None:
            return None
        shapes = (head_norm_shape(self.head_norm, heads, self.head_dim) for heads in (self.heads, self.kv_heads))
        weights = (normal(*shape, seed=SEED + number) for number, shape in enumerate(shapes))
        q, k = (Norm(weight, EPSILON, self.norm_kind) for weight in weights)
        return HeadNorms(q, k, Norm(normal(self.head_dim, seed=8), EPSILON) if self.value_norm else None)

    @property
    def attention(self) -> Attention:
        sinks = self.sinks * normal(self.heads, seed=5) if self.sinks else None
        return Attention(self.head_dim**-0.5, self.rotary, self.norms, self.softcap, self.window, sinks)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split rows into q, k, and v, [tokens, heads, head_dim]."""
        heads = rows.view(len(rows), -1, self.head_dim)
        return (
            heads[:, : self.heads],
            heads[:, self.heads : self.heads + self.kv_heads],
            heads[:, self.heads + self.kv_heads :],
        )

    def rotated(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalized and rotated q and k by the reference implementation; row t is at position t."""
        q, k, _ = self.split(rows)
        if self.norms:
            q, k = (
                reference.normalize_heads(x.flatten(1), norm, self.head_dim).view(x.shape)
                for x, norm in ((q, self.norms.q), (k, self.norms.k))
            )
        if self.rotary:
            cos, sin = self.rotary.cos[: len(rows)], self.rotary.sin[: len(rows)]
            distance = self.rotary.distance
            q, k = (reference.rope(x, cos, sin, interleaved=self.interleaved, distance=distance) for x in (q, k))
        return q, k


@dataclass(frozen=True)
class Case:
    """Attention over rows of q, k, and v. The id of a token is its row number."""

    shape: Shape
    rows: Tensor
    it: Recorded
    # keyed by (request id, index in its block table)
    released: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def recorded(
        cls, shape: Shape, rows: Tensor, code_cache: Path, kv_type: torch.dtype = torch.float16, threads: int = 2
    ) -> "Case":
        attention = shape.attention  # keeps the attention alive, because its tensors are constants of the program

        def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
            qkv = ops.embed(batch, layer(ops, plain(rows)))
            q = ops.rope_and_store(qkv, batch, kv.layer(LAYER), attention)
            return ops.attend(q, batch, kv.layer(LAYER), attention)

        groups = [kv_group((0, 1), shape.kv_heads, shape.head_dim)]
        it = record(code_cache, forward, groups=groups, num_blocks=BLOCKS, kv_type=kv_type, threads=threads)
        return cls(shape, rows, it)

    def run(self, steps: Iterator[list[tuple[HeldRequest, int]]]) -> dict[int, Tensor]:
        """Run steps. Returns the output of each token by id. One in eight steps uses two threads."""
        out: dict[int, Tensor] = {}
        groups = [GroupConfig(self.shape.window)]
        for number, parts in enumerate(steps):
            batch = advance(parts, vocab_size=len(self.rows), num_blocks=BLOCKS, groups=groups)
            out.update(zip(batch.token_ids, compute(self.it.step, batch, 2 if number % 8 == 1 else 1), strict=True))
            for request, _ in parts:
                self._release(request)
        return out

    def _release(self, request: HeldRequest) -> None:
        """Release the blocks that the next token does not see."""
        rule = reference.ScoreRule(1.0, window=self.shape.window)
        for index in range(rule.first(request.num_computed) // BLOCK_SIZE):
            block = request.block_table[index]
            if block != NULL_BLOCK:
                self.released[request.id, index] = self.it.pool(LAYER, block)
                spoil(self.it.kv.pools[0][block])
                request.block_table[index] = NULL_BLOCK

    def expected(self, request: HeldRequest) -> Tensor:
        """Return the reference output, [positions, heads * head_dim], for the keys and values that were written to the
        pool.
        """
        shape, table = self.shape, torch.arange(len(request.block_table))
        pool = torch.full((len(table), 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim), torch.nan)
        for index, block in enumerate(request.block_table):
            gone = self.released.get((request.id, index))
            pool[index, 0], pool[index, 1] = gone or self.it.pool(LAYER, block)
        q, _ = shape.rotated(self.rows[list(request.prompt_ids)])
        rule = reference.ScoreRule(shape.head_dim**-0.5, shape.softcap, shape.window)
        sinks = shape.attention.sinks
        return reference.paged_attention(q, torch.arange(CONTEXT), pool, table, CONTEXT, rule, sinks).flatten(1)


def random_rows(shape: Shape, seed: int = SEED) -> Tensor:
    """Return random rows of q, k, and v, one for each position of two requests."""
    return normal(2 * CONTEXT, shape.width, seed=seed)


def scattered_requests(rng: random.Random) -> tuple[HeldRequest, HeldRequest]:
    """Return two requests whose blocks are scattered, without the first and the last block of the pool."""
    blocks = rng.sample(range(2, BLOCKS - 1), 2 * -(-CONTEXT // BLOCK_SIZE))
    half = len(blocks) // 2
    first = sequence(1, range(CONTEXT), blocks[:half])
    return first, sequence(2, range(CONTEXT, 2 * CONTEXT), blocks[half:])


def one_by_one(request: HeldRequest) -> Iterator[list[tuple[HeldRequest, int]]]:
    while request.num_computed < CONTEXT:
        yield [(request, 1)]


def random_chunks(
    requests: tuple[HeldRequest, HeldRequest], rng: random.Random
) -> Iterator[list[tuple[HeldRequest, int]]]:
    """Yield steps with chunks of random size, of one or both requests in either order."""
    while left := [it for it in requests if it.num_computed < CONTEXT]:
        chosen = rng.sample(left, rng.randrange(1, len(left) + 1))
        sizes = [rng.choice([1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 19]) for _ in chosen]
        yield [(it, min(n, CONTEXT - it.num_computed)) for it, n in zip(chosen, sizes, strict=True)]


def check_all_chunkings(
    shape: Shape, code_cache: Path, kv_type: torch.dtype = torch.float16, error: float = 1e-5
) -> None:
    """Check every context from 1 to 300 positions, as single tokens and in chunks, alone and beside another request."""
    rng, rows = random.Random(SEED + shape.group), random_rows(shape)
    alone = Case.recorded(shape, rows, code_cache, kv_type)
    first, _ = scattered_requests(rng)
    out = alone.run(one_by_one(first))
    single = torch.stack([out[token] for token in first.prompt_ids])
    torch.testing.assert_close(single, alone.expected(first), rtol=0, atol=error)
    both = Case.recorded(shape, rows, code_cache, kv_type)
    requests = scattered_requests(rng)
    again = both.run(random_chunks(requests, rng))
    assert all(torch.equal(again[token], out[token]) for token in first.prompt_ids)
    beside = torch.stack([again[token] for token in requests[1].prompt_ids])
    torch.testing.assert_close(beside, both.expected(requests[1]), rtol=0, atol=error)
