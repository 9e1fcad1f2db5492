"""The default model's real weights, against transformers with the weights dequantized by the `gguf` package."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from app.text.gguf_tokenizer import from_gguf
from engine import models
from engine.backends.reference import ReferenceDevice
from engine.batch import build_batch
from engine.kv.cache import KVCache, kv_groups
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.models import Model
from engine.request import Origin, Request, TokenEvent, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from tests.support.float32_smollm2 import transformers_model
from tests.support.held_request import HeldRequest

# If the gap between the two most likely tokens is smaller, rounding may decide either way.
TIE = 0.05
STEP_TOKENS = 64

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about autumn leaves.",
    "Explain in two sentences why the sky is blue.",
    "def fibonacci(n):\n    # finish this function",
    "Übersetze ins Deutsche: The weather is nice today.",
    "List three prime numbers greater than 100.",
    "Summarize: The quick brown fox jumps over the lazy dog, who does not mind at all and goes back to sleep.",
    "Why do cats purr? 🐱",
]


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> LlamaForCausalLM:
    return transformers_model(smollm2, tied=True)


@dataclass(frozen=True)
class Loaded:
    """An engine and its model."""

    engine: ModelEngine
    model: Model


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> Loaded:
    return load_in_small_steps(smollm2)


def load_in_small_steps(path: Path) -> Loaded:
    """Load an engine with few tokens per step, so that prompts of moderate length take several steps."""
    models_made: list[Model] = []

    def load(*given: Any) -> Model:
        models_made.append(load_model(*given))
        return models_made[-1]

    load_model = models.load
    with open_checkpoint(path) as checkpoint, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceDevice, "step_tokens", lambda device, model: STEP_TOKENS)
        patch.setattr(models, "load", load)
        engine = load_engine(checkpoint, LoadOptions(backend="reference"))
    return Loaded(engine, *models_made)


@pytest.fixture(scope="module")
def engine(loaded: Loaded) -> ModelEngine:
    return loaded.engine


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[tuple[int, ...]]:
    """QUESTIONS as token ids of chat prompts."""
    with open_checkpoint(smollm2) as checkpoint:
        tokenizer = from_gguf(checkpoint.metadata.values)
    turns = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    return [tuple(tokenizer.encode(turn, parse_special=True)) for turn in turns]


def generate(engine: ModelEngine, requests: Sequence[Request]) -> None:
    while engine.has_work:
        engine.step()
    engine.assert_empty()
    assert all(request.output_ids for request in requests)


def submit(engine: ModelEngine, prompt: tuple[int, ...], *, cache_salt: str = "", **params: object) -> Request:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 20, **params})  # type: ignore[arg-type]
    request = engine.request(prompt, sampling, frozenset({2}), Origin(cache_salt=cache_salt))
    engine.add(request)
    return request


def reference_logprobs(reference: LlamaForCausalLM, ids: Sequence[int]) -> Tensor:
    """Return float64 [len(ids), vocabulary]: row i is the distribution of the token after ids[i]."""
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([list(ids)])).logits[0]
    return torch.log_softmax(logits.double(), -1)


@dataclass(frozen=True)
class Reply:
    """A greedy reply, its reported log-probabilities, and the reference's distributions."""

    prompt: tuple[int, ...]
    token_ids: list[int]
    reported: list[TokenLogprobs]
    expected: Tensor  # float64 [len(prompt) + len(token_ids), vocabulary]

    @property
    def rows(self) -> Tensor:
        """Return the distributions of the reply's tokens."""
        return self.expected[len(self.prompt) - 1 :]


@pytest.fixture(scope="module")
def replies(engine: ModelEngine, reference: LlamaForCausalLM, prompts: list[tuple[int, ...]]) -> list[Reply]:
    """Replies to a third of the prompts, computed in one batch."""
    requests = [submit(engine, prompt, logprobs=3) for prompt in prompts[::3]]
    events = run_to_end(engine)
    return [
        Reply(
            request.prompt_ids,
            request.output_ids,
            [event.logprobs for event in events if event.request_id == request.id and event.logprobs],
            reference_logprobs(reference, [*request.prompt_ids, *request.output_ids]),
        )
        for request in requests
    ]


def test_greedy_tokens_equal_the_float32_reference(replies: list[Reply]) -> None:
    compared = 0
    for reply in replies:
        for row, token_id in zip(reply.rows, reply.token_ids, strict=False):
            best = row.topk(2)
            if best.values[0] - best.values[1] < TIE:
                break
            assert token_id == int(best.indices[0])
            compared += 1
    assert compared > 20


def test_logprobs_equal_the_float32_reference(
    loaded: Loaded, reference: LlamaForCausalLM, prompts: list[tuple[int, ...]], replies: list[Reply]
) -> None:
    """The mean Kullback-Leibler divergence over all prompt positions is below 1e-4."""
    known = {reply.prompt: reply.expected for reply in replies}
    divergences = []
    for prompt in prompts:
        ours = torch.log_softmax(all_logits(loaded.model, prompt).double(), -1)
        theirs = known[prompt][: len(prompt)] if prompt in known else reference_logprobs(reference, prompt)
        divergences.append((theirs.exp() * (theirs - ours)).sum(-1))
    assert torch.cat(divergences).mean() < 1e-4
    assert torch.cat(divergences).max() < 1e-3


def all_logits(model: Model, prompt: tuple[int, ...]) -> Tensor:
    request = HeldRequest(1, prompt, SamplingParams(), block_tables=(list(range(1, 17)),))
    plan = StepPlan((request.part(0, len(prompt)),))
    batch = build_batch(plan, vocab_size=model.config.vocab_size, num_blocks=17)
    device = ReferenceDevice(keep_dequantized=True, threads=1)
    with torch.inference_mode():
        kv = KVCache(kv_groups(model.config, device.layer_block), [17])
        logits: Tensor = model.forward(replace(batch, logit_rows=range(len(prompt))), kv)
    return logits


def test_reported_logprobs_equal_the_reference(replies: list[Reply]) -> None:
    for reply in replies:
        assert len(reply.reported) == len(reply.token_ids)
        for row, token_id, reported in zip(reply.rows, reply.token_ids, reply.reported, strict=False):
            assert reported.token_id == token_id
            assert reported.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
            assert len(reported.top) == 3
            for other, logprob in reported.top:
                assert logprob == pytest.approx(float(row[other]), abs=1e-3)


def test_prompt_logprobs_equal_the_reference(
    engine: ModelEngine, reference: LlamaForCausalLM, prompts: list[tuple[int, ...]]
) -> None:
    """The prompt takes several steps. A cached prefix is not used, because it has no log-probabilities."""
    prompt = prompts[6] * 3
    assert len(prompt) > STEP_TOKENS
    for _ in range(2):
        request = submit(engine, prompt, max_tokens=2, prompt_logprobs=1)
        beside = submit(engine, prompts[0], max_tokens=3)
        events = [event for event in run_to_end(engine) if event.request_id == request.id]
        reported = [token for event in events for token in event.prompt_logprobs]
        assert [token.token_id for token in reported] == list(prompt[1:])
        assert request.num_cached == 0
        assert beside.output_ids
    expected = reference_logprobs(reference, prompt)
    for index, token in enumerate(reported):
        assert token.logprob == pytest.approx(float(expected[index, prompt[index + 1]]), abs=1e-3)
        assert len(token.top) == 1
        assert token.top[0][1] == pytest.approx(float(expected[index].max()), abs=1e-3)


def run_to_end(engine: ModelEngine) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    engine.assert_empty()
    return events


def test_replies_are_equal_in_a_batch_and_alone(short_smollm2: Path, prompts: list[tuple[int, ...]]) -> None:
    """Covers greedy and random sampling, different lengths and start times, chunked prefill, and cached prefixes."""
    engine = load_in_small_steps(short_smollm2).engine
    long = prompts[6] * 3
    assert len(long) > STEP_TOKENS
    submitted: list[tuple[tuple[int, ...], dict[str, object]]] = [
        (prompts[n][: 12 + 5 * n], {"max_tokens": 2 + n, **params}) for n, params in enumerate(SAMPLING)
    ]
    submitted += [(long, {"max_tokens": 3}), ((*long[:50], 5, 6, 7), {"max_tokens": 3})]
    together = []
    for prompt, params in submitted:
        together.append(submit(engine, prompt, **params))  # type: ignore[arg-type]
        engine.step()
    generate(engine, together)
    for again, (prompt, params) in zip(together, submitted, strict=True):
        alone = submit(engine, prompt, cache_salt=f"nothing cached {again.id}", **params)
        generate(engine, [alone])
        assert alone.num_cached == 0
        assert again.output_ids == alone.output_ids
    assert any(request.num_cached for request in together)


# One greedy request, and three with random sampling.
SAMPLING: list[dict[str, object]] = [
    {},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.7, "top_p": 0.9, "seed": 12},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 13},
]


def test_abort_frees_all_blocks(engine: ModelEngine, prompts: list[tuple[int, ...]]) -> None:
    first, second = submit(engine, prompts[0]), submit(engine, prompts[5] * 6)
    engine.step()
    assert engine.abort(second.id)
    assert engine.abort(first.id)
    assert not engine.abort(first.id)
    assert not engine.has_work
    engine.assert_empty()


def test_reply_contains_the_expected_answer(replies: list[Reply], smollm2: Path) -> None:
    with open_checkpoint(smollm2) as checkpoint:
        tokenizer = from_gguf(checkpoint.metadata.values)
    assert "Paris" in tokenizer.decode(replies[0].token_ids[:8])
