"""From the fields of a request to how its tokens are picked."""

import json
from typing import Any

import msgspec
import pytest

from app.chat.messages import Message
from app.server.dialects.openai.chat_requests import ChatMessage
from app.server.dialects.openai.requests import CompletionRequest
from app.server.dry_fields import DRY_BREAKERS
from engine.errors import InvalidSampling
from engine.request import DryParams, SamplingParams


def read(**fields: Any) -> CompletionRequest:
    body = json.dumps({"model": "m", "prompt": "Hi", "seed": 1, **fields})
    return msgspec.json.decode(body, type=CompletionRequest)


def sampling(**fields: Any) -> SamplingParams:
    return read(**fields).choices(breakers=frozenset({7})).candidates[0]


def test_what_is_absent_or_null_has_the_defaults() -> None:
    names = [name for name in CompletionRequest.__struct_fields__ if name not in ("model", "prompt", "seed")]
    given, expected = sampling(**dict.fromkeys(names)), SamplingParams(seed=1, max_tokens=16)
    assert given == sampling() == expected


def test_any_number_of_tokens_may_be_asked_for() -> None:
    assert sampling(max_tokens=-1).max_tokens is None
    with pytest.raises(InvalidSampling, match="max_tokens"):
        sampling(max_tokens=0)


@pytest.mark.parametrize("temperature", [0, 2.5, 3, 100])
def test_high_temperatures_are_accepted(temperature: float) -> None:
    assert sampling(temperature=temperature).temperature == temperature


def test_repetitions_cost_what_llama_cpps_fields_say() -> None:
    assert sampling(dry_multiplier=0.8).dry == DryParams(0.8, 1.75, 2, None, frozenset({7}))
    fields = {"dry_base": 1.5, "dry_allowed_length": 3, "dry_penalty_last_n": 64}
    assert sampling(dry_multiplier=0.5, **fields).dry == DryParams(0.5, 1.5, 3, 64, frozenset({7}))
    assert sampling(dry_multiplier=0.5, dry_penalty_last_n=-1).dry == DryParams(0.5, breakers=frozenset({7}))
    for off in ({"dry_multiplier": 0}, {"dry_multiplier": 1, "dry_penalty_last_n": 0}, fields):
        assert sampling(**off).dry is None
        assert read(**off).breakers() == ()
    assert read(dry_multiplier=1).breakers() == DRY_BREAKERS
    assert read(dry_multiplier=1, dry_sequence_breakers=["a"]).breakers() == ["a"]


def test_top_choices_are_left_out_as_often_as_told() -> None:
    params = sampling(xtc_probability=0.5, xtc_threshold=0.2)
    assert (params.xtc_probability, params.xtc_threshold) == (0.5, 0.2)


def test_what_a_developer_says_reaches_templates_that_know_the_system_alone() -> None:
    told = msgspec.convert({"role": "developer", "content": "Be brief."}, ChatMessage).to_message()
    assert told == Message("system", "Be brief.")


def test_the_smallest_of_several_caps_counts() -> None:
    assert read().choices().context is None
    assert read(num_ctx=100, options={"num_ctx": 50}).choices().context == 50
    assert read(options={"num_ctx": 50, "mirostat": 2}).choices().context == 50
