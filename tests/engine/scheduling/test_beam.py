"""Beam search: its results under preemption, aborts, and failures, and its cost."""

import random
from typing import Literal

import pytest

from engine.config import BLOCK_SIZE, GroupConfig, Preemption
from engine.errors import InvalidSampling, OutOfMemory, PromptTooLong
from engine.request import FinishReason, Origin, ServiceClass
from engine.sampling_params import BeamParams, SamplingParams
from engine.scheduling.priority import MAX_PREEMPTIONS
from engine.step import BlockCopy, StepPlan
from tests.engine.hash_run import Run
from tests.support.hash_model import HashRunner, hash_engine

FULL, WINDOW, STATE = GroupConfig(), GroupConfig(window=24), GroupConfig(recurrent=True)
GROUPS = {"full": (FULL,), "windows": (FULL, WINDOW), "hybrid": (FULL, STATE), "all": (FULL, WINDOW, STATE)}
STOPPING: tuple[Literal[True, False, "never"], ...] = (True, False, "never")


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(f"{length} {seed}")
    return tuple(rng.randrange(5000) for _ in range(length))


def some_beams(rng: random.Random, widest: int = 5) -> BeamParams:
    width = rng.randrange(1, widest + 1)
    penalty = rng.choice([0.0, 1.0, 1.0, 2.0, -0.5])
    return BeamParams(width, rng.randrange(1, width + 1), penalty, rng.choice(STOPPING))


@pytest.mark.share(1, "width", "groups")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("stopping", STOPPING)
@pytest.mark.parametrize("width", [1, 2, 5, 16])
def test_results_equal_those_of_a_reference_search(
    width: int, stopping: Literal[True, False, "never"], groups: str, depth: int
) -> None:
    engine, _ = hash_engine(num_blocks=400, depth=depth, groups=GROUPS[groups], running=16)
    run = Run(engine)
    for seed in range(8):
        beams = BeamParams(width, (width + 1) // 2, (0.0, 1.0, 2.0, -1.0)[seed % 4], stopping)
        results = run.search(prompt_of(10 + 7 * seed), beams, max_tokens=12, min_tokens=3 * (seed // 4))
        run.run_out()
        assert len(run.groups[results[0].id].policy.hypotheses) == width
    run.check()
    assert width < 5 or FinishReason.STOP in run.finished.values()


@pytest.mark.share(1, "groups")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", Preemption)
@pytest.mark.parametrize("groups", GROUPS)
def test_beam_searches_share_a_small_pool_with_other_requests(groups: str, preemption: Preemption, depth: int) -> None:
    """Searches, families, and single requests of all classes, with aborts and copies that end late or fail."""
    rng = random.Random(f"{groups} {preemption} {depth}")
    engine, _ = hash_engine(
        seed=rng.randrange(1 << 30), num_blocks=26, depth=depth, budget=32, running=16, groups=GROUPS[groups],
        host_blocks=20, preemption=preemption, failing_moves=0.05,
    )  # fmt: skip
    run, folded = Run(engine), 0
    while len(run.requests) < 150 or engine.has_work:
        if len(run.requests) < 150 and rng.random() < 0.3:
            origin = Origin(rng.choice(list(ServiceClass)), rng.randrange(-100, 101))
            prompt, most = prompt_of(rng.randrange(1, 70), rng.randrange(4)), rng.randrange(1, 50)
            if rng.random() < 0.5:
                run.search(prompt, some_beams(rng), origin, max_tokens=most, ignore_eos=rng.random() < 0.5)
            else:
                run.submit(prompt, origin, rng.choice([1, 1, 3]), max_tokens=most, ignore_eos=True)
        if rng.random() < 0.02:
            run.abort(rng.randrange(1, len(run.requests) + 2))
        requests = engine._scheduler._requests
        folds = [it.num_preemptions for it in requests.running.values() if requests.group_of(it)]
        folded = max([folded, *folds])
        assert engine.num_running <= engine.config.max_running
        run.step()
    engine.assert_empty()
    run.check()
    assert 0 < folded <= MAX_PREEMPTIONS


@pytest.mark.share(1, "groups")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", GROUPS)
def test_search_completes_in_the_least_memory_that_is_accepted(groups: str, depth: int) -> None:
    rng = random.Random(groups)
    for _ in range(12):
        beams = some_beams(rng, 4)
        prompt, tokens = prompt_of(rng.randrange(1, 60)), rng.randrange(1, 40)
        for num_blocks in range(2, 60):
            engine, _ = hash_engine(num_blocks=num_blocks, depth=depth, groups=GROUPS[groups], budget=16)
            run = Run(engine)
            try:
                run.search(prompt, beams, max_tokens=tokens, ignore_eos=True)
            except PromptTooLong:
                continue
            run.run_out()
            run.check()
            break
        else:
            pytest.fail("it never fits")


def test_often_preempted_search_runs_alone_until_it_ends() -> None:
    engine, _ = hash_engine(num_blocks=200)
    run = Run(engine)
    results = run.search(prompt_of(20), BeamParams(4, 2), max_tokens=20, ignore_eos=True)
    group, requests = run.groups[results[0].id], engine._scheduler._requests
    run.submit(prompt_of(30), Origin(ServiceClass.INTERACTIVE), max_tokens=10, ignore_eos=True)
    group.requests[0].num_preemptions = MAX_PREEMPTIONS - 1
    run.step()
    run.submit(prompt_of(40), Origin(ServiceClass.INTERACTIVE), max_tokens=10, ignore_eos=True)
    while engine.has_work:
        running = list(requests.running.values())
        groups = {requests.group_of(request) for request in running}
        assert group not in groups or groups == {group}
        assert not any(engine._scheduler._preemption.preempt(it, it) for it in running if requests.group_of(it))
        run.step()
    run.check()


def test_oldest_search_is_never_preempted() -> None:
    """A request that was preempted so often that it comes first in the order does not preempt the oldest search."""
    engine, _ = hash_engine(num_blocks=1 + 14)
    run = Run(engine)
    results = run.search(prompt_of(30), BeamParams(4), Origin(ServiceClass.INTERACTIVE), max_tokens=30, ignore_eos=True)
    other = run.submit(prompt_of(110), max_tokens=60, ignore_eos=True)
    other.num_preemptions = MAX_PREEMPTIONS - 3
    while results[0].id not in run.finished:
        run.step()
        assert not any(request.num_preemptions for request in run.groups[results[0].id].requests)
    assert other.num_preemptions > MAX_PREEMPTIONS - 3
    run.run_out()
    run.check()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("who", [0, 2])
def test_aborting_one_result_ends_all(who: int, depth: int) -> None:
    for steps in range(16):
        engine, _ = hash_engine(seed=steps, num_blocks=20, depth=depth, budget=8)
        run = Run(engine)
        results = run.search(prompt_of(20), BeamParams(4, 3), max_tokens=8, ignore_eos=True)
        other = run.submit(prompt_of(30), max_tokens=8, ignore_eos=True)
        for _ in range(steps):
            run.step()
        run.abort(results[who].id)
        run.abort(results[0].id)
        run.run_out()
        run.check()
        assert run.finished[other.id] is FinishReason.LENGTH


def test_abort_all_ends_every_result() -> None:
    for steps in range(12):
        engine, _ = hash_engine(seed=steps, num_blocks=20, depth=2, budget=8)
        run = Run(engine)
        for seed in range(3):
            run.search(prompt_of(20, seed), BeamParams(4, 3), max_tokens=30, ignore_eos=True)
        for _ in range(steps):
            run.step()
        assert {event.request_id for event in engine.abort_all()} == run.requests.keys()
        engine.assert_empty()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("site", ["launch", "collect"])
def test_failing_step_ends_only_its_searches(site: str, depth: int) -> None:
    for call in range(1, 9):
        engine, runner = hash_engine(depth=depth, budget=10, running=9)
        run = Run(engine)
        run.search(prompt_of(20, 1), BeamParams(4, 2), max_tokens=6, ignore_eos=True)
        run.search(prompt_of(20, 2), BeamParams(4, 2), max_tokens=6, ignore_eos=True)
        run.submit(prompt_of(20, 3), max_tokens=6, ignore_eos=True)
        fail_at(runner, site, call, RuntimeError("injected"))
        run.run_out()
        run.check()
        assert FinishReason.ERROR in run.finished.values()
        run.search(prompt_of(20, 1), BeamParams(4, 2), max_tokens=6)
        run.run_out()
        run.check()


@pytest.mark.share(1, "groups", "site")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("site", ["launch", "collect"])
@pytest.mark.parametrize("groups", GROUPS)
def test_steps_out_of_memory_do_not_change_results(groups: str, site: str, depth: int) -> None:
    for every in range(2, 9):
        engine, runner = hash_engine(seed=every, num_blocks=24, depth=depth, budget=24, groups=GROUPS[groups])
        run = Run(engine)
        for seed in range(3):
            run.search(prompt_of(30, seed), BeamParams(4, 2), max_tokens=14, ignore_eos=True)
        fail_at(runner, site, every, OutOfMemory("injected"), repeat=True)
        run.run_out()
        run.check()
        assert set(run.finished.values()) == {FinishReason.LENGTH}


def fail_at(runner: HashRunner, site: str, call: int, error: Exception, *, repeat: bool = False) -> None:
    """Make call number `call` fail or, with `repeat`, every `call`-th one."""
    original, calls = getattr(runner, site), 0

    def failing(argument: object) -> object:
        nonlocal calls
        calls += 1
        if calls % call == 0 and (repeat or calls == call):
            raise error
        return original(argument)

    setattr(runner, site, failing)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)])
def test_prompt_is_prefilled_once_and_full_blocks_are_shared(groups: tuple[GroupConfig, ...], depth: int) -> None:
    width, length, tokens = 8, 2000, 40
    engine, runner = hash_engine(num_blocks=400, depth=depth, groups=groups, budget=256)
    run = Run(engine)
    run.search(prompt_of(length), BeamParams(width), max_tokens=tokens, ignore_eos=True)
    copies: list[tuple[BlockCopy, int]] = []
    launch = runner.launch

    def watched(plan: StepPlan) -> object:
        copies.extend((copy, part.start) for part in plan.scheduled for copy in part.copies)
        return launch(plan)

    runner.launch = watched  # type: ignore[assignment, method-assign]
    held = 0
    while engine.has_work:
        run.step()
        held = max(held, engine.state().kv_blocks_held)
    run.check()
    assert runner.computed_tokens == length + width * (tokens - 1)
    assert copies
    # only partial blocks are copied: the next token is written to them
    assert all(start % BLOCK_SIZE for _, start in copies)
    shared, grown = length // BLOCK_SIZE, -(-(length + tokens) // BLOCK_SIZE)
    assert held <= shared + width * (grown - shared) + width


def test_preempted_search_shares_the_common_prefix_again() -> None:
    engine, runner = hash_engine(num_blocks=200, budget=256)
    run = Run(engine)
    results = run.search(prompt_of(1000), BeamParams(8), max_tokens=30, ignore_eos=True)
    for _ in range(20):
        run.step()
    group = run.groups[results[0].id]
    assert len(group.requests) == 8
    before = engine.state().kv_blocks_held
    engine._scheduler._preemption.preempt(group.requests[0], group.requests[0])
    assert engine.state().kv_blocks_held == 0
    assert engine.num_waiting == 1
    computed = runner.computed_tokens
    for _ in range(3):
        run.step()
    assert engine.state().kv_blocks_held <= before + 8
    assert runner.computed_tokens - computed < 200  # the prompt was in the cache
    run.run_out()
    run.check()


def test_running_search_reserves_slots_for_its_beams() -> None:
    engine, _ = hash_engine(running=5, num_blocks=200)
    run = Run(engine)
    run.search(prompt_of(20, 1), BeamParams(4), max_tokens=10, ignore_eos=True)
    run.search(prompt_of(20, 2), BeamParams(4), max_tokens=10, ignore_eos=True)
    for seed in range(4):
        run.submit(prompt_of(20, 3 + seed), max_tokens=10, ignore_eos=True)
    while engine.has_work:
        run.step()
        assert engine.num_running <= 5
    run.check()


def test_search_that_never_fits_is_rejected_with_the_numbers() -> None:
    engine, _ = hash_engine(running=4, num_blocks=11)
    with pytest.raises(InvalidSampling, match=r"needs 5 slots, but there are 4") as caught:
        engine.search((1, 2), SamplingParams(beams=BeamParams(5)), frozenset())
    assert caught.value.parameter == "width"
    prompt = prompt_of(40)
    with pytest.raises(PromptTooLong, match=r"width 4 after a prompt of 40 tokens leaves space for 24 tokens"):
        engine.search(prompt, SamplingParams(beams=BeamParams(4), max_tokens=25), frozenset())
    with pytest.raises(PromptTooLong):
        engine.search(prompt_of(150), SamplingParams(beams=BeamParams(4)), frozenset())
    run = Run(engine)
    # the longest reply that fits, because max_tokens is not set
    (result,) = run.search(prompt, BeamParams(4), ignore_eos=True)
    run.run_out()
    run.check()
    assert len(result.output_ids) == 24
    with pytest.raises(InvalidSampling, match="vocabulary"):
        engine.search(prompt, SamplingParams(beams=BeamParams(4), max_tokens=1), frozenset(range(4998)))


@pytest.mark.parametrize(
    ("parameter", "values"),
    [
        ("width", {"width": 0}),
        ("width", {"width": 17}),
        ("results", {"width": 2, "results": 3}),
        ("results", {"width": 2, "results": 0}),
        ("length_penalty", {"width": 2, "length_penalty": float("nan")}),
        ("length_penalty", {"width": 2, "length_penalty": 11.0}),
    ],
)
def test_error_names_out_of_range_values(parameter: str, values: dict[str, float]) -> None:
    with pytest.raises(InvalidSampling) as caught:
        BeamParams(**values)  # type: ignore[arg-type]
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    "shaping",
    [
        {"logit_bias": ((1, 1.0),)},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
    ],
)
def test_parameters_that_shape_logits_are_rejected(shaping: dict[str, object]) -> None:
    with pytest.raises(InvalidSampling) as caught:
        SamplingParams(beams=BeamParams(2), **shaping)  # type: ignore[arg-type]
    assert [caught.value.parameter] == list(shaping)
    SamplingParams(beams=BeamParams(2), temperature=2, top_k=3, top_p=0.5, min_p=0.1)


def test_logprobs_of_a_sequence_add_up_to_its_score() -> None:
    engine, _ = hash_engine()
    results = engine.search(
        prompt_of(20), SamplingParams(beams=BeamParams(3, 2), max_tokens=7, logprobs=9), frozenset({1})
    )
    engine.add(*results)
    group = engine._scheduler._requests.group_of(results[0])
    assert group
    events = []
    while engine.has_work:
        events += engine.step()
    engine.assert_empty()
    for result in results:
        told = [event for event in events if event.request_id == result.id and event.token_id is not None]
        assert [event.token_id for event in told] == result.output_ids
        reports = [event.logprobs for event in told if event.logprobs]
        assert [report.token_id for report in reports] == result.output_ids
        assert all(len(report.top) == 9 for report in reports)
        hypothesis = group.policy.hypotheses[results.index(result)]
        total = sum(report.logprob for report in reports)
        assert hypothesis.score == pytest.approx(total / len(result.output_ids))
