"""Decode steps in the middle of a reply call the driver as little as possible. The driver here does nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.backends.cuda.gpu import CAPTURE_PRIORITY
from engine.backends.cuda.graph_sizes import GraphSize, GraphSizes
from engine.backends.cuda.step import largest_batch
from engine.loading import ModelEngine
from engine.sampling_params import SamplingParams
from tests.engine.backends.cuda.idle_card import Counts, IdleCard, without_compilation
from tests.engine.models.tiny_llama import make
from tests.support import random_gguf

LAYERS = 2
# lower these numbers if a step takes fewer; they must not grow
# kernels of a captured step, without products of a library; the last two are the embedding, for which torch takes two
# kernels, and the norm before the head
LAYER_LAUNCHES, OTHER_LAUNCHES = 5, 2
ROW_LAUNCHES = 5  # of a layer for one token: attention and four products
QUANTIZED = random_gguf.Shape(LAYERS, 256, 4, 2, 64, 256, 272)
PEAK_LAUNCHES, DRAW_LAUNCHES = 2, 3  # of logits: the largest of chunks, and greedy tokens or the two kernels of draws
STEADY_LAUNCHES = 1  # outside of the graph, which inserts pending tokens
TRANSFERS = 2  # the batch with the parameters of draws to the card, and tokens to the host
WARM_UP = 6  # steps until a reply is under way


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> IdleCard:
    fake = IdleCard()
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def engine(card: IdleCard, tmp_path: Path) -> ModelEngine:
    """An engine without drafts: whether one pays depends on the time that a step of this card takes."""
    path = make(tmp_path, heads=2, kv_heads=1, layers=LAYERS).path
    with without_compilation():
        return card.engine(path, context_length=64, drafts=False)


def steady(card: IdleCard, engine: ModelEngine, requests: int, steps: int, temperature: float = 0.0) -> list[Counts]:
    """Return the counts of decode steps in the middle of replies."""
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    for number in range(requests):
        engine.add(engine.request((1, 2, 3 + number), params, frozenset()))
    for _ in range(WARM_UP):
        engine.step()
    found = []
    for _ in range(steps):
        with card.counting() as counts:
            engine.step()
        found.append(counts)
    return found


def test_all_graphs_of_an_engine_use_one_stream(card: IdleCard, engine: ModelEngine) -> None:
    steady(card, engine, 1, 1)
    assert card.streams == [(0, CAPTURE_PRIORITY)]
    assert len(card.captured) > 1


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steady_step_replays_a_graph_and_neither_captures_nor_allocates(
    requests: int, temperature: float, card: IdleCard, engine: ModelEngine
) -> None:
    steps = steady(card, engine, requests, 5, temperature)
    for counts in steps:
        assert counts.calls == {"replay": 1, "record": 1, "wait": 1}
        assert (counts.streams, counts.launches, counts.transfers) == (0, STEADY_LAUNCHES, TRANSFERS)
    # equal steps allocate equal tensors, which the allocator serves from its cache
    assert all(it.operations == steps[0].operations for it in steps)


def test_launches_of_a_captured_step_do_not_grow(card: IdleCard, engine: ModelEngine) -> None:
    engine.assert_empty()
    assert max(card.captured) == LAYERS * LAYER_LAUNCHES + OTHER_LAUNCHES + DRAW_LAUNCHES
    # a load captures all graphs twice: to measure their memory before the KV cache is allocated, and to use them
    assert len(card.captured) == 2 * len(GraphSizes(GraphSize(128, 64)).largest_first)


def test_step_of_one_token_launches_only_products_and_attention(card: IdleCard, tmp_path: Path) -> None:
    random_gguf.write(path := tmp_path / "random.gguf", "Q4_K", QUANTIZED)
    with without_compilation():
        card.engine(path, context_length=64, drafts=False)
    others = 3 + DRAW_LAUNCHES  # the embedding, the first norm, and the head
    assert min(card.captured) == LAYERS * ROW_LAUNCHES + others
    assert max(card.captured) > min(card.captured) + LAYERS * 3


@pytest.mark.parametrize("counts", [[2], [3], [8], [4, 1], [2] * 8])
def test_step_that_verifies_drafts_replays_a_graph(card: IdleCard, engine: ModelEngine, counts: list[int]) -> None:
    runner: Any = engine._runner
    batch, captures = largest_batch(sum(counts), len(counts), 1), len(card.captured)
    starts = [sum(counts[:number]) for number in range(len(counts) + 1)]
    batch = replace(batch, query_starts=starts, context_lengths=counts, logit_rows=range(sum(counts)))
    for captured in (True, True, False):
        with card.counting() as found:
            runner._step.launch(batch, kept=not captured)
        launches = 0 if captured else LAYERS * LAYER_LAUNCHES + OTHER_LAUNCHES + PEAK_LAUNCHES
        assert found.launches == launches
        assert found.calls == ({"replay": 1} if captured else {})
        assert found.transfers == 1
        allocations = sum(count for name, count in found.operations.items() if name.startswith("empty"))
        assert (allocations == 0) == captured
    assert len(card.captured) == captures
