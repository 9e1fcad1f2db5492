"""Single allocations that fail: while a model is loaded, a prompt prefilled, tokens generated, and blocks copied.

The full run is `pytest tests/engine/scheduling/test_failing_allocations.py --allocations 100`.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config import Preemption
from engine.errors import OutOfMemory
from engine.kv.cache import KVCache
from engine.kv.transfers import MoveBlock
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from tests.engine.models.tiny_llama import MIXES, make

PROMPTS = [tuple(range(3, 40)), tuple(range(50, 90)), tuple(range(3, 60))]


class FailingAllocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, each of which allocates its result. Operation number `fails` raises OutOfMemoryError."""

    def __init__(self, fails: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self.fails = fails

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.fails:
            raise torch.OutOfMemoryError("injected")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def allocations(request: pytest.FixtureRequest) -> int:
    count: int = request.config.getoption("--allocations")
    return count


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with every type of weight."""
    folder = tmp_path_factory.mktemp("tiny")
    return make(folder, heads=6, kv_heads=2, head_dim=32, hidden=96, vocab=300, types=MIXES["every type"]).path


def load(path: Path) -> ModelEngine:
    """Load with memory for half of what the requests need, and swap every preempted request."""
    options = LoadOptions(
        backend="reference", context_length=128, host_cache=1 << 20, preemption=Preemption.SWAP, threads=1
    )
    with open_checkpoint(path) as checkpoint:
        return load_engine(checkpoint, options)


def submit(engine: ModelEngine) -> list[Request]:
    params = SamplingParams(temperature=0, max_tokens=16)
    requests = [engine.request(prompt, params, frozenset()) for prompt in PROMPTS]
    for request in requests:
        engine.add(request)
    return requests


def run_out(engine: ModelEngine) -> list[FinishReason]:
    reasons = []
    while engine.has_work:
        reasons += [event.finish for event in engine.step() if event.finish is not None]
    engine.assert_empty()
    return reasons


def numbers(total: int, count: int) -> Iterator[int]:
    """Yield about `count` numbers from 1 to total: the first ones without gaps, later ones at growing distances."""
    number = 1
    while number <= total:
        yield number
        number += 1 + number * 4 // count


def test_failing_load_raises_and_the_next_load_works(tiny: Path, allocations: int) -> None:
    with FailingAllocations(0) as mode:
        load(tiny)
    assert mode.count > 20
    for number in numbers(mode.count, allocations):
        with FailingAllocations(number), pytest.raises(OutOfMemory, match="not enough memory"):
            load(tiny)
    print(f"{len([*numbers(mode.count, allocations)])} of {mode.count} allocations of a load failed")
    engine = load(tiny)
    submit(engine)
    assert run_out(engine) == [FinishReason.LENGTH] * 3


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_load_raises_if_numpy_cannot_allocate(
    tiny: Path, cpu_kernels: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The first allocation of weights, caches, and buffers fails, then the second, and so on."""
    options = LoadOptions(backend=backend, context_length=128, code_cache=cpu_kernels)
    calls, fails, failed = 0, 0, 0

    def failing(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fails:
                raise MemoryError
            return allocate(*args, **kwargs)

        return wrapped

    for name in ("empty", "zeros"):
        monkeypatch.setattr(np, name, failing(getattr(np, name)))
    with open_checkpoint(tiny) as checkpoint:
        while calls >= fails:
            calls, fails = 0, fails + 1
            try:
                load_engine(checkpoint, options)
            except OutOfMemory:
                failed += 1
    assert failed == fails - 1 > 5


def test_a_failed_allocation_in_a_step_changes_no_token(tiny: Path, allocations: int) -> None:
    """The failure ends no request, because the step is retried."""
    engine = load(tiny)
    undisturbed = submit(engine)
    with FailingAllocations(0) as mode:
        assert run_out(engine) == [FinishReason.LENGTH] * 3
    assert engine.state().counters.swapped_out > 0
    expected = [request.output_ids for request in undisturbed]
    for number in numbers(mode.count, allocations // 6):
        engine = load(tiny)
        requests = submit(engine)
        with FailingAllocations(number):
            assert run_out(engine) == [FinishReason.LENGTH] * 3
        assert [request.output_ids for request in requests] == expected
    print(f"{len([*numbers(mode.count, allocations // 6)])} of {mode.count} allocations of all steps failed")


def test_permanent_lack_of_memory_ends_one_request_not_the_engine(tiny: Path) -> None:
    engine = load(tiny)
    submit(engine)
    reasons: list[FinishReason] = []
    launch: Callable[..., Any] = engine._runner.launch
    engine._runner.launch = lambda plan: (_ for _ in ()).throw(OutOfMemory("none"))  # type: ignore[method-assign]
    while FinishReason.ERROR not in reasons:
        reasons += [event.finish for event in engine.step() if event.finish is not None]
    engine._runner.launch = launch  # type: ignore[method-assign]
    assert [*reasons, *run_out(engine)] == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_blocks_that_cannot_be_copied_are_recomputed(tiny: Path, monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    engine = load(tiny)
    undisturbed = submit(engine)
    run_out(engine)
    move, calls = KVCache.move, 0

    def failing(kv: KVCache, moves: Iterable[MoveBlock]) -> None:
        nonlocal calls
        calls += 1
        if calls >= fails:
            raise MemoryError
        move(kv, moves)

    monkeypatch.setattr(KVCache, "move", failing)
    engine = load(tiny)
    requests = submit(engine)
    assert run_out(engine) == [FinishReason.LENGTH] * 3
    assert calls >= fails
    assert [request.output_ids for request in requests] == [request.output_ids for request in undisturbed]
