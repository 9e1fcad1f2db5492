"""Options of a generation: what limits them, and what is resolved into every candidate."""

import pytest

from app.generation.options import GenerationOptions, TimeLimits, candidates
from engine.errors import PromptTooLong
from engine.sampling_params import BeamParams, DryParams, SamplingParams


def test_a_seed_gives_each_candidate_the_next_one() -> None:
    assert [one.seed for one in candidates({}, 3, 2**64 - 1)] == [2**64 - 1, 0, 1]
    drawn = {one.seed for one in candidates({}, 8, None)}
    assert len(drawn) == 8


def test_a_beam_search_has_as_many_replies_as_results() -> None:
    assert GenerationOptions([SamplingParams()] * 3).replies == 3
    assert GenerationOptions([SamplingParams(beams=BeamParams(4, results=2), logprobs=0)]).replies == 2


def test_breakers_reach_only_candidates_with_a_repetition_penalty() -> None:
    options = GenerationOptions([SamplingParams(dry=DryParams(0.8)), SamplingParams()], 2)
    penalized, plain = options.constrained(None, frozenset({7})).candidates
    assert penalized.dry == DryParams(0.8, breakers=frozenset({7}))
    assert plain.dry is None


def test_a_context_caps_the_prompt_and_the_reply_together() -> None:
    options = GenerationOptions([SamplingParams(), SamplingParams(max_tokens=4)], 2, context=10)
    assert [one.max_tokens for one in options.after(range(3))] == [7, 4]
    assert [one.max_tokens for one in options.after(range(8))] == [2, 2]
    with pytest.raises(PromptTooLong, match="10 tokens, and num_ctx allows 10"):
        options.after(range(10))


def test_zero_milliseconds_set_no_limit() -> None:
    assert TimeLimits.of_milliseconds(0, 1500) == TimeLimits(None, 1.5)
    assert TimeLimits.of_milliseconds(None, None) == TimeLimits()
