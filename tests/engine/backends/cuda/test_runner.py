"""The runner of a GPU: launching steps ahead does not change the results of requests."""

import random
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.cuda import step
from engine.backends.cuda.gpu import Gpu
from engine.backends.cuda.memory import GpuMemory
from engine.config import BLOCK_SIZE, MemoryLimit, Preemption
from engine.draft import NO_DRAFT, NO_DRAFTS, Source
from engine.drafting.draft_model import DraftModel
from engine.errors import DeviceLost, OutOfMemory
from engine.kv.parked_cache import ParkedCache
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_draft_model, load_engine, open_checkpoint
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import BeamParams, SamplingParams
from tests.engine.backends.cuda.two_devices import INTERPRETED
from tests.engine.drafting.eager_drafter import EagerDrafter
from tests.engine.drafting.forced_replies import replies, replies_with_forced_drafts, without_drafts
from tests.engine.models.tiny_llama import make
from tests.engine.sampling.test_masks import Steps

REPLY = 5
ENOUGH = MemoryLimit(num_bytes=1 << 30)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest model whose tokens depend on all tokens before; the interpreter is slow."""
    return make(tmp_path_factory.mktemp("tiny"), heads=2, kv_heads=1, layers=1).path


def engine(path: Path, device: torch.device, parked: ParkedCache | None = None, **options: Any) -> ModelEngine:
    chosen = LoadOptions(card=INTERPRETED if device.type == "cpu" else None, **{"backend": "cuda", **options})
    with open_checkpoint(path) as checkpoint:
        return load_engine(checkpoint, chosen, parked=parked)


def prompt(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist())


def run_to_end(running: ModelEngine, *requests: Request) -> dict[int, list[TokenEvent]]:
    events_of: dict[int, list[TokenEvent]] = {it.id: [] for it in requests}
    while running.has_work:
        for event in running.step():
            events_of[event.request_id].append(event)
    running.assert_empty()
    return events_of


def run_all_kinds(running: ModelEngine) -> list[list[TokenEvent]]:
    """Run requests with all kinds of parameters, and return their events."""

    def one(length: int, **params: Any) -> Request:
        chosen = {"temperature": 0, "max_tokens": REPLY, "ignore_eos": True} | params
        return running.request(prompt(length), SamplingParams(**chosen), frozenset({7}))

    drawn = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 5}
    together = [one(4), one(4, **drawn)]
    alone = [
        one(3, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=2),
        one(5, min_tokens=3, ignore_eos=False, logit_bias=((9, 4.0), (7, 3.0)), prompt_logprobs=1),
        one(2, grammar=Steps([[5, 6], [8], [3, 9, 12]])),
    ]
    running.add(*together)
    for it in alone:
        running.add(it)
    events_of = run_to_end(running, *together, *alone)
    return [[event for event in events if event.token_id is not None] for events in events_of.values()]


def test_launching_ahead_does_not_change_replies(tiny: Path, device: torch.device) -> None:
    engines = [engine(tiny, device, step_depth=depth, deterministic=True) for depth in (2, 1)]
    runner: Any = engines[0]._runner
    runner.prepare()  # must not affect later requests
    ahead, sequential = map(run_all_kinds, engines)
    assert [[event.token_id for event in events] for events in ahead] == [
        [event.token_id for event in events] for events in sequential
    ]
    assert ahead[2] == sequential[2]  # the log-probabilities are equal as well
    assert len(ahead[3][0].prompt_logprobs) == 4
    assert ahead[4][1].token_id == 8
    assert [events[-1].finish for events in ahead[:3]] == [FinishReason.LENGTH] * 3


def test_greedy_tokens_do_not_depend_on_a_report_of_the_prompt(tiny: Path, device: torch.device) -> None:
    """A step with a report has logits of all positions, and only those of the last one are sampled."""
    running = engine(tiny, device, deterministic=True)
    tokens = []
    for report in (None, 0):
        params = SamplingParams(temperature=0, max_tokens=REPLY, ignore_eos=True, prompt_logprobs=report)
        request = running.request(prompt(6), params, frozenset())
        running.add(request)
        tokens.append(
            [event.token_id for event in run_to_end(running, request)[request.id] if event.token_id is not None]
        )
    assert len(tokens[0]) == REPLY
    assert tokens[1] == tokens[0]


def test_prepare_captures_all_sizes(tiny: Path, device: torch.device) -> None:
    running = engine(tiny, device, context_length=32)
    runner: Any = running._runner
    graphs = runner._step._graphs
    runner.prepare()
    assert list(graphs._captured) == graphs.sizes
    assert len(graphs.sizes) > 4
    assert running.config.max_logit_rows == 128
    assert running.state().failed_captures == 0


def test_beam_search_does_not_depend_on_step_depth(tiny: Path, device: torch.device) -> None:
    found = []
    for depth in (2, 1):
        running = engine(tiny, device, step_depth=depth, deterministic=True)
        params = SamplingParams(temperature=0, max_tokens=3, beams=BeamParams(width=2, results=2))
        results = running.search(prompt(3), params, frozenset({7}))
        running.add(*results)
        run_to_end(running, *results)
        found.append([it.output_ids for it in results])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


DRAWN: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 5}
DRAFTED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": DRAWN,
    "penalties and log-probabilities": DRAWN | {"repetition_penalty": 1.3, "logprobs": 2},
    "grammar": {"temperature": 0, "grammar": Steps([[5, 9, 12, 20, 31], [4, 8, 16]] * 7)},
}


@pytest.mark.parametrize("right", [1.0, 0.5])
@pytest.mark.parametrize("case", DRAFTED)
def test_drafts_do_not_change_replies(tiny: Path, device: torch.device, case: str, right: float) -> None:
    """A reply waits for its step under way, so that each of its steps can verify a draft."""
    running = engine(tiny, device, deterministic=True)
    params = SamplingParams(max_tokens=12, **DRAFTED[case])
    plain = replies(running, prompt(4), [without_drafts(params)])
    steps = running.progress
    found, counts = replies_with_forced_drafts(running, prompt(4), [params], plain, right, random.Random(3))
    assert found == plain
    assert counts.accepted > 0
    assert (counts.accepted == counts.drafted) == (right == 1.0)
    assert running.progress - steps < steps  # fewer steps than without drafts


def test_reply_that_is_predicted_takes_fewer_steps(tiny: Path, device: torch.device) -> None:
    """The drafter itself decides when a reply waits for its step under way."""
    running = engine(tiny, device, deterministic=True)
    drafter: Any = running._scheduler._verification.drafter
    drafter._seconds = lambda tokens: 1.0  # independent of measured times
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    plain = replies(running, prompt(4), [without_drafts(params)])
    predicted = replace(params, prediction=(*prompt(4), *plain[0].token_ids))
    steps = running.progress
    assert replies(running, prompt(4), [predicted]) == plain
    assert running.progress - steps < steps / 2
    assert running.state().failed_captures == 0


def drafting(path: Path, device: torch.device) -> tuple[ModelEngine, DraftModel]:
    """Return an engine, and its own model once more to draft for it."""
    options = LoadOptions(
        backend="cuda", card=INTERPRETED if device.type == "cpu" else None, deterministic=True, context_length=64
    )
    with open_checkpoint(path) as checkpoint:
        running = load_engine(checkpoint, options)
        return running, load_draft_model(checkpoint, options, running)


@pytest.mark.parametrize("case", ["greedy", "drawn"])
def test_draft_model_does_not_change_replies(tiny: Path, device: torch.device, case: str) -> None:
    running, model = drafting(tiny, device)
    running._scheduler._verification.drafter = EagerDrafter(model)
    params = SamplingParams(max_tokens=12, **DRAFTED[case])
    plain = replies(running, prompt(4), [without_drafts(params)])
    assert replies(running, prompt(4), [params]) == plain
    counts = running.state().counters.drafts[Source.MODEL]
    assert counts.drafted > 0
    if case == "greedy":
        assert counts.accepted == counts.drafted


@pytest.mark.parametrize("pays", [True, False])
def test_reply_waits_for_a_draft_model_that_pays(
    tiny: Path, device: torch.device, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter itself decides. If a token of the draft model takes as long as one of the model, it drafts none."""
    running, model = drafting(tiny, device)
    drafter: Any = running._scheduler._verification.drafter
    drafter._seconds = lambda tokens: 1.0  # independent of measured times
    drafter._find = lambda followed: NO_DRAFT  # no drafts from earlier text
    running.draft_with(model)
    monkeypatch.setattr(model, "seconds", lambda requests: 0.01 if pays else 1.0)
    monkeypatch.setattr(model, "prefill_seconds", lambda tokens: 0.0)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    before = running.progress
    plain = replies(running, prompt(4), [without_drafts(params)])
    between = running.progress
    assert replies(running, prompt(4), [params]) == plain
    assert (running.progress - between < (between - before) / 2) == pays
    counts = running.state().counters.drafts.get(Source.MODEL, NO_DRAFTS)
    assert (counts.drafted > 15) == pays


def test_parked_cache_is_copied_to_the_next_engine(tiny: Path, device: torch.device) -> None:
    options: Any = {"deterministic": True, "fingerprint": "1", "host_cache": 1 << 22, "context_length": 128}
    params = SamplingParams(max_tokens=REPLY, temperature=0, ignore_eos=True)
    first = engine(tiny, device, **options)
    question = (*prompt(60), *replies(first, prompt(60), [params])[0].token_ids, 5, 6)
    parked = first.park()
    assert parked is not None
    assert parked.num_bytes > 0
    second = engine(tiny, device, parked, **options)
    assert parked.num_bytes == 0
    reply = replies(second, question, [params])
    assert second.state().counters.computed_tokens <= 2 + BLOCK_SIZE + REPLY
    alone = engine(tiny, device, **options)
    assert replies(alone, question, [params]) == reply
    assert alone.state().counters.computed_tokens > len(question)


@pytest.mark.parametrize("host_cache", [0, 1 << 22])
def test_unload_that_parks_returns_the_pools_to_the_driver(
    tiny: Path, device: torch.device, host_cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator can return only what nothing references any more."""
    running = engine(tiny, device, fingerprint="1", host_cache=host_cache)
    replies(running, prompt(20), [SamplingParams(max_tokens=2, temperature=0)])
    runner: Any = running._runner
    pool, was_freed = weakref.ref(runner._step.kv.pools[0]), []
    del runner
    monkeypatch.setattr(Gpu, "drop_caches", lambda gpu: was_freed.append(pool() is None))
    running.park()
    assert was_freed[-1]


def test_cache_is_not_parked_without_host_pools(tiny: Path, device: torch.device) -> None:
    running = engine(tiny, device, fingerprint="1", host_cache=0)
    replies(running, prompt(20), [SamplingParams(max_tokens=2, temperature=0)])
    assert running.park() is None


def limit_cache(patch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Limit the KV cache to `num_bytes`, also on a GPU, whose steps and graphs need more than tiny caches."""
    for name in ("kv_bytes_before_loading", "kv_bytes_after_loading"):
        patch.setattr(GpuMemory, name, lambda *_: num_bytes)


def test_preemption_does_not_change_replies(tiny: Path, device: torch.device) -> None:
    replies = []
    for scarce in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if scarce:
                limit_cache(patch, 8_000)
            running = engine(
                tiny, device, gpu_memory=ENOUGH, context_length=32, host_cache=1 << 20, preemption=Preemption.SWAP,
                deterministic=True,
            )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        requests = [running.request(prompt(length), params, frozenset()) for length in (14, 15)]
        for it in requests:
            running.add(it)
        run_to_end(running, *requests)
        replies.append([it.output_ids for it in requests])
        assert (running.state().counters.swapped_out > 0) == scarce
    assert replies[0] == replies[1]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The indices, from 0, of the steps that run out of memory."""
    compute, count = step.compute, iter(range(1000))
    fails: list[int] = []

    def maybe(*arguments: Any) -> Any:
        if next(count) in fails:
            raise torch.OutOfMemoryError("injected")
        return compute(*arguments)

    monkeypatch.setattr(step, "compute", maybe)
    return fails


def test_step_that_runs_out_of_memory_is_retried(tiny: Path, device: torch.device, failing: list[int]) -> None:
    plenty, scarce = engine(tiny, device), engine(tiny, device)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    replies = []
    for running in (plenty, scarce):
        failing += [4, 6] if running is scarce else []
        request = running.request(prompt(3), params, frozenset())
        running.add(request)
        run_to_end(running, request)
        replies.append(request.output_ids)
    assert replies[0] == replies[1]


@pytest.mark.parametrize("works", [True, False])
def test_engine_ends_only_if_the_gpu_has_stopped_working(
    tiny: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    def fails(*arguments: Any, **keywords: Any) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    running = engine(tiny, device)
    request = running.request(prompt(3), SamplingParams(temperature=0, max_tokens=3), frozenset())
    running.add(request)
    monkeypatch.setattr(step.CudaStep, "launch", fails)
    if works:
        assert [event.finish for event in running.step()] == [FinishReason.ERROR]
    else:
        monkeypatch.setattr("engine.backends.cuda.gpu.Gpu.synchronize", fails)
        with pytest.raises(DeviceLost, match="unspecified launch failure"):
            running.step()


def test_context_that_does_not_fit_is_refused(
    tiny: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_cache(monkeypatch, 30_000)
    with pytest.raises(Exception, match="tokens fit") as refusal:
        engine(tiny, device, gpu_memory=ENOUGH, context_length=500)
    assert not isinstance(refusal.value, OutOfMemory)
