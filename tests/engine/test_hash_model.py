"""The real scheduler, block pool, and engine over the hash model, which reveals every wrong token.

The full run is `pytest tests/engine/test_hash_model.py --requests 10000`.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from engine.config import BLOCK_SIZE, CHECKPOINT_TOKENS, GroupConfig, Preemption
from engine.request import FinishReason, Origin, ServiceClass
from engine.sampling_params import SamplingParams
from engine.scheduling.priority import MAX_PREEMPTIONS
from tests.engine.hash_run import Run
from tests.support.hash_model import hash_engine


@dataclass
class Load:
    """A stream of prompts that share prefixes, which end near block boundaries."""

    random: random.Random
    beginnings: list[list[int]] = field(default_factory=list)

    def prompt(self) -> tuple[int, ...]:
        """Return a new prompt, an old one, or an old one cut near a block boundary and extended."""
        if not self.beginnings or self.random.random() < 0.2:
            prompt = [self.random.randrange(5000) for _ in range(self.random.randrange(1, 5 * BLOCK_SIZE))]
        else:
            old = self.random.choice(self.beginnings)
            blocks = self.random.randrange(1, len(old) // BLOCK_SIZE + 2)
            cut = blocks * BLOCK_SIZE + self.random.choice([-1, 0, 0, 1])
            more = self.random.choice([0, 0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, 20])
            prompt = old[:cut] + [self.random.randrange(5000) for _ in range(more)]
        self.beginnings = [*self.beginnings[-30:], prompt]
        return tuple(prompt)

    def arrivals(self) -> Iterator[tuple[int, ...]]:
        """Yield the prompts that arrive before one step: often none, sometimes one prompt twice."""
        for _ in range(self.random.choice([0, 0, 0, 1, 1, 2, 3])):
            prompt = self.prompt()
            yield prompt
            if self.random.random() < 0.2:
                yield prompt


FULL, WINDOW, STATE = GroupConfig(), GroupConfig(window=24), GroupConfig(recurrent=True)
GROUPS = {
    "full": (FULL,),
    "windows": (FULL, WINDOW, GroupConfig(window=40)),
    "hybrid": (FULL, STATE),
    "all": (FULL, WINDOW, STATE),
    "recurrent": (STATE,),
}


@pytest.mark.share(1, "groups", "preemption")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", Preemption)
@pytest.mark.parametrize("groups", GROUPS)
def test_random_load_with_preemption_and_aborts_gives_no_wrong_token(
    groups: str, preemption: Preemption, depth: int, requests: int
) -> None:
    """Families, classes, aborts, both kinds of preemption, and copies that end late, out of order, or fail."""
    rng = random.Random(f"{groups} {preemption} {depth}")
    engine, _ = hash_engine(
        seed=rng.randrange(1 << 30), num_blocks=26, depth=depth, budget=48, groups=GROUPS[groups], host_blocks=20,
        preemption=preemption, failing_moves=0.05,
    )  # fmt: skip
    run, load = Run(engine), Load(rng)
    while len(run.requests) < requests // 30:
        for prompt in load.arrivals():
            origin = Origin(rng.choice(list(ServiceClass)), rng.randrange(-100, 101))
            count = rng.choice([1, 1, 1, 2, 5])
            run.submit(prompt, origin, count, max_tokens=rng.randrange(1, 60), ignore_eos=rng.random() < 0.8)
        if rng.random() < 0.1:
            run.abort(rng.randrange(1, len(run.requests) + 2))
        run.step()
    run.run_out()
    run.check()
    assert max(request.num_preemptions for request in run.requests.values()) <= MAX_PREEMPTIONS


@pytest.mark.share(1, "num_blocks")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [24, 200])
def test_scarce_and_ample_blocks_give_no_wrong_token(depth: int, num_blocks: int, requests: int) -> None:
    rng = random.Random(depth * 1000 + num_blocks)
    engine, _ = hash_engine(seed=rng.randrange(1 << 30), num_blocks=num_blocks, depth=depth, budget=48)
    run, load = Run(engine), Load(rng)
    while len(run.requests) < requests // 4:
        for prompt in load.arrivals():
            run.submit(prompt, max_tokens=rng.randrange(1, 40), ignore_eos=rng.random() < 0.8)
        if rng.random() < 0.1:
            run.abort(rng.randrange(1, len(run.requests) + 2))
        run.step()
    run.run_out()
    run.check()
    preemptions = sum(request.num_preemptions for request in run.requests.values())
    assert (preemptions > 0) == (num_blocks == 24)
    assert sum(request.num_cached for request in run.requests.values()) > 0
    assert any(finish is FinishReason.ABORT for finish in run.finished.values())
    assert any(finish is FinishReason.STOP for finish in run.finished.values())


def test_oracle_detects_a_wrong_block() -> None:
    """One slot of the cache is overwritten, and the output changes."""
    engine, runner = hash_engine()
    run = Run(engine)
    request = run.submit(tuple(range(10, 50)), max_tokens=20)
    run.step()
    runner.pools[0][engine._scheduler._memory.blocks_of(request).tables[0][1]][3] = b"stale"
    run.run_out()
    with pytest.raises(AssertionError, match="1"):
        run.check()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("length", [BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 300])
def test_repeated_prompt_is_taken_from_the_cache(groups: str, depth: int, length: int) -> None:
    engine, runner = hash_engine(depth=depth, groups=GROUPS[groups])
    run = Run(engine)
    prompt = tuple(range(100, 100 + length))
    for _ in range(2):
        run.submit(prompt, max_tokens=1)
        run.run_out()
    run.check()
    first, second = run.requests.values()
    assert first.num_cached == 0
    assert second.num_cached == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert runner.computed_tokens == 2 * length - second.num_cached


@pytest.mark.parametrize("depth", [1, 2])
def test_diverging_prompt_resumes_from_the_last_checkpoint_state(depth: int) -> None:
    """A prompt that diverges from an earlier one resumes from the last state before the difference."""
    engine, _ = hash_engine(depth=depth, groups=GROUPS["all"], num_blocks=200)
    run = Run(engine)
    prompt = tuple(range(1000, 1700))
    run.submit(prompt, max_tokens=1)
    run.run_out()
    branch = run.submit((*prompt[:600], 1, 2, 3), max_tokens=1)
    run.run_out()
    run.check()
    assert branch.num_cached == 2 * CHECKPOINT_TOKENS


def test_generated_tokens_are_cached() -> None:
    engine, _ = hash_engine()
    run = Run(engine)
    first = run.submit(tuple(range(20)), max_tokens=30, ignore_eos=True)
    run.run_out()
    second = run.submit((*first.prompt_ids, *first.output_ids, 7, 8), max_tokens=2)
    run.run_out()
    run.check()
    assert second.num_cached == 3 * BLOCK_SIZE  # 49 of the 50 tokens have keys and values, which fill 3 blocks


def test_different_salts_share_no_blocks() -> None:
    engine, _ = hash_engine()
    prompt = tuple(range(40))
    requests = []
    for salt in ("", "one", "two", "one"):
        requests.append(engine.request(prompt, SamplingParams(max_tokens=1), frozenset(), Origin(cache_salt=salt)))
        engine.add(requests[-1])
        while engine.has_work:
            engine.step()
    assert [request.num_cached for request in requests] == [0, 0, 0, 32]
    engine.assert_empty()


@pytest.mark.parametrize("depth", [1, 2])
def test_small_pool_serves_all_requests(depth: int) -> None:
    engine, _ = hash_engine(num_blocks=8, depth=depth, running=16, budget=32)
    run = Run(engine)
    rng = random.Random(depth)
    for number in range(60):
        prompt = tuple(rng.randrange(5000) for _ in range(rng.randrange(1, 60)))
        run.submit(prompt, max_tokens=40 if number % 3 else 100 - len(prompt), ignore_eos=True)
    run.run_out()
    run.check()
    assert any(request.num_preemptions for request in run.requests.values())
    assert run.requests[1].num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("site", ["launch", "collect"])
@pytest.mark.parametrize("call", [1, 2, 3, 5, 8])
def test_failing_step_ends_only_its_requests(depth: int, site: str, call: int) -> None:
    engine, runner = hash_engine(depth=depth, running=2)
    run = Run(engine)
    for number in range(6):
        run.submit(tuple(range(number, number + 30)), max_tokens=12, ignore_eos=True)
    original = getattr(runner, site)
    calls = 0

    def failing(argument: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("injected")
        return original(argument)

    setattr(runner, site, failing)
    run.run_out()
    run.check()
    reasons = list(run.finished.values())
    assert 1 <= reasons.count(FinishReason.ERROR) <= 2
    assert reasons.count(FinishReason.LENGTH) == 6 - reasons.count(FinishReason.ERROR)
    run.submit((1, 2, 3), max_tokens=3)
    run.run_out()
    run.check()


def test_abort_all_releases_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = hash_engine(depth=2, num_blocks=10)
    run = Run(engine)
    for number in range(20):
        run.submit(tuple(range(number, number + 20)), max_tokens=50)
    for _ in range(5):
        run.step()
    ended = engine.abort_all()
    assert {event.request_id for event in ended} == run.requests.keys() - run.finished.keys()
    engine.assert_empty()
