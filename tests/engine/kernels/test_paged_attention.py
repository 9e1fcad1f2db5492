"""Paged attention on a GPU against its reference implementation, and its determinism."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from engine.backends.cuda.gpu import read_card
from engine.config import BLOCK_SIZE
from engine.kernels import reference
from engine.kernels.attention_tiles import Tiles, decode_tiles, padded_tiles, query_tiles, tile_queries
from engine.kernels.paged_attention import arrival_counts, paged_attention
from engine.kernels.reference import ScoreRule
from engine.mixer_config import AttentionConfig, CacheConfig
from quant.kernels.card import Card

pytestmark = pytest.mark.usefixtures("fenced_memory")

LAYERS = 2
CARD = Card("interpreted", (8, 6), 8, 99 << 10, 1 << 20, 1 << 30, interpreted=True)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    pool: torch.dtype


@dataclass(frozen=True)
class Step:
    """The tokens of each request in a step, and its context length after it."""

    counts: tuple[int, ...]
    contexts: tuple[int, ...]

    @property
    def starts(self) -> list[int]:
        return [0, *itertools.accumulate(self.counts)]


def poisoned_pool(shape: Shape, blocks: int) -> Tensor:
    """Return one layer of a pool whose bytes are all ones, which is NaN in every dtype."""
    size = (blocks, LAYERS, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim * shape.pool.itemsize)
    return torch.full(size, 0xFF, dtype=torch.uint8).view(shape.pool)[:, 1]


def filled(shape: Shape, contexts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return a pool with random keys and values for these contexts, and block tables, int32 [requests, blocks]."""
    needed = [-(-context // BLOCK_SIZE) for context in contexts]
    blocks = iter((torch.randperm(sum(needed)) + 1).tolist())
    tables = torch.zeros(len(contexts), max(needed) + 1, dtype=torch.int32)
    pool = poisoned_pool(shape, sum(needed) + 1)
    for table, count, context in zip(tables, needed, contexts, strict=True):
        table[:count] = torch.tensor([next(blocks) for _ in range(count)])
        positions = torch.arange(context)
        slots = table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        reference.store_kv(pool, slots, *torch.randn(2, context, shape.kv_heads, shape.head_dim))
    return pool, tables


def _mixer(q: Tensor, pool: Tensor) -> AttentionConfig:
    return AttentionConfig(q.shape[1], CacheConfig(pool.shape[2], q.shape[2]))


def run_attention(
    q: Tensor,
    pool: Tensor,
    tables: Tensor,
    step: Step,
    rule: ScoreRule,
    sinks: Tensor | None,
    device: torch.device,
    *,
    deterministic: bool,
    tiles: Tiles | None = None,
    card: Card = CARD,
) -> Tensor:
    sizes = tile_queries([_mixer(q, pool)], card, deterministic=deterministic)
    tiles = tiles or query_tiles(step.starts, step.contexts, sizes)
    starts, contexts = (torch.tensor(it, dtype=torch.int32, device=device) for it in (step.starts, step.contexts))
    arrivals = arrival_counts(card, device)
    out = paged_attention(
        q.to(device),
        pool.to(device),
        tables.to(device),
        starts,
        contexts,
        tiles.to(device),
        rule,
        sinks=None if sinks is None else sinks.to(device),
        arrivals=arrivals,
        card=card,
        deterministic=deterministic,
    ).cpu()
    assert not arrivals.any()
    return out


CASES = [
    (Shape(8, 2, 32, torch.bfloat16), Step((1, 1, 1), (50, 1, 97)), ScoreRule(0.2), False, False),
    (Shape(8, 2, 32, torch.uint8), Step((1, 3, 40), (50, 3, 97)), ScoreRule(0.2, 3.0), True, False),
    (Shape(6, 2, 80, torch.float16), Step((40, 1), (40, 81)), ScoreRule(0.2, window=20), True, True),
    (Shape(9, 3, 96, torch.bfloat16), Step((7, 33), (97, 48)), ScoreRule(0.1), True, True),
    (Shape(4, 4, 16, torch.float16), Step((1, 33, 2), (33, 97, 70)), ScoreRule(0.3, 4.0, 33), False, False),
    (Shape(2, 1, 256, torch.bfloat16), Step((3, 17), (60, 17)), ScoreRule(0.05, 2.0, 5), True, False),
    (Shape(20, 1, 64, torch.uint8), Step((1, 2), (65, 40)), ScoreRule(0.2, window=40), False, True),
    (Shape(2, 2, 48, torch.uint8), Step((20, 1), (90, 34)), ScoreRule(0.2, 5.0), False, True),
]


# cards before 8.9 convert e4m3 by integer arithmetic
CARDS = [(CARD, *case) for case in CASES]
CARDS += [(replace(CARD, capability=(8, 6)), *case) for case in CASES if case[0].pool == torch.uint8]


@pytest.mark.parametrize(("card", "shape", "step", "rule", "with_sinks", "deterministic"), CARDS)
def test_paged_attention_equals_the_reference(
    card: Card, shape: Shape, step: Step, rule: ScoreRule, with_sinks: bool, deterministic: bool, device: torch.device
) -> None:
    pool, tables = filled(shape, step.contexts)
    q = torch.randn(step.starts[-1], shape.heads, shape.head_dim).bfloat16()
    sinks = 2 * torch.randn(shape.heads) if with_sinks else None
    if rule.window:  # the blocks before the windows of all queries are released
        for table, count, context in zip(tables, step.counts, step.contexts, strict=True):
            table[: rule.first(context - count) // BLOCK_SIZE] = 0
    got = run_attention(q, pool, tables, step, rule, sinks, device, deterministic=deterministic, card=card)
    want = reference.batch_attention(
        q.float(), pool, tables, torch.tensor(step.starts), torch.tensor(step.contexts), rule, sinks
    )
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("window", [None, 700])
def test_sinks_count_once_however_many_parts_a_context_has(
    window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sinks are so large that adding them once more would change most outputs."""
    shape, step, rule = Shape(4, 1, 32, torch.bfloat16), Step((1,), (2100,)), ScoreRule(0.2, window=window)
    pool, tables = filled(shape, step.contexts)
    q, sinks = torch.randn(1, 4, 32).bfloat16(), torch.full((4,), 6.0)
    want = reference.batch_attention(
        q.float(), pool, tables, torch.tensor(step.starts), torch.tensor(step.contexts), rule, sinks
    )
    for parts in (1, 2, 3, 8, 33, 64):
        monkeypatch.setattr("engine.kernels.paged_attention._division", lambda *_, parts=parts: (parts, parts))
        got = run_attention(q, pool, tables, step, rule, sinks, device, deterministic=False)
        torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-3)


def test_output_of_padding_requests_is_zero(device: torch.device) -> None:
    """The tiles are for more requests and longer contexts than the step has, as in a captured step."""
    shape, step = Shape(4, 2, 32, torch.bfloat16), Step((1, 1, 1), (70, 0, 0))
    pool, tables = filled(shape, step.contexts)
    q = torch.randn(3, 4, 32).bfloat16()
    want = reference.batch_attention(
        q.float(), pool, tables, torch.tensor(step.starts), torch.tensor(step.contexts), ScoreRule(0.2)
    )
    for deterministic, longest in itertools.product((False, True), (70, 700)):
        sizes = tile_queries([_mixer(q, pool)], CARD, deterministic=deterministic)
        tiles = decode_tiles(3, longest, sizes)
        got = run_attention(
            q, pool, tables, step, ScoreRule(0.2), None, device, deterministic=deterministic, tiles=tiles
        )
        torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)
        assert not got[1:].any()


H100 = Card("H100", (9, 0), 132, 232448, 50 << 20, 80 << 30)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rule", [ScoreRule(0.1), ScoreRule(0.1, window=150)])
@pytest.mark.parametrize(
    ("queries", "step"),
    [
        (2, Step((2, 1, 1, 0), (300, 40, 0, 0))),
        (4, Step((3, 1), (300, 0))),
        (8, Step((7, 2, 7), (300, 9, 0))),
        (8, Step((8, 0), (290, 0))),
    ],
)
def test_captured_steps_of_several_tokens_equal_single_ones(
    queries: int, step: Step, rule: ScoreRule, deterministic: bool, device: torch.device
) -> None:
    """The tiles are those of a real card, for longer contexts than the step has. Requests without context are padding.

    With `deterministic`, each token has the bits of a captured step of one token.
    """
    shape = Shape(8, 2, 128, torch.bfloat16)
    pool, tables = filled(shape, step.contexts)
    q = torch.randn(step.starts[-1], 8, 128).bfloat16()
    card = H100 if device.type == "cpu" else read_card(0)
    sizes = tile_queries([_mixer(q, pool)], card, deterministic=deterministic)

    def computed(rows: Tensor, own: Tensor, part: Step, tiles: Tiles) -> Tensor:
        return run_attention(
            rows, pool, own, part, rule, None, device, deterministic=deterministic, tiles=tiles, card=card
        )

    got = computed(q, tables, step, padded_tiles(step.starts, len(step.counts) - 1, queries, 1024, sizes))
    real = sum(count for count, context in zip(step.counts, step.contexts, strict=True) if context)
    starts, contexts = torch.tensor(step.starts), torch.tensor(step.contexts)
    want = reference.batch_attention(q.float(), pool, tables, starts, contexts, rule)
    torch.testing.assert_close(got[:real].float(), want[:real], rtol=1e-2, atol=1e-2)
    assert not got[real:].any()
    for request, context in enumerate(step.contexts if deterministic else ()):
        for token in range(step.starts[request], step.starts[request + 1] if context else 0):
            single = Step((1,), (context - step.starts[request + 1] + token + 1,))
            alone = computed(q[token : token + 1], tables[request : request + 1], single, decode_tiles(1, 1024, sizes))
            assert torch.equal(got[token], alone[0])


@pytest.mark.share(2)
@pytest.mark.parametrize("rule", [ScoreRule(0.2), ScoreRule(0.2, 4.0, 37)])
@pytest.mark.parametrize("pool_type", [torch.bfloat16, torch.uint8])
def test_bits_do_not_depend_on_chunks_and_batches(
    rule: ScoreRule, pool_type: torch.dtype, device: torch.device
) -> None:
    """Compares a whole prompt in one program, which merges its partial results, with chunks beside other requests and
    with single tokens.
    """
    shape, context = Shape(4, 1, 32, pool_type), 83
    pool, tables = filled(shape, (context, 70))
    q, sinks = torch.randn(context, 4, 32).bfloat16(), torch.randn(4)
    other = torch.randn(40, 4, 32).bfloat16()

    def computed(start: int, stop: int, others: int, card: Card = CARD) -> Tensor:
        step = Step((others, stop - start), (70, stop))
        queries = torch.cat((other[:others], q[start:stop]))
        own = run_attention(queries, pool, tables.flip(0), step, rule, sinks, device, deterministic=True, card=card)
        return own[others:]

    whole = computed(0, context, 0, replace(CARD, multiprocessors=1))
    for chunk, others in ((17, 0), (5, 40), (3, 1)):
        at = context - context % chunk - chunk
        assert torch.equal(computed(at, at + chunk, others), whole[at : at + chunk])
    for at in (0, 31, 32, 63, 64, context - 1):
        assert torch.equal(computed(at, at + 1, 1)[0], whole[at])
