"""Families: several requests with one prompt, which is prefilled once and whose blocks are shared."""

import random

import pytest

from engine.config import BLOCK_SIZE, GroupConfig
from engine.request import FinishReason, Origin, RequestStatus, ServiceClass
from engine.step import BlockCopy
from tests.engine.hash_run import Run
from tests.support.hash_model import hash_engine

GROUPS = [(GroupConfig(),), (GroupConfig(), GroupConfig(window=24), GroupConfig(recurrent=True))]


def prompt_of(length: int) -> tuple[int, ...]:
    rng = random.Random(length)
    return tuple(rng.randrange(5000) for _ in range(length))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 2000])
def test_eight_requests_prefill_their_prompt_once(length: int, groups: tuple[GroupConfig, ...], depth: int) -> None:
    engine, runner = hash_engine(num_blocks=400, depth=depth, groups=groups, budget=256)
    run = Run(engine)
    run.submit(prompt_of(length), count=8, max_tokens=20, ignore_eos=True)
    held = 0
    while engine.has_work:
        run.step()
        pool = engine._scheduler._memory.groups[0].pool
        held = max(held, pool.num_usable - pool.num_free)
    run.run_out()
    run.check()
    assert runner.computed_tokens == length + 8 * 19
    shared, grown = length // BLOCK_SIZE, -(-(length + 20) // BLOCK_SIZE)
    assert held <= shared + 8 * (grown - shared) + 1  # 1 more: the partial block that the copies were made from


@pytest.mark.parametrize("depth", [1, 2])
def test_only_the_partial_block_is_copied(depth: int) -> None:
    engine, runner = hash_engine(num_blocks=100, depth=depth)
    run = Run(engine)
    run.submit(prompt_of(40), count=5, max_tokens=30, ignore_eos=True)
    copies: list[BlockCopy] = []
    launch = runner.launch

    def watched(plan: object) -> object:
        copies.extend(copy for part in plan.scheduled for copy in part.copies)  # type: ignore[attr-defined]
        return launch(plan)  # type: ignore[arg-type]

    runner.launch = watched  # type: ignore[assignment, method-assign]
    run.run_out()
    run.check()
    # 4 if the last request is the only holder of the block by then, 5 if all requests run ahead
    assert len(copies) in (4, 5)
    assert len({copy.source for copy in copies}) == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_without_a_slot_start_from_the_cache_later(depth: int) -> None:
    engine, runner = hash_engine(num_blocks=400, running=3, depth=depth)
    run = Run(engine)
    run.submit(prompt_of(100), count=8, max_tokens=10, ignore_eos=True)
    run.run_out()
    run.check()
    assert runner.computed_tokens == 100 + 3 * 9 + 5 * (100 - 96 + 9)


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("who", range(5))
@pytest.mark.parametrize("depth", [1, 2])
def test_any_request_of_a_family_may_be_aborted_at_any_time(depth: int, who: int, steps: int) -> None:
    """If the aborted request is the leader and still prefills, another request takes over."""
    engine, _ = hash_engine(num_blocks=60, depth=depth, budget=32)
    run = Run(engine)
    first = run.submit(prompt_of(80), count=5, max_tokens=6, ignore_eos=True)
    for _ in range(steps):
        run.step()
    run.abort(first.id + who)
    run.run_out()
    run.check()
    ended = [finish for number, finish in run.finished.items() if number != first.id + who]
    assert ended == [FinishReason.LENGTH] * 4


@pytest.mark.parametrize("site", ["launch", "collect"])
@pytest.mark.parametrize("depth", [1, 2])
def test_failing_step_ends_the_whole_family(depth: int, site: str) -> None:
    engine, runner = hash_engine(depth=depth)
    run = Run(engine)
    run.submit(prompt_of(10), count=3, max_tokens=6, ignore_eos=True)
    original = getattr(runner, site)

    def failing(_: object) -> object:
        setattr(runner, site, original)
        raise RuntimeError("injected")

    setattr(runner, site, failing)
    run.run_out()
    run.check()
    assert set(run.finished.values()) == {FinishReason.ERROR}


def test_followers_wait_with_their_leader() -> None:
    engine, _ = hash_engine(running=1)
    run = Run(engine)
    run.submit((1, 2, 3), max_tokens=30, ignore_eos=True)
    run.step()
    first = run.submit((4, 5, 6), count=3, max_tokens=2)
    run.step()
    assert engine.num_waiting == 3
    assert engine.state().waiting == (0, 3, 0)
    assert first.status is RequestStatus.WAITING
    for event in engine.abort_all():
        run.finished[event.request_id] = FinishReason.ABORT
    engine.assert_empty()
    run.check()


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_wait_for_a_prefix_that_another_is_computing(depth: int) -> None:
    """Six requests share a prefix that is computed once. A request without the prefix is not delayed."""
    engine, runner = hash_engine(num_blocks=400, budget=64, depth=depth)
    run, beginning = Run(engine), prompt_of(1600)
    for number in range(6):
        run.submit((*beginning, *range(number, number + 10)), max_tokens=5, ignore_eos=True)
    other = run.submit(prompt_of(30), max_tokens=2, ignore_eos=True)
    for _ in range(4 + depth):
        run.step()
    assert other.id in run.finished
    run.run_out()
    run.check()
    assert runner.computed_tokens == 1600 + 6 * (10 + 4) + 30 + 1


def test_another_request_continues_an_aborted_prefix() -> None:
    engine, runner = hash_engine(num_blocks=400, budget=64)
    run, beginning = Run(engine), prompt_of(640)
    first, _ = (run.submit((*beginning, number), max_tokens=3, ignore_eos=True) for number in range(2))
    for _ in range(5):
        run.step()
    run.abort(first.id)
    run.run_out()
    run.check()
    assert runner.computed_tokens == 641 + 2


def test_interactive_request_does_not_wait_for_a_background_prefix() -> None:
    engine, _ = hash_engine(num_blocks=400, budget=64)
    run, beginning = Run(engine), prompt_of(640)
    run.submit((*beginning, 1), Origin(ServiceClass.BACKGROUND), max_tokens=3)
    run.step()
    person = run.submit((*beginning, 2), Origin(ServiceClass.INTERACTIVE), max_tokens=3)
    run.step()
    assert person.status is RequestStatus.RUNNING
    run.run_out()
    run.check()


@pytest.mark.parametrize("depth", [1, 2])
def test_families_of_one_prompt_share_its_last_state(depth: int) -> None:
    """A checkpoint state is published once, by the first request that reaches it."""
    engine, _ = hash_engine(num_blocks=400, depth=depth, groups=GROUPS[1], budget=256)
    run = Run(engine)
    for _ in range(2):
        run.submit(prompt_of(256), count=3, max_tokens=20, ignore_eos=True)
        run.step()
    run.run_out()
    run.check()
