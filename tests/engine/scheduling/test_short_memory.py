"""Steps that run out of memory are retried with fewer tokens. Only a request that cannot run alone ends."""

import random
import weakref
from collections.abc import Callable

import pytest

from engine.config import GroupConfig
from engine.errors import OutOfMemory
from engine.request import FinishReason, Origin, Request, ServiceClass
from engine.sampling_params import SamplingParams
from engine.step import ScheduledRequest, StepLimits, StepPlan
from tests.engine.hash_run import Run
from tests.support.hash_model import HashRunner, HashTicket, hash_engine

GROUPS = (GroupConfig(), GroupConfig(window=24), GroupConfig(recurrent=True))


class StepTensor:
    """Memory that a step allocates."""


def starve(runner: HashRunner, site: str, fails: Callable[[StepPlan], bool]) -> None:
    """Make steps run out of memory when they are launched, or when they are collected."""
    plans: dict[int, StepPlan] = {}
    launch, collect = runner.launch, runner.collect

    def launched(plan: StepPlan) -> HashTicket:
        if site == "launch" and fails(plan):
            raise OutOfMemory("injected")
        ticket = launch(plan)
        plans[id(ticket)] = plan
        return ticket

    def collected(ticket: HashTicket) -> object:
        if site == "collect" and fails(plans[id(ticket)]):
            raise OutOfMemory("injected")
        return collect(ticket)

    runner.launch, runner.collect = launched, collected  # type: ignore[method-assign, assignment]


def mixed_load(depth: int, seed: int) -> tuple[Run, HashRunner]:
    """Run families and single requests of all classes in a pool that is too small, with every kind of group."""
    rng = random.Random(seed)
    engine, runner = hash_engine(seed=seed, num_blocks=24, depth=depth, budget=48, groups=GROUPS, host_blocks=12)
    run = Run(engine)
    for _ in range(12):
        prompt = tuple(rng.randrange(5000) for _ in range(rng.randrange(1, 90)))
        origin = Origin(rng.choice(list(ServiceClass)))
        run.submit(prompt, origin, rng.choice([1, 1, 3]), max_tokens=rng.randrange(1, 30), ignore_eos=True)
    return run, runner


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("site", ["launch", "collect"])
@pytest.mark.parametrize("every", range(3, 12))  # if every second step fails, a step of one token can fail twice
def test_occasional_out_of_memory_changes_no_token(every: int, site: str, depth: int) -> None:
    run, runner = mixed_load(depth, every)
    calls = iter(range(10**9))
    starve(runner, site, lambda _: next(calls) % every == every - 1)
    run.run_out()
    run.check()
    assert set(run.finished.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("depth", [1, 2])
def test_memory_of_a_failed_step_is_free_when_the_runner_recovers(depth: int) -> None:
    run, runner = mixed_load(depth, 0)
    launch, recover = runner.launch, runner.recover
    held: list[weakref.ref[StepTensor]] = []
    alive: list[bool] = []

    def allocate() -> None:
        tensor = StepTensor()
        held.append(weakref.ref(tensor))
        raise MemoryError

    def launched(plan: StepPlan) -> HashTicket:
        if len(held) < 3:
            try:
                allocate()
            except MemoryError as error:
                raise OutOfMemory("injected") from error
        return launch(plan)

    def recovered() -> None:
        alive.extend(tensor() is not None for tensor in held)
        recover()

    runner.launch, runner.recover = launched, recovered  # type: ignore[method-assign]
    run.run_out()
    assert alive
    assert not any(alive)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("site", ["launch", "collect"])
def test_batch_shrinks_to_the_available_memory(site: str, depth: int) -> None:
    run, runner = mixed_load(depth, 0)
    starve(runner, site, lambda plan: plan.num_tokens > 7 or len(plan.scheduled) > 2)
    run.run_out()
    run.check()
    assert set(run.finished.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("site", ["launch", "collect"])
@pytest.mark.parametrize("number", [1, 3, 6])
def test_only_the_request_that_never_fits_fails(number: int, site: str, depth: int) -> None:
    engine, runner = hash_engine(depth=depth)
    run = Run(engine)
    for first in range(6):
        run.submit((first, 2, 3), max_tokens=8, ignore_eos=True)
    starve(runner, site, lambda plan: any(part.request.id == number for part in plan.scheduled))
    run.run_out()
    run.check()
    assert run.finished.pop(number) is FinishReason.ERROR
    assert set(run.finished.values()) == {FinishReason.LENGTH}


def plan(*tokens: int) -> StepPlan:
    return StepPlan(
        tuple(ScheduledRequest(Request(n, (1,), SamplingParams()), 0, count, True) for n, count in enumerate(tokens))
    )


def test_step_limits_halve_and_recover() -> None:
    limits = StepLimits()
    assert limits.halve(plan(5, 6, 7))
    assert limits.requests > 3
    assert limits.halve(plan(5, 6, 7))
    assert limits.requests == 1
    assert limits.halve(plan(5))
    assert limits.tokens == 2
    assert not limits.halve(plan(1))
    for _ in range(40):
        limits.restore()
    assert limits == StepLimits()
