import pytest

from engine.config import BLOCK_SIZE, EngineConfig
from engine.errors import PromptTooLong
from engine.request import FinishReason, Request, RequestStatus, SampledToken, SamplingParams, StepPlan
from engine.scheduler import Scheduler

END = 99


def config(*, blocks: int = 100, budget: int = 8, running: int = 4, context: int = 1000) -> EngineConfig:
    return EngineConfig("reference", context, blocks, max_step_tokens=budget, max_running=running)


def request(number: int, prompt: int, *, max_tokens: int | None = 4) -> Request:
    return Request(number, tuple(range(prompt)), SamplingParams(max_tokens=max_tokens), frozenset({END}))


def shape(plan: StepPlan) -> list[tuple[int, int]]:
    return [(part.request.id, part.num_tokens) for part in plan.scheduled]


def tokens(plan: StepPlan, token_id: int = 7) -> list[SampledToken]:
    return [SampledToken(part.request.id, token_id) for part in plan.scheduled if part.samples]


def run_out(scheduler: Scheduler) -> list[list[tuple[int, int]]]:
    """Steps until nothing is left to do."""
    shapes = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan.scheduled
        shapes.append(shape(plan))
        scheduler.update(plan, tokens(plan))
    return shapes


def test_a_long_prompt_is_read_in_chunks_and_then_one_token_a_step() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request(1, 20, max_tokens=3))
    assert run_out(scheduler) == [[(1, 8)], [(1, 8)], [(1, 4)], [(1, 1)], [(1, 1)]]
    scheduler.assert_empty()


def test_running_requests_come_first_and_newcomers_fill_the_budget() -> None:
    scheduler = Scheduler(config(budget=8))
    scheduler.add(request(1, 3))
    plan = scheduler.schedule()
    scheduler.update(plan, tokens(plan))
    scheduler.add(request(2, 20))
    scheduler.add(request(3, 2))
    assert shape(scheduler.schedule()) == [(1, 1), (2, 7)]


def test_seats_are_bounded() -> None:
    scheduler = Scheduler(config(running=2, budget=100))
    for number in range(5):
        scheduler.add(request(number, 4))
    assert [len(step) for step in run_out(scheduler)] == [2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1]


def test_a_request_waits_for_blocks_and_then_gets_them() -> None:
    scheduler = Scheduler(config(blocks=1 + 2, budget=100))
    scheduler.add(request(1, BLOCK_SIZE, max_tokens=2))
    scheduler.add(request(2, 3, max_tokens=2))
    assert shape(scheduler.schedule()) == [(1, BLOCK_SIZE)]
    run_out(scheduler)
    scheduler.assert_empty()


@pytest.mark.parametrize("prompt", [BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE - 1])
def test_a_reply_fills_the_context_and_not_one_token_more(prompt: int) -> None:
    scheduler = Scheduler(config(context=2 * BLOCK_SIZE, budget=100))
    it = request(1, prompt, max_tokens=None)
    scheduler.add(it)
    run_out(scheduler)
    assert it.num_tokens == 2 * BLOCK_SIZE


@pytest.mark.parametrize(("prompt", "blocks"), [(0, 100), (64, 100), (200, 100), (16, 2)])
def test_what_can_never_fit_is_refused_with_the_numbers(prompt: int, blocks: int) -> None:
    scheduler = Scheduler(config(context=64, blocks=blocks))
    with pytest.raises(PromptTooLong) as caught:
        scheduler.add(request(1, prompt))
    assert prompt == 0 or str(prompt) in str(caught.value)
    scheduler.assert_empty()


def finish_of(token_id: int, **params: object) -> FinishReason | None:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    scheduler = Scheduler(config())
    scheduler.add(Request(1, (0, 1), sampling, frozenset({END})))
    plan = scheduler.schedule()
    (event,) = scheduler.update(plan, tokens(plan, token_id))
    return event.finish


def test_why_a_reply_ends() -> None:
    assert finish_of(END) is FinishReason.STOP
    assert finish_of(END, ignore_eos=True) is None
    assert finish_of(5, stop_token_ids=(5,)) is FinishReason.STOP
    assert finish_of(5, stop_token_ids=(5,), ignore_eos=True) is FinishReason.STOP
    assert finish_of(5) is None
    assert finish_of(5, max_tokens=1) is FinishReason.LENGTH


def test_abort_is_legal_in_every_state() -> None:
    scheduler = Scheduler(config(running=1, budget=8))
    first, second, third = request(1, 20), request(2, 3), request(3, 3)
    for it in (first, second, third):
        scheduler.add(it)
    scheduler.schedule()
    event = scheduler.abort(2)
    assert event is not None
    assert event.finish is FinishReason.ABORT
    assert second.status is RequestStatus.FINISHED
    plan = scheduler.schedule()
    assert scheduler.abort(1) is not None
    assert scheduler.update(plan, [SampledToken(1, 5)]) == []
    assert scheduler.abort(1) is None
    assert scheduler.abort(42) is None
    run_out(scheduler)
    scheduler.assert_empty()


def test_assert_empty_sees_a_request_that_is_left() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request(1, 3))
    with pytest.raises(RuntimeError, match="1 waiting"):
        scheduler.assert_empty()
