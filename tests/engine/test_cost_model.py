import random

import pytest

from engine.config import EngineConfig, Preemption
from engine.cost_model import LATENCY_FRACTION, MIN_CHUNK_RATIO, CostModel, StepTimes
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from tests.support.hash_model import HashTicket, hash_engine


def config(**options: object) -> EngineConfig:
    return EngineConfig("hash", 1000, 100, max_step_tokens=256, **options)  # type: ignore[arg-type]


def learned(fixed: float, per_token: float, noise: float = 0.0) -> StepTimes:
    """Return step times learned from a hundred steps of many sizes."""
    rng, times = random.Random(1), StepTimes()
    for _ in range(100):
        tokens = rng.choice([1, 2, 4, 64, 128, 256])
        grows = per_token * tokens if tokens > 16 else 0
        times.observe(tokens, (fixed + grows) * (1 + noise * rng.random()))
    return times


def test_fixed_and_per_token_times_are_learned() -> None:
    times = learned(0.002, 0.0005)
    assert (times.fixed, times.per_token) == pytest.approx((0.002, 0.0005))
    assert learned(0.01, 0.001, noise=0.2).per_token == pytest.approx(0.0011, rel=0.15)


def test_expected_time_is_zero_before_the_first_step() -> None:
    assert StepTimes().expected(1) == StepTimes().expected(100) == 0


def test_decode_time_is_the_average_of_steps_with_one_token() -> None:
    times = StepTimes()
    times.observe(1, 0.02)
    times.observe(8, 0.03)
    times.observe(1, 0.04)
    times.observe(200, 1.0)
    assert times.decode == pytest.approx(0.03)
    assert StepTimes().decode == 0


def test_cost_per_token_follows_a_growing_prompt() -> None:
    times = learned(0.002, 0.0005)
    for step in range(60):
        cost = 0.0005 * (1 + step / 30)
        expected = times.expected(50)
        times.observe(50, 0.002 + cost * 50)
        assert expected > 0.85 * (0.002 + cost * 50)


def test_a_single_slow_step_has_little_effect() -> None:
    times = learned(0.002, 0.0005)
    times.observe(64, 30.0)
    assert times.expected(64) < 2 * (0.002 + 0.0005 * 64)
    for _ in range(10):
        times.observe(64, 0.002 + 0.0005 * 64)
    assert times.per_token == pytest.approx(0.0005, rel=0.05)


def test_budget_keeps_steps_within_the_target_latency() -> None:
    costs = CostModel(config(target_latency=0.05), learned(0.002, 0.0005))
    budget = costs.token_budget(streams=3)
    assert 0.9 * LATENCY_FRACTION * 0.05 < costs.steps.expected(budget) < 0.65 * 0.05


@pytest.mark.parametrize(("streams", "target"), [(0, 0.05), (3, 0.0)])
def test_budget_is_the_maximum_without_streams_or_target(streams: int, target: float) -> None:
    assert CostModel(config(target_latency=target), learned(0.002, 0.0005)).token_budget(streams) == 256


def test_chunks_stay_large_when_the_fixed_time_exceeds_the_target() -> None:
    """Even small steps take longer than the target. Tiny chunks would not meet it either, and would slow down the
    prefill.
    """
    fixed, per_token = 0.09, 0.008
    costs = CostModel(config(target_latency=0.05), learned(fixed, per_token))
    chunk = costs.token_budget(streams=1) - 1
    assert chunk == int(MIN_CHUNK_RATIO * fixed / per_token)
    slower = (fixed + per_token * chunk) / chunk / ((fixed + per_token * 256) / 256)
    assert slower < 1.3


@pytest.mark.parametrize("choice", [Preemption.SWAP, Preemption.RECOMPUTE])
def test_configured_preemption_kind_overrides_measurements(choice: Preemption) -> None:
    assert CostModel(config(preemption=choice)).prefers_swap(5000, 5) == (choice is Preemption.SWAP)


def test_swap_is_preferred_if_copying_is_faster() -> None:
    costs = CostModel(config(), learned(0.001, 0.001))
    costs.copy_rate = 1000 * 1e3  # bytes per second: 1 ms to copy a block of 1,000 bytes, 16 ms to compute its tokens
    assert costs.prefers_swap(10_000, 10)
    costs.copy_rate = 1000 * 1e2  # bytes per second: 10 ms to copy a block in each direction
    assert not costs.prefers_swap(10_000, 10)


def test_copy_rate_is_averaged() -> None:
    costs = CostModel(config())
    for seconds in (0.1, 0.5, 0.5, 0.5):
        costs.observe_copy(100_000, seconds)
    costs.observe_copy(100_000, 0.0)
    assert costs.copy_rate == pytest.approx(100 * 1000 * (1 / 0.1 + 3 / 0.5) / 4)


def test_first_time_of_a_size_is_averaged_with_what_other_sizes_imply() -> None:
    """Another program slowed down the first step of a size that then becomes rare."""
    times = StepTimes().small
    for tokens in (1, 16) * 20:
        times.observe(tokens, 0.01 + 0.001 * tokens)
    times.observe(8, 3 * 0.018)
    assert times.expected(8) == pytest.approx(2 * 0.018, rel=0.01)
    times.observe(4, 100.0)
    assert times.expected(4) < 3 * 0.02


class ObservedTimes(StepTimes):
    """Step times that record what is observed."""

    def __init__(self) -> None:
        super().__init__()
        self.observed: list[int] = []

    def observe(self, tokens: int, seconds: float, drafted: int = 0) -> None:
        self.observed.append(tokens)


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_that_compile_kernels_are_not_observed(depth: int) -> None:
    engine, runner = hash_engine(depth=depth)
    times, launch, launched = ObservedTimes(), runner.launch, 0
    engine._scheduler.costs.steps = times

    def compiling(plan: StepPlan) -> HashTicket:
        nonlocal launched
        launched += 1
        runner.preparations += launched == 3
        return launch(plan)

    runner.launch = compiling  # type: ignore[method-assign]
    engine.add(engine.request((1, 2, 3), SamplingParams(max_tokens=8, ignore_eos=True), frozenset()))
    while engine.has_work:
        engine.step()
    # With two steps under way, the step before the one that compiled was collected later as well.
    assert len(times.observed) == launched - depth


def test_drafts_of_one_stream_keep_the_others_within_the_target_latency() -> None:
    costs = CostModel(EngineConfig("test", 100, 10, target_latency=0.05))
    for tokens in (1, 4, 12, 20) * 20:
        costs.steps.observe(tokens, 0.005 * tokens)
    assert costs.draft_budget(1, 1, 30) == 30  # there is no other stream
    assert costs.draft_budget(4, 4, 30) == 6
    assert costs.draft_budget(4, 4, 3) == 3
    assert costs.draft_budget(12, 12, 30) == 0  # the step exceeds the target without drafts
