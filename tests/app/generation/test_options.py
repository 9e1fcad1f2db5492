"""Generation options: default values of sampling fields, limits, and the parameters of candidates."""

from typing import Any

import pytest

from app.generation.options import API_DEFAULTS, DefaultSampling, GenerationOptions, TimeLimits, candidates
from engine.errors import PromptTooLong
from engine.sampling_params import BeamParams, DryParams, SamplingParams

RECOMMENDED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.1}
API = {"temperature": 0.8, "top_k": 40}
GREEDY = DefaultSampling({**RECOMMENDED, "temperature": 0.0})


def test_candidates_get_consecutive_seeds() -> None:
    assert [one.seed for one in candidates({}, 3, 2**64 - 1)] == [2**64 - 1, 0, 1]
    drawn = {one.seed for one in candidates({}, 8, None)}
    assert len(drawn) == 8


def test_beam_search_has_one_reply_per_result() -> None:
    assert GenerationOptions([SamplingParams()] * 3).replies == 3
    assert GenerationOptions([SamplingParams(beams=BeamParams(4, results=2), logprobs=0)]).replies == 2


def test_breakers_are_set_only_with_dry_penalty() -> None:
    options = GenerationOptions([SamplingParams(dry=DryParams(0.8)), SamplingParams()], 2)
    penalized, plain = options.prepared(None, frozenset({7}), ()).candidates
    assert penalized.dry == DryParams(0.8, breakers=frozenset({7}))
    assert plain.dry is None


def test_context_limits_prompt_and_reply_together() -> None:
    options = GenerationOptions([SamplingParams(), SamplingParams(max_tokens=4)], 2, context=10)
    assert [one.max_tokens for one in options.clamp_to_context(range(3))] == [7, 4]
    assert [one.max_tokens for one in options.clamp_to_context(range(8))] == [2, 2]
    with pytest.raises(PromptTooLong, match="10 tokens, but num_ctx allows 10"):
        options.clamp_to_context(range(10))


def test_zero_milliseconds_set_no_limit() -> None:
    assert TimeLimits.of_milliseconds(0, 1500) == TimeLimits(None, 1.5)
    assert TimeLimits.of_milliseconds(None, None) == TimeLimits()


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {}),
        ({"temperature": 1.5}, {"temperature": 1.5}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"top_k": 0, "seed": 3}, {"top_k": 0, "seed": 3}),
    ],
)
def test_each_given_field_overrides_its_default(given: dict[str, Any], changed: dict[str, Any]) -> None:
    assert DefaultSampling(RECOMMENDED).fill(given, API) == RECOMMENDED | changed
    assert API_DEFAULTS.fill(given, API) == API | changed


def test_infilling_drops_the_repetition_penalty() -> None:
    filled = DefaultSampling(RECOMMENDED).fill({}, API, inserts=True)
    assert filled == {name: value for name, value in RECOMMENDED.items() if name != "repetition_penalty"}
    assert DefaultSampling(RECOMMENDED).fill({"repetition_penalty": 1.3}, inserts=True)["repetition_penalty"] == 1.3


def test_several_replies_raise_a_zero_temperature() -> None:
    assert GREEDY.fill({})["temperature"] == 0
    assert GREEDY.fill({}, several=True)["temperature"] == 0.7
    assert GREEDY.fill({"temperature": 0.0}, several=True)["temperature"] == 0
    assert DefaultSampling(RECOMMENDED).fill({}, several=True)["temperature"] == 0.6
