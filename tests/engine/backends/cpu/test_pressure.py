"""SmolLM2 with few layers and little memory: swapping, preemption, copies, and sharing do not change replies."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.config import Preemption
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.request import Origin, Request, RequestStatus, ServiceClass
from engine.sampling_params import SamplingParams
from engine.scheduling.priority import MAX_PREEMPTIONS

Asked = tuple[tuple[int, ...], SamplingParams, Origin]


def load(path: Path, code_cache: Path, **options: object) -> ModelEngine:
    with open_checkpoint(path) as checkpoint:
        return load_engine(checkpoint, LoadOptions(backend="cpu", code_cache=code_cache, **options))  # type: ignore[arg-type]


def replies(engine: ModelEngine, asked: Sequence[Asked], *, together: bool) -> list[Request]:
    requests = [engine.request(prompt, params, frozenset({2}), origin) for prompt, params, origin in asked]
    for request in requests:
        engine.add(request)
        while engine.has_work and not together:
            engine.step()
    while engine.has_work:
        engine.step()
    engine.assert_empty()
    return requests


def prompts(rng: random.Random, count: int, most: int) -> list[tuple[int, ...]]:
    return [tuple(rng.randrange(10, 40_000) for _ in range(rng.randrange(8, most))) for _ in range(count)]


def poison_free_blocks(engine: ModelEngine) -> None:
    """Fill every free and empty block of both tiers with NaN."""
    kv, memory = engine._runner._model.kv, engine._scheduler._memory  # type: ignore[attr-defined]
    for pools, books in ((kv.pools, [group.pool for group in memory.groups]), (kv.host_pools, memory.host.pools)):
        for pool, book in zip(pools, books, strict=True):
            pool[list(book._empty)] = torch.nan


@pytest.fixture(scope="module")
def talk(short_smollm2: Path, cpu_kernels: Path) -> tuple[list[Asked], list[list[int]]]:
    """Four requests, and the output of each when run alone."""
    rng = random.Random(1)
    greedy = SamplingParams(temperature=0, max_tokens=24)
    asked = [(prompt, greedy, Origin()) for prompt in prompts(rng, 3, 80)]
    asked.append((asked[0][0], SamplingParams(temperature=1, seed=5, max_tokens=24), Origin()))
    return asked, [it.output_ids for it in replies(load(short_smollm2, cpu_kernels), asked, together=False)]


@pytest.mark.share(1)
@pytest.mark.parametrize("every", range(1, 9))
def test_frequent_swapping_does_not_change_replies(
    short_smollm2: Path, cpu_kernels: Path, talk: tuple[list[Asked], list[list[int]]], every: int
) -> None:
    asked, alone = talk
    engine = load(
        short_smollm2, cpu_kernels, context_length=512, host_cache=64 << 20, preemption=Preemption.SWAP, drafts=False
    )
    requests = [engine.request(prompt, params, frozenset({2}), origin) for prompt, params, origin in asked]
    for request in requests:
        engine.add(request)
    rng, steps = random.Random(every), 0
    while engine.has_work:
        engine.step()
        steps += 1
        running = [it for it in requests if it.status is RequestStatus.RUNNING and it.num_computed]
        if steps % every == 0 and running:
            victim = rng.choice(running)
            victim.num_preemptions = 0  # lets the scheduler preempt the request any number of times
            engine._scheduler._preemption.preempt(victim, victim)
        poison_free_blocks(engine)
    engine.assert_empty()
    assert engine.state().counters.swapped_out >= min(20, 24 // every)
    assert [request.output_ids for request in requests] == alone


@pytest.fixture(scope="module")
def crowd(short_smollm2: Path, cpu_kernels: Path) -> tuple[list[Asked], list[list[int]]]:
    """16 requests, and the output of each when run alone."""
    rng = random.Random(2)
    asked = [
        (
            prompt,
            SamplingParams(temperature=0, max_tokens=rng.randrange(8, 40), ignore_eos=True),
            Origin(rng.choice(list(ServiceClass))),
        )
        for prompt in prompts(rng, 16, 90)
    ]
    return asked, [it.output_ids for it in replies(load(short_smollm2, cpu_kernels), asked, together=False)]


@pytest.mark.share(1)
@pytest.mark.parametrize("preemption", Preemption)
def test_small_pool_serves_all_requests_unchanged(
    short_smollm2: Path, cpu_kernels: Path, crowd: tuple[list[Asked], list[list[int]]], preemption: Preemption
) -> None:
    asked, alone = crowd
    demand = sum(len(prompt) + params.max_tokens for prompt, params, _ in asked if params.max_tokens)
    small = load(short_smollm2, cpu_kernels, context_length=demand // 10, host_cache=64 << 20, preemption=preemption)
    together = replies(small, asked, together=True)
    assert 0 < max(request.num_preemptions for request in together) <= MAX_PREEMPTIONS
    assert [request.output_ids for request in together] == alone


def test_choices_share_their_prompt_and_sample_independently(short_smollm2: Path, cpu_kernels: Path) -> None:
    """Each choice gets the tokens that it gets alone, and the prompt is computed once."""
    (prompt,) = prompts(random.Random(3), 1, 100)
    drawn = [SamplingParams(temperature=1, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(6)]
    engine = load(short_smollm2, cpu_kernels, context_length=1024)
    family = [engine.request(prompt, params, frozenset()) for params in drawn]
    engine.add(*family)
    while engine.has_work:
        engine.step()
        poison_free_blocks(engine)
    engine.assert_empty()
    assert engine.state().counters.computed_tokens == len(prompt) + 6 * 19
    fresh = load(short_smollm2, cpu_kernels)
    for request, params in zip(family, drawn, strict=True):
        (alone,) = replies(fresh, [(prompt, params, Origin(cache_salt=str(params.seed)))], together=False)
        assert request.output_ids == alone.output_ids
    assert len({tuple(request.output_ids) for request in family}) == 6
    assert {request.status for request in family} == {RequestStatus.FINISHED}
