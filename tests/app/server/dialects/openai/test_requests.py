"""How request fields of OpenAI's API are converted to sampling parameters."""

import json
from typing import Any

import msgspec
import pytest

from app.generation.conversation import Message, ToolCall
from app.generation.options import TimeLimits
from app.server.dialects.openai.chat_requests import ChatCompletionRequest, ChatMessage
from app.server.dialects.openai.completion_requests import CompletionRequest
from app.server.dialects.openai.fields import CHAT, COMPLETION
from app.server.http.errors import InvalidRequest
from app.server.request_fields import DRY_BREAKERS
from engine.errors import InvalidSampling
from engine.sampling_params import DryParams, SamplingParams


def read(**fields: Any) -> CompletionRequest:
    return COMPLETION.decode(json.dumps({"model": "m", "prompt": "Hi", "seed": 1, **fields}).encode())


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    wanted = CHAT.decode(json.dumps(body).encode())
    wanted.check()
    return wanted


def sampling(**fields: Any) -> SamplingParams:
    return read(**fields).sampling_options().prepared(None, frozenset({7}), ()).candidates[0]


def test_absent_and_null_fields_have_the_defaults() -> None:
    names = [name for name in CompletionRequest.__struct_fields__ if name not in ("model", "prompt", "seed")]
    given, expected = sampling(**dict.fromkeys(names)), SamplingParams(seed=1, max_tokens=16)
    assert given == sampling() == expected


def test_negative_max_tokens_means_no_limit() -> None:
    for length in (-1, -2):
        assert sampling(max_tokens=length).max_tokens is None


def test_completion_of_0_tokens_only_prefills() -> None:
    wanted = read(max_tokens=0).sampling_options()
    assert (wanted.returns_text, wanted.candidates[0].max_tokens) == (False, 1)
    with pytest.raises(InvalidSampling, match="max_tokens"):
        chat(max_tokens=0).sampling_options()


@pytest.mark.parametrize("temperature", [0, 2.5, 3, 100])
def test_high_temperatures_are_accepted(temperature: float) -> None:
    assert sampling(temperature=temperature).temperature == temperature


def test_repetition_penalties_follow_llama_cpp_fields() -> None:
    assert sampling(dry_multiplier=0.8).dry == DryParams(0.8, 1.75, 2, None, frozenset({7}))
    fields = {"dry_base": 1.5, "dry_allowed_length": 3, "dry_penalty_last_n": 64}
    assert sampling(dry_multiplier=0.5, **fields).dry == DryParams(0.5, 1.5, 3, 64, frozenset({7}))
    assert sampling(dry_multiplier=0.5, dry_penalty_last_n=-1).dry == DryParams(0.5, breakers=frozenset({7}))
    for off in ({"dry_multiplier": 0}, {"dry_multiplier": 1, "dry_penalty_last_n": 0}, fields):
        assert sampling(**off).dry is None
        assert read(**off).sampling_options().breakers == ()
    assert read(dry_multiplier=1).sampling_options().breakers == DRY_BREAKERS
    assert read(dry_multiplier=1, dry_sequence_breakers=["a"]).sampling_options().breakers == ["a"]


def test_xtc_fields_are_passed_on() -> None:
    params = sampling(xtc_probability=0.5, xtc_threshold=0.2)
    assert (params.xtc_probability, params.xtc_threshold) == (0.5, 0.2)


def test_developer_messages_become_system_messages() -> None:
    reported = msgspec.convert({"role": "developer", "content": "Be brief."}, ChatMessage).to_message()
    assert reported == Message("system", "Be brief.")


def test_smallest_context_limit_applies() -> None:
    assert read().sampling_options().context is None
    assert read(num_ctx=100, options={"num_ctx": 50}).sampling_options().context == 50
    assert read(options={"num_ctx": 50, "mirostat": 2}).sampling_options().context == 50


def test_llama_cpp_aliases_set_the_same_parameters() -> None:
    assert sampling(repeat_penalty=1.9).repetition_penalty == 1.9
    assert sampling(repeat_penalty=1.9, repeat_last_n=0).repetition_penalty == 1.0
    assert sampling(n_predict=5).max_tokens == chat(n_predict=5).sampling_options().candidates[0].max_tokens == 5
    assert sampling().max_tokens == 16
    assert read(n_probs=3).sampling_options().reports_logprobs
    assert sampling(logit_bias=[[5, -1.5], [6, False]]).logit_bias == ((5, -1.5), (6, -100.0))
    assert sampling(top_k=5, min_p=0.1, samplers=["top_k"]).min_p == 0
    assert sampling(top_k=5, samplers=["temperature"]).top_k == 0
    assert sampling(top_k=5, samplers="edkypmxt").top_k == 5


def test_seed_of_minus_one_is_random() -> None:
    drawn = {params.seed for _ in range(3) for params in read(seed=-1, n=2).sampling_options().candidates}
    assert len(drawn) == 6
    assert read(seed=-2).sampling_options().candidates[0].seed == 2**64 - 2


def test_time_limits_of_llama_cpp_are_read() -> None:
    assert chat(t_max_prompt_ms=1500, t_max_predict_ms=0).sampling_options().limits == TimeLimits(1.5, None)


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"grammar": 'root ::= "a"'}, "gbnf"),
        ({"json_schema": {"type": "integer"}}, "json"),
        ({"json_schema": '{"type": "integer"}'}, "json"),
        ({"response_format": {"type": "json_object"}}, "json"),
    ],
)
def test_chats_and_completions_accept_grammars_of_llama_cpp(asked: dict[str, Any], kind: str) -> None:
    for wanted in (read(**asked), chat(**asked)):
        grammar = wanted.requested_grammar()
        assert grammar is not None
        assert grammar.source.kind == kind
    empty = {"grammar": "", "json_schema": ""}
    assert read(**empty).requested_grammar() is chat(**empty).requested_grammar() is None
    with pytest.raises(InvalidRequest, match="one grammar"):
        chat(**asked, guided_regex="a").requested_grammar()


def test_unknown_roles_reach_the_template() -> None:
    reported = msgspec.convert({"role": "critic", "content": "Hm."}, ChatMessage).to_message()
    assert reported == Message("critic", "Hm.")
    called = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    assert msgspec.convert(called, ChatMessage).to_message().tool_calls == (ToolCall("f", {}),)
    assert msgspec.convert({"role": "function", "name": "f", "content": "1"}, ChatMessage).to_message().role == "tool"


def test_last_assistant_message_is_continued_on_request() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "He"}]
    continued = chat(messages=messages, continue_final_message=True, add_generation_prompt=False).conversation()
    assert (continued.reply_prefix, [message.content for message in continued.messages]) == ("He", ["Hi"])
    assert chat(messages=messages).conversation().reply_prefix == ""
    assert not chat(add_generation_prompt=False).conversation().add_generation_prompt
    with pytest.raises(InvalidRequest, match="add_generation_prompt"):
        chat(messages=messages, continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, (3, 4, 5)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, (1, 2, 3)),
        ({"truncate_prompt_tokens": 100}, (1, 2, 3, 4, 5)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 4}, (2, 3, 4, 5)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 100}, (5,)),
        ({}, (1, 2, 3, 4, 5)),
    ],
)
def test_prompt_is_truncated_to_the_requested_tokens(asked: dict[str, Any], kept: tuple[int, ...]) -> None:
    assert read(**asked).truncate((1, 2, 3, 4, 5), context_length=8) == kept


def test_texts_and_lists_of_token_ids_may_be_mixed() -> None:
    assert read(prompt=["a", [1, 2], "b"]).prompts() == ["a", (1, 2), "b"]
    for bad in (["a", 1], [1, [1]]):
        with pytest.raises(InvalidRequest, match="prompt"):
            read(prompt=bad).prompts()
