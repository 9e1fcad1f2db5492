"""Preemption: victims, swapping, recomputing, and limits, over the hash model in a pool that is far too small."""

import random

import pytest

from engine.config import GroupConfig, Preemption
from engine.request import FinishReason, Origin, RequestStatus, ServiceClass
from engine.sampling_params import SamplingParams
from engine.scheduling.priority import MAX_PREEMPTIONS
from tests.engine.hash_run import Run
from tests.support.hash_model import hash_engine

INTERACTIVE, NORMAL, BACKGROUND = (Origin(service) for service in ServiceClass)


def fresh_prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(5000) for _ in range(length))


@pytest.mark.share(1, "preemption")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", Preemption)
def test_small_pool_serves_hundreds_of_requests(preemption: Preemption, depth: int, requests: int) -> None:
    """Requests of all classes arrive at once. Each gets the tokens that it would get alone, within MAX_PREEMPTIONS.

    The full run is `--requests 5000`: a thousand requests in each case.
    """
    rng = random.Random(depth)
    engine, _ = hash_engine(
        num_blocks=1 + 24, depth=depth, running=16, budget=64, host_blocks=40, preemption=preemption
    )
    run = Run(engine)
    for _ in range(requests // 5):
        origin = Origin(rng.choice(list(ServiceClass)), rng.randrange(-100, 101))
        run.submit(fresh_prompt(rng, rng.randrange(1, 60)), origin, max_tokens=rng.randrange(1, 60), ignore_eos=True)
    run.run_out()
    run.check()
    assert set(run.finished.values()) == {FinishReason.LENGTH}
    preemptions = [request.num_preemptions for request in run.requests.values()]
    assert 0 < max(preemptions) <= MAX_PREEMPTIONS
    counters = engine.state().counters
    assert counters.swapped_out + counters.recomputed == sum(preemptions)
    assert (counters.swapped_out > 0) == (preemption is Preemption.SWAP) or preemption is Preemption.AUTO


def test_pinned_request_starts_with_all_blocks_and_keeps_them() -> None:
    """The request waits until no other request holds blocks that it may need. After that it is never preempted."""
    engine, _ = hash_engine(num_blocks=1 + 8, budget=200)
    run, rng = Run(engine), random.Random(5)
    other = run.submit(fresh_prompt(rng, 40), max_tokens=30, ignore_eos=True)
    run.step()
    often = engine.request(fresh_prompt(rng, 20), SamplingParams(max_tokens=70, ignore_eos=True), frozenset())
    often.num_preemptions = MAX_PREEMPTIONS - 1
    engine.add(often)
    run.requests[often.id], run.outputs[often.id] = often, []
    while other.id not in run.finished:
        run.step()
        assert often.status is RequestStatus.WAITING
    run.step()
    assert len(engine._scheduler._memory.blocks_of(often).tables[0]) == 6
    run.submit(fresh_prompt(rng, 30), INTERACTIVE, max_tokens=60, ignore_eos=True)
    run.run_out()
    run.check()
    assert often.num_preemptions == MAX_PREEMPTIONS - 1


def test_swapped_requests_resume_without_recomputing() -> None:
    """Both requests outgrow the pool, but no token is computed twice."""
    engine, runner = hash_engine(num_blocks=1 + 6, host_blocks=20, preemption=Preemption.SWAP, budget=200)
    run, rng = Run(engine), random.Random(1)
    for _ in range(2):
        run.submit(fresh_prompt(rng, 40), max_tokens=50, ignore_eos=True)
    run.run_out()
    run.check()
    assert engine.state().counters.swapped_out > 0
    assert runner.computed_tokens == 2 * (40 + 49)


def test_full_host_pool_causes_recomputing() -> None:
    engine, runner = hash_engine(num_blocks=1 + 6, host_blocks=2, preemption=Preemption.SWAP, budget=200)
    run, rng = Run(engine), random.Random(1)
    for _ in range(2):
        run.submit(fresh_prompt(rng, 40), max_tokens=50, ignore_eos=True)
    run.run_out()
    run.check()
    assert engine.state().counters.recomputed > 0
    assert runner.computed_tokens > 2 * (40 + 49)


def test_failing_copies_change_no_token() -> None:
    engine, _ = hash_engine(num_blocks=1 + 6, host_blocks=20, preemption=Preemption.SWAP, budget=200, failing_moves=1.0)
    run, rng = Run(engine), random.Random(1)
    for _ in range(3):
        run.submit(fresh_prompt(rng, 40), max_tokens=50, ignore_eos=True)
    run.run_out()
    run.check()


def test_evicted_prompt_is_found_in_the_host_pool() -> None:
    """Many other requests evict the blocks of a prompt. When it repeats, its blocks are copied back, not computed."""
    engine, _ = hash_engine(num_blocks=1 + 16, host_blocks=200)
    run, rng = Run(engine), random.Random(2)
    prompts = [fresh_prompt(rng, 60) for _ in range(10)]
    for prompt in prompts:
        run.submit(prompt, max_tokens=4, ignore_eos=True)
        run.run_out()
    again = run.submit(prompts[2], max_tokens=4, ignore_eos=True)
    run.run_out()
    run.check()
    assert again.num_cached == 48


def test_higher_class_preempts_lower_class() -> None:
    engine, _ = hash_engine(num_blocks=1 + 8, running=2, host_blocks=20, preemption=Preemption.SWAP)
    run, rng = Run(engine), random.Random(3)
    low = [run.submit(fresh_prompt(rng, 40), BACKGROUND, max_tokens=40, ignore_eos=True) for _ in range(2)]
    for _ in range(5):
        run.step()
    high = run.submit(fresh_prompt(rng, 20), INTERACTIVE, max_tokens=5, ignore_eos=True)
    while high.id not in run.finished:
        run.step()
    assert not any(request.id in run.finished for request in low)
    assert [request.num_preemptions for request in low] == [0, 1]  # the older request keeps its slot
    run.run_out()
    run.check()


def test_requests_of_one_class_do_not_take_slots_from_each_other() -> None:
    engine, _ = hash_engine(running=2, host_blocks=20)
    run, rng = Run(engine), random.Random(4)
    first = [run.submit(fresh_prompt(rng, 20), NORMAL, max_tokens=20, ignore_eos=True) for _ in range(2)]
    run.step()
    run.submit(fresh_prompt(rng, 20), Origin(ServiceClass.NORMAL, priority=100), max_tokens=5)
    run.run_out()
    assert [request.num_preemptions for request in first] == [0, 0]


def test_abort_during_a_copy_releases_all_blocks() -> None:
    """Requests are aborted during swap-out and swap-in. The copies complete later, and no block stays allocated."""
    for steps in range(1, 40):
        engine, _ = hash_engine(
            seed=steps, num_blocks=1 + 6, host_blocks=20, preemption=Preemption.SWAP, budget=200, depth=1 + steps % 2
        )
        run, rng = Run(engine), random.Random(steps)
        requests = [run.submit(fresh_prompt(rng, 40), max_tokens=50, ignore_eos=True) for _ in range(3)]
        for _ in range(8 + steps):
            run.step()
        for request in requests[1:]:
            run.abort(request.id)
        run.run_out()
        run.check()


def test_order_is_class_then_priority_then_age() -> None:
    engine, _ = hash_engine(running=1)
    run = Run(engine)
    wanted: dict[int, str] = {}
    last, second = Origin(ServiceClass.BACKGROUND, priority=100), Origin(priority=5)
    for name, origin in {"last": last, "third": NORMAL, "second": second, "first": INTERACTIVE}.items():
        wanted[run.submit((1, 2, len(wanted)), origin, max_tokens=1).id] = name
    order: list[str] = []
    while engine.has_work:
        done = set(run.finished)
        run.step()
        order += [wanted[number] for number in run.finished if number not in done]
    assert order == ["first", "second", "third", "last"]


def test_background_request_ages_past_interactive_ones() -> None:
    """One background request competes with a stream of interactive ones. The test moves the clock."""
    now = 0.0
    engine, _ = hash_engine(running=1, clock=lambda: now)
    run = Run(engine)
    old = run.submit((1, 2, 3), BACKGROUND, max_tokens=1)
    for second in range(0, 2000, 10):
        now = float(second)
        run.submit((4, 5, second), INTERACTIVE, max_tokens=1)
        run.submit((4, 6, second), INTERACTIVE, max_tokens=1)
        run.step()
        if old.status is RequestStatus.FINISHED:
            break
    assert 600 <= now < 1300


@pytest.mark.share(1, "preemption")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", Preemption)
@pytest.mark.parametrize("seed", range(2))
def test_long_prompts_with_small_steps_all_finish(seed: int, preemption: Preemption, depth: int) -> None:
    """Steps have fewer tokens than there are requests of all classes, and some layers have a window."""
    rng = random.Random(f"{seed} {preemption}")
    engine, _ = hash_engine(
        seed=seed, num_blocks=16, depth=depth, budget=8, running=8, host_blocks=rng.choice([0, 5, 20]),
        groups=(GroupConfig(), GroupConfig(window=24)), preemption=preemption,
    )  # fmt: skip
    run = Run(engine)
    for _ in range(40):
        origin = Origin(rng.choice(list(ServiceClass)), rng.randrange(-100, 101))
        prompt, tokens = fresh_prompt(rng, rng.randrange(120, 200)), rng.randrange(1, 30)
        run.submit(prompt, origin, rng.choice([1, 3]), max_tokens=tokens, ignore_eos=True)
        for _ in range(rng.randrange(20)):
            run.step()
    run.run_out()
    run.check()
