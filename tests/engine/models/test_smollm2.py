"""The default model's real weights, against the same file dequantized by the `gguf` package and run in transformers."""

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
from engine.kv.cache import KVCache
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.models import Model
from engine.request import Origin, Request, TokenEvent, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from tests.support.float32_smollm2 import transformers_model
from tests.support.held_request import HeldRequest

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


@dataclass(frozen=True)
class Loaded:
    """An engine, and the model in it."""

    engine: ModelEngine
    model: Model


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> Loaded:
    """Steps take few tokens, so that prompts that are not long take several."""
    models_made: list[Model] = []

    def load(*given: Any) -> Model:
        models_made.append(load_model(*given))
        return models_made[-1]

    load_model = models.load
    with open_checkpoint(smollm2) as checkpoint, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceDevice, "step_tokens", lambda device, model: STEP_TOKENS)
        patch.setattr(models, "load", load)
        engine = load_engine(checkpoint, LoadOptions(backend="reference"))
    return Loaded(engine, *models_made)


@pytest.fixture(scope="module")
def engine(loaded: Loaded) -> ModelEngine:
    return loaded.engine


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


@dataclass(frozen=True)
class Reply:
    """A greedy reply, what was told of each of its tokens, and the reference's distributions behind the prompt."""

    prompt: tuple[int, ...]
    token_ids: list[int]
    told: list[TokenLogprobs]
    expected: Tensor  # float64 [len(prompt) + len(token_ids), vocabulary]

    @property
    def rows(self) -> Tensor:
        """Of its tokens."""
        return self.expected[len(self.prompt) - 1 :]


@pytest.fixture(scope="module")
def replies(engine: ModelEngine, reference: LlamaForCausalLM, prompts: list[tuple[int, ...]]) -> list[Reply]:
    """To a third of the prompts, answered together."""
    requests = [submit(engine, prompt, logprobs=3) for prompt in prompts[::3]]
    events = run_out(engine)
    return [
        Reply(
            request.prompt_ids,
            request.output_ids,
            [event.logprobs for event in events if event.request_id == request.id and event.logprobs],
            reference_logprobs(reference, [*request.prompt_ids, *request.output_ids]),
        )
        for request in requests
    ]


def test_greedy_text_equals_the_float32_reference(replies: list[Reply]) -> None:
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
    """Every position of every prompt: mean Kullback-Leibler divergence below 1e-4 a token."""
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
        kv = KVCache(model.kv_groups(), 17, device.layer_shape, device.kv_type)
        logits: Tensor = model.forward(replace(batch, logit_rows=range(len(prompt))), kv)
    return logits


def test_reported_logprobs_are_the_references(replies: list[Reply]) -> None:
    for reply in replies:
        assert len(reply.told) == len(reply.token_ids)
        for row, token_id, told in zip(reply.rows, reply.token_ids, reply.told, strict=False):
            assert told.token_id == token_id
            assert told.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
            assert len(told.top) == 3
            for other, logprob in told.top:
                assert logprob == pytest.approx(float(row[other]), abs=1e-3)


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


def test_answers(replies: list[Reply], smollm2: Path) -> None:
    with open_checkpoint(smollm2) as checkpoint:
        tokenizer = from_gguf(checkpoint.metadata.values)
    assert "Paris" in tokenizer.decode(replies[0].token_ids[:8])
