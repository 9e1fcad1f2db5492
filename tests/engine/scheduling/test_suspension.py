"""Requests that one engine suspends continue in the next engine of the same model, with the tokens that they have."""

import random

import pytest

from engine.request import FinishReason, Origin, Request, ServiceClass
from engine.scheduling.priority import MAX_PREEMPTIONS
from tests.engine.hash_run import Run
from tests.engine.test_hash_model import GROUPS, Load
from tests.support.hash_model import VOCABULARY, HashRunner, hash_engine


def next_engine(run: Run, runner: HashRunner, *, parks: bool, **options: object) -> HashRunner:
    """Suspend the requests of a run, and resume them in another engine. If the first one `parks`, with its cache."""
    events, requests = run.engine.suspend()
    run.record(events)
    assert {request.id for request in requests} == run.requests.keys() - run.finished.keys()
    index = run.engine._scheduler.device_pools
    run.engine.assert_empty()
    run.engine.close()
    engine, after = hash_engine(**options)  # type: ignore[arg-type]
    if parks:
        after.pools = runner.pools
        engine.adopt(index)
    engine.continue_ids(run.engine)
    run.engine = engine
    run.record(engine.resume(requests))
    return after


@pytest.mark.share(1, "groups")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", GROUPS)
def test_random_load_over_several_engines_gives_no_wrong_token(groups: str, depth: int) -> None:
    """With families, grown prompts, preempted requests, and drafts, and with the cache parked or dropped."""
    rng = random.Random(f"{groups} {depth}")
    options = {"num_blocks": 26, "depth": depth, "budget": 48, "groups": GROUPS[groups], "host_blocks": 20}
    engine, runner = hash_engine(**options, drafts=True)  # type: ignore[arg-type]
    run, load, engines = Run(engine), Load(rng), 1
    while len(run.requests) < 150:
        for prompt in load.arrivals():
            origin = Origin(rng.choice(list(ServiceClass)))
            run.submit(prompt, origin, rng.choice([1, 1, 3]), max_tokens=rng.randrange(1, 60), ignore_eos=True)
        run.step()
        if rng.random() < 0.1:
            engines += 1
            runner = next_engine(run, runner, parks=rng.random() < 0.7, drafts=True, seed=engines, **options)
    run.run_out()
    run.check()
    assert engines > 3


def computed(run: Run, request: Request, *, parks: bool) -> int:
    """Suspend a run, and return how many tokens the next engine computes for the rest of its only request."""
    runner = run.engine._runner
    assert isinstance(runner, HashRunner)
    next_engine(run, runner, parks=parks)
    known = request.num_tokens
    run.run_out()
    run.check()
    return run.engine.state().counters.computed_tokens - (request.num_tokens - known)


def test_parked_blocks_are_not_computed_again() -> None:
    counts = []
    for parks in (True, False):
        engine, _ = hash_engine()
        run = Run(engine)
        request = run.submit(tuple(range(100, 300)), max_tokens=50, ignore_eos=True)
        while len(request.output_ids) < 20:
            run.step()
        cached = request.num_cached
        counts.append(computed(run, request, parks=parks))
        assert request.num_cached == cached  # as reported when it first started
        assert request.queue_seconds >= 0
    assert counts[0] <= 16
    assert counts[1] >= 219


def test_request_that_is_longer_than_the_next_context_ends() -> None:
    engine, runner = hash_engine()
    run = Run(engine)
    long, short = (run.submit(tuple(range(100, 100 + count)), max_tokens=300, ignore_eos=True) for count in (100, 20))
    while len(short.output_ids) < 50:
        run.step()
    next_engine(run, runner, parks=True, context=120)
    assert run.finished == {long.id: FinishReason.LENGTH}
    run.run_out()
    assert run.finished[short.id] is FinishReason.LENGTH
    assert short.num_tokens == 120


def test_request_of_a_larger_vocabulary_ends_with_an_error() -> None:
    engine, _ = hash_engine()
    run = Run(engine)
    request = run.submit((5, VOCABULARY - 1), max_tokens=30, ignore_eos=True)
    run.step()
    _, requests = run.engine.suspend()
    engine, _ = hash_engine()
    engine.vocab_size = VOCABULARY - 1
    [event] = engine.resume(requests)
    assert (event.request_id, event.finish) == (request.id, FinishReason.ERROR)
    assert not engine.has_requests


def test_suspension_is_no_preemption() -> None:
    """A request that is preempted often gets all blocks that it may need. Suspensions do not count."""
    engine, runner = hash_engine()
    run = Run(engine)
    request = run.submit(tuple(range(100, 120)), max_tokens=60, ignore_eos=True)
    for _ in range(2 * MAX_PREEMPTIONS):
        run.step()
        runner = next_engine(run, runner, parks=True)
    run.run_out()
    run.check()
    assert request.num_preemptions == 0
    assert request.num_suspensions > MAX_PREEMPTIONS
