"""The default model's real weights, against the same file dequantized by the `gguf` package and run in transformers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from app.text.gguf_tokenizer import from_gguf
from engine import models
from engine.batch import build_batch
from engine.kv_cache import KVCache
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.models import Model
from engine.reference import ReferenceDevice, ReferenceOperations
from engine.request import Origin, Request, SamplingParams, ScheduledRequest, StepPlan, TokenEvent
from engine.weights import Weights
from tests.float32_smollm2 import transformers_model

# A gap between the two most likely tokens below this is a tie: rounding may decide it either way.
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


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> ModelEngine:
    """Whose steps take few tokens, so that prompts that are not long take several."""
    with open_checkpoint(smollm2) as checkpoint, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceDevice, "step_tokens", lambda device, model: STEP_TOKENS)
        return load_engine(checkpoint, LoadOptions(backend="reference"))


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[tuple[int, ...]]:
    """QUESTIONS as chat turns."""
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
    """float64 [len(ids), vocabulary]: row i is the distribution of the token after ids[i]."""
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([list(ids)])).logits[0]
    return torch.log_softmax(logits.double(), -1)


def test_greedy_text_equals_the_float32_reference(
    engine: ModelEngine, reference: LlamaForCausalLM, prompts: list[tuple[int, ...]]
) -> None:
    compared, asked = 0, prompts[::3]
    requests = [submit(engine, prompt) for prompt in asked]
    generate(engine, requests)
    for prompt, request in zip(asked, requests, strict=True):
        expected = reference_logprobs(reference, [*prompt, *request.output_ids])
        for place, token_id in enumerate(request.output_ids):
            row = expected[len(prompt) - 1 + place]
            best = row.topk(2)
            if best.values[0] - best.values[1] < TIE:
                break
            assert token_id == int(best.indices[0])
            compared += 1
    assert compared > 20


def test_logprobs_equal_the_float32_reference(
    smollm2: Path, reference: LlamaForCausalLM, prompts: list[tuple[int, ...]]
) -> None:
    """Every position of every prompt: mean Kullback-Leibler divergence below 1e-4 a token."""
    with open_checkpoint(smollm2) as checkpoint:
        config = models.read_config(checkpoint.metadata)
        model = models.load(
            config,
            Weights(checkpoint.path, models.stored_weights(checkpoint)),
            ReferenceOperations(keep_dequantized=True),
            512,
        )
    divergences = []
    for prompt in prompts:
        ours = torch.log_softmax(all_logits(model, prompt).double(), -1)
        theirs = reference_logprobs(reference, prompt)
        divergences.append((theirs.exp() * (theirs - ours)).sum(-1))
    assert torch.cat(divergences).mean() < 1e-4
    assert torch.cat(divergences).max() < 1e-3


def all_logits(model: Model, prompt: tuple[int, ...]) -> Tensor:
    request = Request(1, prompt, SamplingParams(), block_tables=(list(range(1, 17)),))
    plan = StepPlan((ScheduledRequest(request, 0, len(prompt), samples=True),))
    batch = build_batch(plan, vocab_size=model.config.vocab_size, num_blocks=17)
    device = ReferenceDevice(keep_dequantized=True, threads=1)
    with torch.inference_mode():
        kv = KVCache(model.kv_groups(), 17, device.layer_shape, device.kv_type)
        logits: Tensor = model.forward(replace(batch, logit_rows=range(len(prompt))), kv)
    return logits


def test_reported_logprobs_are_the_references(
    engine: ModelEngine, reference: LlamaForCausalLM, prompts: list[tuple[int, ...]]
) -> None:
    request = submit(engine, prompts[0], max_tokens=8, logprobs=3)
    events: list[TokenEvent] = []
    while not events or events[-1].finish is None:
        events += engine.step()
    expected = reference_logprobs(reference, [*prompts[0], *request.output_ids])
    for place, event in enumerate(events):
        row = expected[len(prompts[0]) - 1 + place]
        assert event.logprobs is not None
        assert event.logprobs.logprob == pytest.approx(float(row[request.output_ids[place]]), abs=1e-3)
        for token_id, logprob in event.logprobs.top:
            assert logprob == pytest.approx(float(row[token_id]), abs=1e-3)


def test_prompt_logprobs_are_the_references(
    engine: ModelEngine, reference: LlamaForCausalLM, prompts: list[tuple[int, ...]]
) -> None:
    """Of a prompt that takes several steps, and whose beginning is cached: it is computed whole all the same."""
    prompt = prompts[6] * 3
    assert len(prompt) > STEP_TOKENS
    for _ in range(2):
        request = submit(engine, prompt, max_tokens=2, prompt_logprobs=1)
        beside = submit(engine, prompts[0], max_tokens=3)
        events = [event for event in run_out(engine) if event.request_id == request.id]
        told = [token for event in events for token in event.prompt_logprobs]
        assert [token.token_id for token in told] == list(prompt[1:])
        assert request.num_cached == 0
        assert beside.output_ids
    expected = reference_logprobs(reference, prompt)
    for place, token in enumerate(told):
        assert token.logprob == pytest.approx(float(expected[place, prompt[place + 1]]), abs=1e-3)
        assert len(token.top) == 1
        assert token.top[0][1] == pytest.approx(float(expected[place].max()), abs=1e-3)


def run_out(engine: ModelEngine) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    engine.assert_empty()
    return events


def test_several_together_and_each_alone_are_the_same_bytes(
    engine: ModelEngine, prompts: list[tuple[int, ...]]
) -> None:
    """Greedy and drawn, of different lengths, started at different times; chunked and cached, or neither."""
    long = prompts[6] * 3
    assert len(long) > STEP_TOKENS
    asked: list[tuple[tuple[int, ...], dict[str, object]]] = [
        (prompts[n][: 12 + 5 * n], {"max_tokens": 2 + n, **params}) for n, params in enumerate(DRAWN)
    ]
    asked += [(long, {"max_tokens": 3}), ((*long[:50], 5, 6, 7), {"max_tokens": 3})]
    together = []
    for prompt, params in asked:
        together.append(submit(engine, prompt, **params))  # type: ignore[arg-type]
        engine.step()
    generate(engine, together)
    for again, (prompt, params) in zip(together, asked, strict=True):
        alone = submit(engine, prompt, cache_salt=f"nothing cached {again.id}", **params)
        generate(engine, [alone])
        assert alone.num_cached == 0
        assert again.output_ids == alone.output_ids
    assert any(request.num_cached for request in together)


# A quarter of the requests each: greedy, and drawn in three ways.
DRAWN: list[dict[str, object]] = [
    {},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.7, "top_p": 0.9, "seed": 12},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 13},
]


def test_abort_frees_everything(engine: ModelEngine, prompts: list[tuple[int, ...]]) -> None:
    first, second = submit(engine, prompts[0]), submit(engine, prompts[5] * 6)
    engine.step()
    assert engine.abort(second.id)
    assert engine.abort(first.id)
    assert not engine.abort(first.id)
    assert not engine.has_work
    engine.assert_empty()


def test_answers(engine: ModelEngine, prompts: list[tuple[int, ...]], smollm2: Path) -> None:
    request = submit(engine, prompts[0], max_tokens=8)
    generate(engine, [request])
    with open_checkpoint(smollm2) as checkpoint:
        tokenizer = from_gguf(checkpoint.metadata.values)
    assert "Paris" in tokenizer.decode(request.output_ids)
