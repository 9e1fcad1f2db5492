"""The turns of several engines: simulated with a fake clock, and with tiny models on threads."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core import Engine
from engine.cost_model import CostModel
from engine.cpu_threads import ThreadPool
from engine.embedding.loading import load_encoder
from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.thread import EngineThread
from engine.turns import GRACE, SLICE, STREAMING_SECONDS, Turn, Turns
from tests.engine.models import tiny_bert
from tests.engine.models.tiny_llama import MIXES, make

TIMEOUT = 250.0
GAP = 0.001  # simulated seconds between two steps of an engine
TOKENS = 150


class Simulation:
    """Engines that always have a next step, each with the weight and the seconds of its steps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.turns = Turns(lambda: self.now)

    def run(self, engines: Sequence[tuple[Turn, int, float]], seconds: float) -> list[float]:
        """Return the seconds for which each engine computed."""
        used, ready = [0.0] * len(engines), [self.now] * len(engines)
        until = self.now + seconds
        while self.now < until:
            for number, (turn, _, _) in enumerate(engines):
                turn.waiting = int(ready[number] <= self.now)
            able = [number for number, it in enumerate(engines) if it[0].waiting and not self.turns.delay(it[0])]
            if not able:
                self.now += GAP / 10
                continue
            turn, weight, length = engines[able[0]]
            turn.waiting = 0
            turn.begin(weight, 1)
            self.now += length
            turn.end(returns=True)
            used[able[0]] += length
            ready[able[0]] = self.now + GAP
        for turn, _, _ in engines:
            turn.waiting = 0
        return used


def test_engines_of_equal_weight_get_equal_time_whatever_their_steps() -> None:
    simulation = Simulation()
    long, short = simulation.turns.join(), simulation.turns.join()
    used = simulation.run([(long, 4, 0.05), (short, 4, 0.005)], 20)
    assert used[0] == pytest.approx(used[1], rel=0.05)
    assert sum(used) > 0.8 * 20


def test_time_is_divided_by_weight() -> None:
    simulation = Simulation()
    engines = [(simulation.turns.join(), weight, 0.01) for weight in (16, 4, 1)]
    used = simulation.run(engines, 60)
    assert used[0] / used[2] == pytest.approx(16, rel=0.1)
    assert used[1] / used[2] == pytest.approx(4, rel=0.1)


def test_idle_engine_earns_no_time() -> None:
    simulation = Simulation()
    busy, idle = simulation.turns.join(), simulation.turns.join()
    simulation.run([(busy, 4, 0.01)], 100)
    used = simulation.run([(busy, 4, 0.01), (idle, 4, 0.01)], 10)
    assert used[0] == pytest.approx(used[1], rel=0.05)


def test_engine_with_an_urgent_request_is_next() -> None:
    simulation = Simulation()
    background, urgent = simulation.turns.join(), simulation.turns.join()
    simulation.run([(background, 1, 0.06)], 5)
    background.waiting = urgent.waiting = 1
    urgent.used = max(urgent.used, simulation.turns._reached)
    assert simulation.turns.delay(urgent) < 1.01 * GRACE
    assert simulation.turns.delay(background) > GRACE


def test_absent_engine_delays_others_for_a_moment_only() -> None:
    simulation = Simulation()
    absent, other = simulation.turns.join(), simulation.turns.join()
    simulation.run([(absent, 16, 0.01), (other, 1, 0.01)], 1)
    absent.begin(16, 1)
    absent.end(returns=True)
    other.used = absent.used + 1
    assert simulation.turns.delay(other) == pytest.approx(GRACE)
    simulation.now += 1.01 * GRACE
    assert simulation.turns.delay(other) == 0
    absent.begin(16, 1)
    absent.end(returns=False)
    assert simulation.turns.delay(other) == 0


def test_streams_of_other_engines_count_while_they_run() -> None:
    simulation = Simulation()
    one, other = simulation.turns.join(), simulation.turns.join()
    one.begin(4, 3)
    assert (one.other_streams, other.other_streams) == (0, 3)
    one.end(returns=True)
    assert other.other_streams == 3
    simulation.now += STREAMING_SECONDS
    assert other.other_streams == 0


def test_prefill_is_limited_while_another_engine_streams() -> None:
    costs = CostModel(EngineConfig("cpu", 4096, 100, max_step_tokens=512, target_latency=0.06))
    for _ in range(20):
        costs.steps.observe(1, 0.004)
        costs.steps.observe(512, 0.516)
    assert costs.token_budget(0) == 512
    assert costs.token_budget(0, 2) == pytest.approx(26, abs=1)
    assert costs.token_budget(1, 2) == costs.token_budget(1)


def test_threads_of_one_model_share_a_turn_until_others_wait() -> None:
    simulation = Simulation()
    encoder, other = simulation.turns.join(), simulation.turns.join()
    encoder.begin(4)
    encoder.begin(4)
    simulation.now += SLICE
    assert simulation.turns.delay(encoder) == 0
    other.waiting = 1
    assert simulation.turns.delay(encoder) > 0
    encoder.end()
    assert simulation.turns.delay(other) > 0
    encoder.end()
    assert simulation.turns.delay(other) == 0


# -- tiny models


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tiny"), head_dim=32, hidden=128, mlp=128, types=MIXES["Q4_0"]).path


class Model:
    """A tiny model on a thread, with the tokens of its requests."""

    def __init__(self, path: Path, options: LoadOptions) -> None:
        with open_checkpoint(path) as checkpoint:
            self.engine: Engine[Any] = load_engine(checkpoint, options)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self._changed = threading.Condition()
        self.thread = EngineThread(self.engine, self._take)
        self.thread.start()

    def submit(self, count: int, tokens: int = TOKENS) -> list[Request]:
        params = [SamplingParams(max_tokens=tokens, temperature=1, seed=seed, ignore_eos=True) for seed in range(count)]
        return self.thread.submit(
            tuple(range(3, 60)), params, frozenset(), before=lambda it: self.tokens.update({it.id: []})
        )

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, TIMEOUT)

    def output(self, requests: Sequence[Request]) -> list[list[int]]:
        self.wait(lambda: all(request.id in self.ends for request in requests))
        return [self.tokens[request.id] for request in requests]

    def _take(self, events: Sequence[TokenEvent]) -> None:
        with self._changed:
            for event in events:
                if event.token_id is not None:
                    self.tokens[event.request_id].append(event.token_id)
                if event.finish is not None:
                    self.ends[event.request_id] = event.finish
            self._changed.notify_all()


@pytest.fixture(params=["reference", "cpu"])
def pair(tiny: Path, cpu_kernels: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Model, Model]]:
    """Two models that take turns and share threads."""
    threads = 2 if request.param == "cpu" else 1
    options = LoadOptions(
        request.param, threads=threads, code_cache=cpu_kernels, cpu_threads=ThreadPool(), turns=Turns()
    )
    models = Model(tiny, options), Model(tiny, options)
    yield models
    for model in models:
        model.thread.stop()


def test_two_engines_share_the_time_and_compute_the_same_tokens(pair: tuple[Model, Model]) -> None:
    """The second engine has more requests, so that its steps take longer."""
    alone = [model.output(model.submit(count)) for model, count in zip(pair, (1, 8), strict=True)]
    seconds = [model.engine._turn.used for model in pair]
    for _ in range(3):
        requests = [model.submit(count) for model, count in zip(pair, (1, 8), strict=True)]
        assert [model.output(it) for model, it in zip(pair, requests, strict=True)] == alone
    assert all(model.engine._turn.used > before for model, before in zip(pair, seconds, strict=True))


@pytest.mark.parametrize("how", ["closed", "aborted", "failed"])
def test_engine_goes_on_when_the_other_ends_in_mid_stream(
    pair: tuple[Model, Model], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, lasting = pair
    collect = ending.engine._runner.collect

    def fail_later(ticket: Any) -> Any:
        if any(len(tokens) > 5 for tokens in ending.tokens.values()):
            raise MemoryError
        return collect(ticket)

    if how == "failed":
        monkeypatch.setattr(ending.engine._runner, "collect", fail_later)
    first, others = ending.submit(2), lasting.submit(2)
    for model, requests in ((ending, first), (lasting, others)):
        model.wait(lambda model=model, requests=requests: len(model.tokens[requests[0].id]) > 5)  # type: ignore[misc]
    if how == "closed":
        ending.thread.stop()
    elif how == "aborted":
        for request in first:
            ending.thread.abort(request.id)
    assert [len(tokens) for tokens in lasting.output(others)] == [TOKENS, TOKENS]
    if how == "failed":
        ending.output(first)
        assert set(ending.ends.values()) == {FinishReason.ERROR}


def test_encoder_and_engine_take_turns(tiny: Path, tmp_path: Path) -> None:
    turns = Turns()
    model = Model(tiny, LoadOptions("reference", turns=turns))
    with open_checkpoint(tiny_bert.make(tmp_path).path) as checkpoint:
        encoder = load_encoder(checkpoint, LoadOptions("reference", threads=3, turns=turns))
    requests = model.submit(1)
    texts = [[*range(1, 2 + number % 40)] for number in range(200)]
    assert len(encoder.encode(texts)) == len(texts)
    assert len(model.output(requests)[0]) == TOKENS
    assert encoder._turn.used > 0
    encoder.close()
    model.thread.stop()
    assert not list(turns._all)


def test_engines_are_active_for_a_second_after_their_last_turn() -> None:
    simulation = Simulation()
    turn = simulation.turns.join()
    simulation.now += 1e6
    assert not simulation.turns.is_active()
    turn.begin(1)
    assert simulation.turns.is_active()
    turn.end()
    simulation.now += STREAMING_SECONDS / 2
    assert simulation.turns.is_active()
    simulation.now += STREAMING_SECONDS
    assert not simulation.turns.is_active()
