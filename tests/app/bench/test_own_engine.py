"""The engine as a competitor, with the hash model."""

import pytest

from app.bench.competitor import UnsuitableLoad
from app.bench.own_engine import OwnEngine
from app.bench.workload import Load, Rate
from app.errors import EXIT_USAGE, exit_status
from engine.errors import EngineError
from engine.step import StepPlan
from tests.support.hash_model import VOCABULARY, HashTicket, hash_engine


def test_all_prompts_are_prefilled_and_replies_have_full_length() -> None:
    engine, runner = hash_engine(num_blocks=64)
    load = Load(20, 6, 4)
    own = OwnEngine(engine)
    own.warm_up(load, load.prompts(0, VOCABULARY))
    runner.computed_tokens = 0
    sample = own.measure(load, load.prompts(1, VOCABULARY))
    assert runner.computed_tokens == 4 * (20 + 6 - 1)
    assert len(sample.first_token) == 4
    assert len(sample.between_tokens) == 4 * 5
    assert sample.rates.keys() == {Rate.DECODE, Rate.END_TO_END}
    engine.assert_empty()


def test_streams_that_start_one_by_one_decode_together() -> None:
    """With a budget of 16 tokens per step, prompts are prefilled one after another."""
    engine, _ = hash_engine(budget=16)
    load = Load(16, 30, 4)
    assert OwnEngine(engine).measure(load, load.prompts(1, VOCABULARY)).together == 4


def test_too_many_streams_are_refused() -> None:
    engine, _ = hash_engine(running=8)
    with pytest.raises(UnsuitableLoad, match="The load has 9 streams, but the engine runs at most 8 at once") as raised:
        OwnEngine(engine).check_load(Load(4, 4, 9))
    assert exit_status(raised.value) == EXIT_USAGE


def test_load_longer_than_the_context_is_refused() -> None:
    engine, _ = hash_engine(context=32)
    own = OwnEngine(engine)
    own.check_load(Load(30, 2))
    with pytest.raises(UnsuitableLoad, match="30 tokens and a reply of 3 do not fit the context of 32 tokens"):
        own.check_load(Load(30, 3))


def test_streams_that_overflow_the_cache_still_run() -> None:
    engine, _ = hash_engine(num_blocks=5)
    own, load = OwnEngine(engine), Load(20, 20, 2)
    assert own.overflows_cache(load)
    assert not own.overflows_cache(Load(20, 12, 2))
    assert len(own.measure(load, load.prompts(1, VOCABULARY)).between_tokens) == 2 * 19


def test_failing_step_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = hash_engine()

    def fail(plan: StepPlan) -> HashTicket:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(runner, "launch", fail)
    load = Load(4, 4)
    with pytest.raises(EngineError, match="no such kernel"):
        OwnEngine(engine).measure(load, load.prompts(1, VOCABULARY))
