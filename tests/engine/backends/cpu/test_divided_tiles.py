"""Tokens that are computed together, as in the verification of drafts, have the bits of tokens computed one by one."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.attention import PIECE
from engine.backends.cpu.device import _tiles
from engine.backends.cpu.instructions import DIVIDED_TOKENS, WHOLE
from engine.config import BLOCK_SIZE, GroupConfig
from engine.kernels.reference import ScoreRule
from engine.kv.blocks import NULL_BLOCK
from tests.engine.backends.cpu.attention_case import (
    BLOCKS,
    CONTEXT,
    SEED,
    Case,
    Shape,
    random_rows,
    scattered_requests,
)
from tests.engine.backends.cpu.recorded import advance, compute
from tests.support.held_request import HeldRequest

pytestmark = pytest.mark.usefixtures("plain_layouts")

Parts = Sequence[tuple[HeldRequest, int]]

COUNTS = (*range(1, 10), 16)
THREADS = (1, 2, 3)


@dataclass(frozen=True)
class Verification:
    """Two requests whose keys and values are stored, and the output of each of their tokens, computed alone."""

    case: Case
    requests: tuple[HeldRequest, HeldRequest]
    alone: dict[int, Tensor]

    @classmethod
    def of(cls, shape: Shape, code_cache: Path, kv_type: torch.dtype) -> "Verification":
        case = Case.recorded(shape, random_rows(shape), code_cache, kv_type, threads=max(THREADS))
        made = cls(case, scattered_requests(random.Random(SEED)), {})
        for request in made.requests:
            for _ in range(CONTEXT):
                made.alone.update(made.outputs([(request, 1)], threads=1))
        return made

    def outputs(self, parts: Parts, threads: int) -> dict[int, Tensor]:
        """Run a step, and return the output of each of its tokens by id."""
        groups = [GroupConfig(self.case.shape.window)]
        batch = advance(parts, vocab_size=len(self.case.rows), num_blocks=BLOCKS, groups=groups)
        return dict(zip(batch.token_ids, compute(self.case.it.step, batch, threads), strict=True))

    def at(self, number: int, start: int, count: int) -> tuple[HeldRequest, int]:
        """Return a request before its tokens from `start` on. Blocks that `count` tokens do not see are null blocks."""
        request = self.requests[number]
        rule = ScoreRule(1.0, window=self.case.shape.window)
        seen = range(rule.first(start) // BLOCK_SIZE, -(-(start + count) // BLOCK_SIZE))
        table = [block if index in seen else NULL_BLOCK for index, block in enumerate(request.block_table)]
        return replace(request, num_computed=start, block_tables=(table,)), count

    def check(self, parts: Parts) -> None:
        for threads in THREADS:
            together = self.outputs([(replace(request), count) for request, count in parts], threads)
            different = [token for token, row in together.items() if not torch.equal(row, self.alone[token])]
            assert not different, f"{threads} threads, counts {[count for _, count in parts]}"


def starts(count: int) -> Iterator[int]:
    """Yield contexts before `count` tokens, around the boundaries of pieces and blocks."""
    yield from (0, 1, BLOCK_SIZE - 1, CONTEXT - count)
    for boundary in (PIECE, 2 * PIECE):
        yield from {boundary - count, boundary - (count + 1) // 2, boundary - 1, boundary, boundary + 1}


SHAPES = [
    (Shape(3, 3, 64), torch.float16),
    (Shape(1, 1, 32), torch.float16),
    (Shape(2, 8, 32), torch.int8),
    (Shape(1, 9, 128), torch.float16),
    (Shape(8, 2, 32, softcap=5.0), torch.float16),
    (Shape(2, 2, 96, softcap=0.5, window=100), torch.int8),
    *((Shape(2, 3, 32, window=window), torch.float16) for window in (1, 2, 7, 16, 127, 128, 129, 200)),
]


@pytest.mark.share(4)
@pytest.mark.parametrize(("shape", "kv_type"), SHAPES, ids=str)
def test_tokens_of_one_step_have_the_bits_of_single_tokens(
    cpu_kernels: Path, shape: Shape, kv_type: torch.dtype
) -> None:
    verification = Verification.of(shape, cpu_kernels, kv_type)
    for count in COUNTS:
        for start in starts(count):
            verification.check([verification.at(0, start, count)])


@pytest.mark.share(2)
@pytest.mark.parametrize(("shape", "kv_type"), SHAPES[:6], ids=str)
def test_tokens_beside_another_request_have_the_bits_of_single_tokens(
    cpu_kernels: Path, shape: Shape, kv_type: torch.dtype
) -> None:
    """The steps have up to 40 tokens, so both divided and whole tiles occur."""
    verification = Verification.of(shape, cpu_kernels, kv_type)
    for count, other in product((1, 4, 8, 9), (1, 3, 23, 24, 31)):
        parts = [verification.at(0, PIECE - 2, count), verification.at(1, 2 * PIECE - other // 2, other)]
        verification.check(parts)
        verification.check(parts[::-1])


def test_short_steps_divide_all_tiles_and_long_steps_only_single_tokens(cpu_kernels: Path) -> None:
    verification = Verification.of(Shape(1, 1, 32), cpu_kernels, torch.float16)

    def tiles(*counts: int) -> list[tuple[int, int, int, int]]:
        parts = [verification.at(number, 50, count) for number, count in enumerate(counts)]
        return _tiles(advance(parts, vocab_size=len(verification.case.rows), num_blocks=BLOCKS))

    assert tiles(9, 3) == [(0, 8, 0, 0), (8, 1, 0, 8), (9, 3, 1, 9)]
    assert tiles(1, DIVIDED_TOKENS - 1)[0] == (0, 1, 0, 0)
    assert all(slot != WHOLE for *_, slot in tiles(1, DIVIDED_TOKENS - 1))
    assert tiles(9, DIVIDED_TOKENS) == [
        (0, 8, 0, WHOLE),
        (8, 1, 0, 0),
        *((first, 8, 1, WHOLE) for first in range(9, 9 + DIVIDED_TOKENS, 8)),
    ]
