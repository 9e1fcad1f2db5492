"""The engine's thread over the hash model: every request gets its events, even if steps or the engine fail."""

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from engine.core import Engine
from engine.errors import EngineError, InvalidSampling, PromptTooLong
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import BeamParams, SamplingParams
from engine.step import StepPlan
from engine.thread import UNKNOWN_SECONDS, WEDGED_SECONDS, EngineThread
from tests.support.hash_model import HashRunner, expected_output, hash_engine
from tests.support.processes import HANGING_SECONDS, until

PROMPT = tuple(range(50, 90))


class Client:
    """Submits requests and collects the events that the thread delivers."""

    def __init__(self, engine: Engine[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.steps: queue.SimpleQueue[Sequence[TokenEvent]] = queue.SimpleQueue()
        self.thread = EngineThread(engine, self.steps.put, clock)
        self.thread.start()

    def submit(self, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 5) -> Request:
        params = SamplingParams(max_tokens=max_tokens)
        [request] = self.submit_several([params], prompt)
        return request

    def submit_several(self, several: Sequence[SamplingParams], prompt: tuple[int, ...] = PROMPT) -> list[Request]:
        return self.thread.submit(prompt, several, frozenset(), before=lambda request: None)

    def endings(self, requests: Sequence[Request]) -> dict[int, TokenEvent]:
        """Wait until all of `requests` have ended, and return the last event of each."""
        ends: dict[int, TokenEvent] = {}
        while not {request.id for request in requests} <= ends.keys():
            ends.update({event.request_id: event for event in self.steps.get() if event.finish})
        return ends


@pytest.fixture
def parts() -> Iterator[tuple[Client, HashRunner]]:
    engine, runner = hash_engine(depth=2)
    client = Client(engine)
    yield client, runner
    client.thread.stop()


def test_requests_from_several_threads_are_served(parts: tuple[Client, HashRunner]) -> None:
    client, _ = parts
    requests: list[Request] = []

    def ask(number: int) -> None:
        requests.extend(client.submit((*PROMPT, number, turn), 10) for turn in range(20))

    askers = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    client.endings(requests)
    for request in requests:
        assert request.output_ids == expected_output(request.prompt_ids, 10)


@pytest.mark.parametrize("depth", [1, 2])
def test_random_aborts_and_preemptions_do_not_change_tokens(depth: int) -> None:
    rng = random.Random(depth)
    engine, _ = hash_engine(seed=depth, num_blocks=16, depth=depth, budget=32)
    client = Client(engine)
    requests = []
    for _ in range(150):
        shared = PROMPT[: rng.choice([15, 16, 17, 32, 40])]
        requests.append(client.submit((*shared, *rng.choices(range(5000), k=rng.randrange(20))), rng.randrange(1, 30)))
        if rng.random() < 0.2:
            client.thread.abort(rng.choice(requests).id)
    ends = client.endings(requests)
    client.thread.stop()
    engine.assert_empty()
    assert {FinishReason.LENGTH, FinishReason.ABORT} == {event.finish for event in ends.values()}
    assert any(request.num_preemptions for request in requests)
    for request in requests:
        assert request.output_ids == expected_output(request.prompt_ids, len(request.output_ids))


def test_invalid_request_raises_on_the_callers_thread(parts: tuple[Client, HashRunner]) -> None:
    client, _ = parts
    with pytest.raises(PromptTooLong):
        client.submit(())
    with pytest.raises(IndexError):
        client.submit((5000,))
    assert client.endings([client.submit()])


def test_requests_with_one_prompt_prefill_it_once(parts: tuple[Client, HashRunner]) -> None:
    client, runner = parts
    before = runner.computed_tokens
    requests = client.submit_several([SamplingParams(max_tokens=count) for count in (1, 4, 6)])
    client.endings(requests)
    assert [request.output_ids for request in requests] == [expected_output(PROMPT, count) for count in (1, 4, 6)]
    assert runner.computed_tokens - before == len(PROMPT) + 3 + 5  # the last token of a reply is not computed


def test_an_invalid_request_rejects_the_whole_call(parts: tuple[Client, HashRunner]) -> None:
    client, _ = parts
    begun: list[Request] = []
    several = [SamplingParams(max_tokens=5), SamplingParams(stop_token_ids=(5000,))]
    with pytest.raises(InvalidSampling):
        client.thread.submit(PROMPT, several, frozenset(), before=begun.append)
    client.endings([client.submit()])
    assert begun == []
    assert client.steps.empty()


def test_abort_ends_requests_in_any_state(parts: tuple[Client, HashRunner]) -> None:
    client, _ = parts
    requests = [client.submit((*PROMPT, number), 900) for number in range(12)]
    for request in reversed(requests):
        client.thread.abort(request.id)
        client.thread.abort(request.id)
    ends = client.endings(requests)
    assert {event.finish for event in ends.values()} == {FinishReason.ABORT}


def test_thread_survives_a_failing_step(parts: tuple[Client, HashRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    client, runner = parts
    monkeypatch.setattr(runner, "collect", lambda ticket: 1 / 0)
    failed = client.submit()
    end = client.endings([failed])[failed.id]
    assert end.finish is FinishReason.ERROR
    assert "ZeroDivisionError" in end.error
    monkeypatch.undo()
    after = client.submit()
    assert client.endings([after])[after.id].finish is FinishReason.LENGTH
    assert client.thread.problem() == ""


def test_failing_engine_ends_all_requests_and_reports_a_problem(
    parts: tuple[Client, HashRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = parts
    requests = [client.submit((*PROMPT, number), 900) for number in range(10)]
    monkeypatch.setattr(client.engine._scheduler, "update", lambda plan, sampled: 1 / 0)
    ends = client.endings(requests)
    assert {event.finish for event in ends.values()} == {FinishReason.ERROR}
    assert "ZeroDivisionError" in client.thread.problem()
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        client.submit()


def test_engine_with_broken_scheduler_ends_all_requests(
    parts: tuple[Client, HashRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = parts
    requests = [client.submit((*PROMPT, number), 900) for number in range(10)]
    for name in ("update", "abort", "abort_all"):
        monkeypatch.setattr(client.engine._scheduler, name, lambda *arguments: 1 / 0)
    client.thread.abort(requests[3].id)
    ends = client.endings(requests)
    assert {event.finish for event in ends.values()} == {FinishReason.ERROR}
    monkeypatch.undo()


def test_slow_step_does_not_reject_new_requests(
    parts: tuple[Client, HashRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = parts
    monkeypatch.setattr(client.thread, "problem", lambda: "a step has been running for 60 s")
    assert client.endings([client.submit()])


def test_stop_ends_every_request(parts: tuple[Client, HashRunner]) -> None:
    client, _ = parts
    requests = [client.submit((*PROMPT, number), 900) for number in range(12)]
    client.thread.stop()
    ends = client.endings(requests)
    assert {event.finish for event in ends.values()} == {FinishReason.ABORT}
    client.engine.assert_empty()
    assert "stopped" in client.thread.problem()


def test_queue_empty_raised_by_a_command_is_a_failure(
    parts: tuple[Client, HashRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = parts
    monkeypatch.setattr(client.engine, "forget", Mock(side_effect=queue.Empty))
    client.thread.forget(PROMPT)
    until(lambda: client.thread.problem() != "")
    assert "Empty" in client.thread.problem()


@pytest.mark.parametrize("end", [SystemExit("enough"), KeyboardInterrupt(), MemoryError()])
def test_any_exception_in_the_thread_ends_all_requests(
    parts: tuple[Client, HashRunner], monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    client, _ = parts

    def ended() -> list[TokenEvent]:
        raise end

    requests = [client.submit((*PROMPT, number), 900) for number in range(10)]
    monkeypatch.setattr(client.engine, "step", ended)
    ends = client.endings(requests)
    assert {event.finish for event in ends.values()} == {FinishReason.ERROR}
    assert type(end).__name__ in client.thread.problem()


class Hanging:
    """Makes the calls of one function wait until the test continues. Its clock moves only when the test moves it."""

    def __init__(self) -> None:
        self.seconds = 5.0
        self.entered, self.leave = threading.Event(), threading.Event()

    def clock(self) -> float:
        return self.seconds

    def held(self, function: Any) -> Any:
        def hanging(*arguments: Any) -> Any:
            self.entered.set()
            assert self.leave.wait(HANGING_SECONDS)
            return function(*arguments)

        return hanging


@pytest.mark.parametrize(
    ("where", "warm", "patience"),
    [
        ("launch", True, WEDGED_SECONDS),
        ("collect", True, WEDGED_SECONDS),
        ("add", False, WEDGED_SECONDS),
        ("launch", False, UNKNOWN_SECONDS),  # no expected time is known for the first step
    ],
)
def test_hanging_step_is_a_problem_until_it_ends(
    where: str, warm: bool, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runner = hash_engine()
    hang = Hanging()
    client = Client(engine, hang.clock)
    if warm:
        client.endings([client.submit()])
    owner: Any = engine if where == "add" else runner
    monkeypatch.setattr(owner, where, hang.held(getattr(owner, where)))
    request = client.submit()
    assert hang.entered.wait(HANGING_SECONDS)
    assert client.thread.problem() == ""
    hang.seconds += patience - 0.01
    assert client.thread.problem() == ""
    hang.seconds += 0.01
    assert client.thread.problem() == f"a step has been running for {patience:.0f} s"
    hang.leave.set()
    client.endings([request])
    assert client.thread.problem() == ""
    client.thread.stop()


def test_step_expected_to_be_slow_is_not_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expected time of the step is long, as on a slow machine with a large model."""
    engine, runner = hash_engine()
    hang = Hanging()
    client = Client(engine, hang.clock)
    client.endings([client.submit()])
    monkeypatch.setattr(engine._scheduler.costs.steps, "fixed", 20.0)
    monkeypatch.setattr(runner, "launch", hang.held(runner.launch))
    request = client.submit()
    assert hang.entered.wait(HANGING_SECONDS)
    hang.seconds += 79.0
    assert client.thread.problem() == ""
    hang.seconds += 1.0
    assert client.thread.problem() == "a step has been running for 80 s"
    hang.leave.set()
    client.endings([request])
    client.thread.stop()


def test_waiting_requests_without_steps_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's loop runs, but the scheduler plans no step."""
    engine, _ = hash_engine()
    hang = Hanging()
    client = Client(engine, hang.clock)
    client.endings([client.submit()])
    hang.seconds += 1e6  # seconds of idle time
    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "schedule", lambda *_: StepPlan((), ()))
        request = client.submit()
        until(lambda: engine.num_waiting == 1)
        hang.seconds += UNKNOWN_SECONDS - 1
        time.sleep(0.05)
        assert client.thread.problem() == ""
        hang.seconds += 1
        until(lambda: client.thread.problem() == "requests are waiting, but no step has run for 60 s")
    client.endings([request])
    until(lambda: client.thread.problem() == "")
    client.thread.stop()


def test_several_slow_steps_are_not_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = hash_engine()
    hang = Hanging()
    client = Client(engine, hang.clock)
    entered, leave = threading.Semaphore(0), threading.Semaphore(0)
    collect = runner.collect

    def held(ticket: Any) -> Any:
        entered.release()
        leave.acquire()
        return collect(ticket)

    monkeypatch.setattr(runner, "collect", held)
    request = client.submit(max_tokens=5)
    told = []
    for _ in range(5):
        entered.acquire()
        hang.seconds += WEDGED_SECONDS - 1
        told.append(client.thread.problem())
        leave.release()
    client.endings([request])
    client.thread.stop()
    assert told == [""] * 5


def test_idle_engine_never_has_a_problem() -> None:
    hang = Hanging()
    client = Client(hash_engine()[0], hang.clock)
    client.endings([client.submit()])
    hang.seconds += 1e6
    until(lambda: client.thread.problem() == "")  # the last iteration may not have ended yet
    client.thread.stop()


def test_beam_search_is_submitted_alone_and_ends_as_a_whole(parts: tuple[Client, HashRunner]) -> None:
    client, _ = parts
    beams = SamplingParams(beams=BeamParams(4, 3), max_tokens=30)
    with pytest.raises(ValueError, match="alone"):
        client.submit_several([beams, beams])
    results = client.submit_several([beams])
    assert len(results) == 3
    assert {event.finish for event in client.endings(results).values()} == {FinishReason.LENGTH}
    results = client.submit_several([SamplingParams(beams=BeamParams(4, 3), max_tokens=100)])
    client.thread.abort(results[1].id)
    assert {event.finish for event in client.endings(results).values()} == {FinishReason.ABORT}
