from dataclasses import replace

import pytest

from engine.config import BLOCK_SIZE, EngineConfig
from engine.errors import PromptTooLong
from engine.request import FinishReason, Request, RequestStatus
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.step import SampledToken, StepPlan

END = 99


def config(*, blocks: int = 100, budget: int = 8, running: int = 4, context: int = 1000) -> EngineConfig:
    return EngineConfig("reference", context, blocks, max_step_tokens=budget, max_running=running)


def request(number: int, prompt: int, *, max_tokens: int | None = 4) -> Request:
    """Return a request whose prompt no other request shares."""
    ids = tuple(range(1000 * number, 1000 * number + prompt))
    return Request(number, ids, SamplingParams(max_tokens=max_tokens), frozenset({END}))


def shape(plan: StepPlan) -> list[tuple[int, int]]:
    return [(part.request.id, part.num_tokens) for part in plan.scheduled]


def tokens(plan: StepPlan, token_id: int = 7) -> list[SampledToken]:
    return [SampledToken(part.request.id, token_id) for part in plan.scheduled if part.samples]


def run_out(scheduler: Scheduler) -> list[list[tuple[int, int]]]:
    """Run steps until no work is left, and return the shape of each step."""
    shapes = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan.scheduled
        shapes.append(shape(plan))
        scheduler.update(plan, tokens(plan))
    return shapes


def test_long_prompt_is_prefilled_in_chunks_then_decoded() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request(1, 20, max_tokens=3))
    assert run_out(scheduler) == [[(1, 8)], [(1, 8)], [(1, 4)], [(1, 1)], [(1, 1)]]
    scheduler.assert_empty()


def test_running_requests_come_before_waiting_ones() -> None:
    scheduler = Scheduler(config(budget=8))
    scheduler.add(request(1, 3))
    plan = scheduler.schedule()
    scheduler.update(plan, tokens(plan))
    scheduler.add(request(2, 20))
    scheduler.add(request(3, 2))
    assert shape(scheduler.schedule()) == [(1, 1), (2, 5), (3, 2)]


def test_at_most_max_running_requests_run() -> None:
    scheduler = Scheduler(config(running=2, budget=100))
    for number in range(5):
        scheduler.add(request(number, 4))
    assert [len(step) for step in run_out(scheduler)] == [2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1]


def test_queue_time_ends_with_the_first_slot() -> None:
    seconds = 1000.0
    scheduler = Scheduler(config(running=1, budget=100), clock=lambda: seconds)
    first, second = request(1, 4, max_tokens=1), request(2, 4, max_tokens=1)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(2):
        seconds += 2.5
        plan = scheduler.schedule()
        scheduler.update(plan, tokens(plan))
    assert (first.queue_seconds, second.queue_seconds) == (2.5, 5.0)


def test_request_waits_for_free_blocks() -> None:
    scheduler = Scheduler(config(blocks=1 + 2, budget=100))
    scheduler.add(request(1, BLOCK_SIZE + 1, max_tokens=2))
    scheduler.add(request(2, 3, max_tokens=2))
    assert run_out(scheduler) == [[(1, BLOCK_SIZE + 1)], [(1, 1)], [(2, 3)], [(2, 1)]]
    scheduler.assert_empty()


def test_youngest_request_is_preempted_and_restarts_first() -> None:
    """Two growing requests run out of blocks: the second is preempted, and a third does not overtake it."""
    scheduler = Scheduler(config(blocks=1 + 4, budget=100))
    old, young, third = (request(n, 2 * BLOCK_SIZE - 2, max_tokens=12) for n in (1, 2, 3))
    for it in (old, young, third):
        scheduler.add(it)
    order = [[number for number, _ in step] for step in run_out(scheduler)]
    assert order[0] == [1, 2]
    assert (old.num_preemptions, third.num_preemptions) == (0, 0)
    assert young.num_preemptions == 1
    assert order.index([3]) > max(n for n, ids in enumerate(order) if 2 in ids)
    scheduler.assert_empty()


def test_plan_lists_preempted_requests() -> None:
    scheduler = Scheduler(config(blocks=1 + 2, budget=100))
    old, young = request(1, BLOCK_SIZE - 1, max_tokens=8), request(2, 3, max_tokens=8)
    scheduler.add(old)
    scheduler.add(young)
    plans: list[StepPlan] = []
    while not plans or not plans[-1].preempted:
        plans.append(scheduler.schedule())
        scheduler.update(plans[-1], tokens(plans[-1]))
    assert plans[-1].preempted == (young,)
    assert young.status is RequestStatus.WAITING
    assert scheduler._memory.blocks_of(young).tables == ([],)


def test_requests_of_a_step_under_way_are_not_preempted() -> None:
    """The oldest request waits until the step under way ends, and the younger ones do not run meanwhile."""
    scheduler = Scheduler(config(blocks=1 + 2, budget=100))
    old, young = request(1, BLOCK_SIZE, max_tokens=8), request(2, 3, max_tokens=8)
    scheduler.add(old)
    scheduler.add(young)
    first = scheduler.schedule()
    assert shape(first) == [(1, BLOCK_SIZE), (2, 3)]
    stalled = scheduler.schedule()
    assert (stalled.scheduled, stalled.preempted) == ((), ())
    scheduler.update(first, tokens(first))
    second = scheduler.schedule()
    assert shape(second) == [(1, 1)]
    assert second.preempted == (young,)


def test_second_step_is_planned_before_the_first_is_collected() -> None:
    scheduler = Scheduler(config(budget=8))
    it = request(1, 10, max_tokens=3)
    scheduler.add(it)
    first, second, third = scheduler.schedule(), scheduler.schedule(), scheduler.schedule()
    assert [shape(plan) for plan in (first, second, third)] == [[(1, 8)], [(1, 2)], [(1, 1)]]
    assert [plan.scheduled[0].samples for plan in (first, second, third)] == [False, True, True]
    assert [plan.scheduled[0].needs_pending_token for plan in (first, second, third)] == [False, False, True]
    scheduler.update(first, [])
    scheduler.update(second, [SampledToken(1, 50)])
    assert it.num_computed == 10
    scheduler.update(third, [SampledToken(1, 51)])
    assert it.output_ids == [50, 51]


def test_each_prompt_position_is_reported_once() -> None:
    """The prompt is prefilled in chunks, and again after the request was preempted during its reply."""
    scheduler = Scheduler(config(blocks=1 + 3, budget=8))
    old = Request(1, tuple(range(20)), SamplingParams(max_tokens=12))
    young = Request(2, tuple(range(50, 62)), SamplingParams(max_tokens=8, prompt_logprobs=0))
    for it in (old, young):
        scheduler.add(it)
    positions: list[int] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        positions += [p for part in plan.scheduled if part.request is young for p in part.logprob_positions]
        assert not any(part.logprob_positions for part in plan.scheduled if part.request is old)
        scheduler.update(plan, tokens(plan))
    assert young.num_preemptions
    assert positions == list(range(11))


@pytest.mark.parametrize("most", [0, 128, 8])
def test_reported_positions_of_a_step_are_limited(most: int) -> None:
    """Requests without log-probabilities still get whole steps, and every position is reported once, in order."""
    scheduler = Scheduler(replace(config(blocks=400, budget=600, context=1 << 20), max_logit_rows=most))
    params = SamplingParams(max_tokens=3, prompt_logprobs=0)
    reporting = [Request(number, tuple(range(5000 * number, 5000 * number + 700)), params) for number in (1, 2)]
    plain = request(3, 900, max_tokens=2)
    for it in (*reporting, plain):
        scheduler.add(it)
    positions: dict[int, list[int]] = {1: [], 2: [], 3: []}
    rows, lengths = [], []
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan.scheduled
        rows.append(sum(len(part.logprob_positions) for part in plan.scheduled))
        lengths += [part.num_tokens for part in plan.scheduled if part.request is plain]
        for part in plan.scheduled:
            positions[part.request.id] += part.logprob_positions
        scheduler.update(plan, tokens(plan))
    assert positions == {1: list(range(699)), 2: list(range(699)), 3: []}
    assert max(rows) <= max(most, 16) if most else max(rows) > 128
    assert max(lengths) > 128
    scheduler.assert_empty()


def test_prompt_with_logprobs_is_not_taken_from_the_cache() -> None:
    scheduler = Scheduler(config(budget=100))
    for params in (SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, prompt_logprobs=0)):
        it = Request(id(params), tuple(range(40)), params)
        scheduler.add(it)
        run_out(scheduler)
        assert it.num_cached == 0


def test_no_step_is_planned_after_the_last_token() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request(1, 3, max_tokens=1))
    scheduler.schedule()
    assert scheduler.schedule().scheduled == ()


def test_blocks_of_an_ended_request_are_released_after_steps_under_way() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request(1, 3))
    first, second = scheduler.schedule(), scheduler.schedule()
    free = scheduler._memory.groups[0].pool.num_free
    scheduler.update(first, [SampledToken(1, END)])
    assert scheduler._memory.groups[0].pool.num_free == free
    assert scheduler.has_work
    scheduler.update(second, [SampledToken(1, 5)])
    scheduler.assert_empty()


@pytest.mark.parametrize("prompt", [BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE - 1])
def test_reply_stops_when_the_context_is_full(prompt: int) -> None:
    scheduler = Scheduler(config(context=2 * BLOCK_SIZE, budget=100))
    it = request(1, prompt, max_tokens=None)
    scheduler.add(it)
    run_out(scheduler)
    assert it.num_tokens == 2 * BLOCK_SIZE


@pytest.mark.parametrize(("prompt", "blocks"), [(0, 100), (64, 100), (200, 100), (16, 2)])
def test_prompt_that_never_fits_is_rejected_with_the_numbers(prompt: int, blocks: int) -> None:
    scheduler = Scheduler(config(context=64, blocks=blocks))
    with pytest.raises(PromptTooLong) as caught:
        scheduler.validate_request(request(1, prompt))
    assert prompt == 0 or str(prompt) in str(caught.value)
    scheduler.assert_empty()


@pytest.mark.parametrize(
    ("prompt", "longest", "fits_longer_context", "remedy"),
    [
        (64, 0, False, "Shorten the prompt."),
        (64, 64, False, "Shorten the prompt."),
        (200, 100, False, "Shorten the prompt."),
        (2000, 4000, True, "Shorten the prompt, or start with a larger --context (at most 4,000 here)."),
    ],
)
def test_larger_context_is_suggested_only_if_it_helps(
    prompt: int, longest: int, fits_longer_context: bool, remedy: str
) -> None:
    scheduler = Scheduler(replace(config(context=64), longest_context=longest))
    with pytest.raises(PromptTooLong) as caught:
        scheduler.validate_request(request(1, prompt))
    error = caught.value
    assert (error.tokens, error.context, error.longest_context, error.is_exact) == (prompt, 64, longest, True)
    assert (error.fits_longer_context, error.remedy) == (fits_longer_context, remedy)


def finish_of(token_id: int, **params: object) -> FinishReason | None:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    scheduler = Scheduler(config())
    scheduler.add(Request(1, (0, 1), sampling, frozenset({END})))
    plan = scheduler.schedule()
    (event,) = scheduler.update(plan, tokens(plan, token_id))
    return event.finish


def test_finish_reason_follows_from_token_and_limits() -> None:
    assert finish_of(END) is FinishReason.STOP
    assert finish_of(END, ignore_eos=True) is None
    assert finish_of(5, stop_token_ids=(5,)) is FinishReason.STOP
    assert finish_of(5, stop_token_ids=(5,), ignore_eos=True) is FinishReason.STOP
    assert finish_of(5) is None
    assert finish_of(5, max_tokens=1) is FinishReason.LENGTH


def test_abort_works_in_every_state() -> None:
    scheduler = Scheduler(config(running=1, budget=8))
    first, second, third = request(1, 20), request(2, 3), request(3, 3)
    for it in (first, second, third):
        scheduler.add(it)
    plan = scheduler.schedule()
    (event,) = scheduler.abort(2)
    assert event.finish is FinishReason.ABORT
    assert second.status is RequestStatus.FINISHED
    assert scheduler.abort(1)
    assert scheduler.update(plan, [SampledToken(1, 5)]) == []
    assert not scheduler.abort(1)
    assert not scheduler.abort(42)
    run_out(scheduler)
    scheduler.assert_empty()


def test_assert_empty_raises_for_a_remaining_request() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request(1, 3))
    with pytest.raises(RuntimeError, match="1 waiting"):
        scheduler.assert_empty()
