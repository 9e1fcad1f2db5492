"""An exception inside a step ends only the requests of this step. Later requests run as usual."""

import importlib
from typing import Any

import pytest

from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from tests.engine.models.tiny_llama import make

SITES = [
    ("engine.backends.runner", "build_batch"),
    ("engine.kernels.reference", "normalize"),
    ("engine.kernels.reference", "rope"),
    ("engine.kernels.reference", "store_kv"),
    ("engine.kernels.reference", "paged_attention"),
    ("engine.kernels.reference", "gated"),
    ("quant.kernels.reference", "matmul"),
    ("quant.kernels.reference", "dequantize_rows"),
    ("engine.backends.runner", "next_tokens"),
    ("engine.sampling.sampler", "sample_ids"),
    ("engine.sampling.sampler", "report_logprobs"),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ModelEngine:
    with open_checkpoint(make(tmp_path_factory.mktemp("tiny")).path) as checkpoint:
        return load_engine(checkpoint, LoadOptions(backend="reference", drafts=False))


def ask(engine: ModelEngine, first_id: int) -> int:
    prompt = tuple(range(first_id, first_id + 20))
    request = engine.request(prompt, SamplingParams(temperature=0, max_tokens=4), frozenset())
    engine.add(request)
    return request.id


def endings(engine: ModelEngine) -> dict[int, FinishReason]:
    ends: dict[int, FinishReason] = {}
    while engine.has_work:
        ends.update({event.request_id: event.finish for event in engine.step() if event.finish})
    engine.assert_empty()
    return ends


@pytest.mark.parametrize(("module", "function"), SITES)
@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("lasting", [False, True])
def test_the_requests_of_a_failing_step_end_with_an_error(
    engine: ModelEngine, monkeypatch: pytest.MonkeyPatch, module: str, function: str, call: int, lasting: bool
) -> None:
    """One call fails, or all calls from this one on until the requests have ended."""
    original = getattr(importlib.import_module(module), function)
    calls = 0

    def failing(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call or (lasting and calls > call):
            raise RuntimeError("injected")
        return original(*arguments, **keywords)

    ran = [ask(engine, 1), ask(engine, 30)]
    monkeypatch.setattr(f"{module}.{function}", failing)
    ends = endings(engine)
    assert set(ends.values()) == {FinishReason.ERROR}
    assert set(ends) == set(ran)
    monkeypatch.undo()
    after = ask(engine, 1)
    assert endings(engine) == {after: FinishReason.LENGTH}


def test_waiting_request_survives_a_failing_step(engine: ModelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(engine, 1)
    monkeypatch.setattr("engine.backends.runner.next_tokens", lambda logits, requests: 1 / 0)
    (event,) = engine.step()
    assert event.finish is FinishReason.ERROR
    waiting = ask(engine, 30)
    monkeypatch.undo()
    assert endings(engine) == {waiting: FinishReason.LENGTH}
