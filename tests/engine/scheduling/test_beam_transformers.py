"""Beam search compared with transformers: equal sequences in the same order, with equal scores."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.request import TokenLogprobs
from engine.sampling_params import BeamParams, SamplingParams
from tests.engine.models.tiny_llama import TinyLlama, make


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(tiny: TinyLlama) -> ModelEngine:
    with open_checkpoint(tiny.path) as checkpoint:
        return load_engine(checkpoint, LoadOptions(backend="reference"))


def theirs(tiny: TinyLlama, prompt: tuple[int, ...], beams: BeamParams, ends: list[int], **more: Any) -> list[Any]:
    """Return (tokens, score) of each sequence that transformers finds."""
    options = {"eos_token_id": ends, "pad_token_id": 0} if ends else {"eos_token_id": None, "pad_token_id": 0}
    reference: Any = tiny.reference  # Any, because transformers' type hints lack the attributes of the result
    found = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=beams.width,
        num_return_sequences=beams.results,
        length_penalty=beams.length_penalty,
        early_stopping=beams.early_stopping,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
        **more,
    )
    lengths = (found.beam_indices >= 0).sum(1).tolist()
    replies = [row[len(prompt) :][:length].tolist() for row, length in zip(found.sequences, lengths, strict=True)]
    return list(zip(replies, found.sequences_scores.tolist(), strict=True))


def ours(
    engine: ModelEngine, prompt: tuple[int, ...], beams: BeamParams, ends: list[int], **more: Any
) -> list[tuple[list[int], float]]:
    results = engine.search(prompt, SamplingParams(beams=beams, **more), frozenset(ends))
    engine.add(*results)
    group = engine._scheduler._requests.group_of(results[0])
    assert group
    while engine.has_work:
        engine.step()
    engine.assert_empty()
    scores = [hypothesis.score for hypothesis in group.policy.hypotheses]
    return [(result.output_ids, score) for result, score in zip(results, scores, strict=False)]


@pytest.mark.share(2, "width")
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("width", [2, 3, 8])
def test_sequences_and_scores_equal_transformers(
    tiny: TinyLlama, engine: ModelEngine, width: int, length_penalty: float, early_stopping: Any
) -> None:
    rng = random.Random(width)
    for ends in ([], [5], [5, 17, 60, 61, 80]):
        prompt = tuple(rng.randrange(97) for _ in range(rng.randrange(5, 40)))
        beams = BeamParams(width, (width + 1) // 2, length_penalty, early_stopping)
        expected = theirs(tiny, prompt, beams, ends, max_new_tokens=14)
        found = ours(engine, prompt, beams, ends, max_tokens=14)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        scores = [score for _, score in expected]
        # transformers' scores are float32
        assert [score for _, score in found] == pytest.approx(scores, abs=1e-4, rel=1e-6)


def test_results_with_min_tokens_equal_transformers(tiny: TinyLlama, engine: ModelEngine) -> None:
    prompt, ends = tuple(range(20)), list(range(0, 97, 3))
    beams = BeamParams(4, 4)
    short = ours(engine, prompt, beams, ends, max_tokens=14)
    assert min(len(tokens) for tokens, _ in short) < 5
    expected = theirs(tiny, prompt, beams, ends, max_new_tokens=14, min_new_tokens=5)
    found = ours(engine, prompt, beams, ends, max_tokens=14, min_tokens=5)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert min(len(tokens) for tokens, _ in found) > 5


def test_every_result_gets_the_prompt_logprobs(engine: ModelEngine) -> None:
    """The log-probabilities equal those of a plain request, even if part of the prompt is cached."""
    prompt, params = tuple(range(40)), SamplingParams(max_tokens=3, prompt_logprobs=2)
    engine.add(plain := engine.request(prompt, params, frozenset()))
    results = engine.search(prompt, replace(params, beams=BeamParams(3, 2)), frozenset())
    engine.add(*results)
    told: dict[int, list[TokenLogprobs]] = {}
    while engine.has_work:
        for event in engine.step():
            told.setdefault(event.request_id, []).extend(event.prompt_logprobs)
    assert [report.token_id for report in told[plain.id]] == list(prompt[1:])
    assert all(told[result.id] == told[plain.id] for result in results)
