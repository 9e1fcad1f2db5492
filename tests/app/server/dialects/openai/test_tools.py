"""Tools and reasoning through the real openai client, with scripted replies."""

import json
import random
from typing import Any

import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from app.server.dialects.openai.fields import CHAT
from tests.app.generation.tool_parsers.parsed_reply import mutated
from tests.app.server.dialects.openai.test_chat import client
from tests.app.server.live_server import LiveServer
from tests.app.server.scripted_server import ScriptedServer

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "now", "description": "The time <|im_end|>"}}
UNENFORCED: dict[str, Any] = {
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
}
UNENFORCED_PLACE = "f.properties.a.uniqueItems"
QUESTION: dict[str, Any] = {"role": "user", "content": "How is the weather in Rome?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
SCRIPT = f"<think>\nThey ask.\n</think>\n\nI look.\n{CALL}\n{CALL}"


@pytest.fixture
def server(scripted_server: ScriptedServer) -> ScriptedServer:
    return scripted_server


def fields(server: LiveServer, asked: dict[str, Any]) -> dict[str, Any]:
    given = {"model": server.service.name, "messages": [QUESTION], "tools": [WEATHER, CLOCK], "max_tokens": 200}
    return given | asked


def ask(server: LiveServer, **asked: Any) -> ChatCompletion:
    with client(server) as api:
        reply: ChatCompletion = api.chat.completions.create(**fields(server, asked))
        return reply


def chunks(server: LiveServer, **asked: Any) -> list[ChatCompletionChunk]:
    with client(server) as api:
        return list(api.chat.completions.create(**fields(server, asked), stream=True))


def calls_of(reply: ChatCompletion) -> list[tuple[str, Any]]:
    calls = [call.model_dump()["function"] for call in reply.choices[0].message.tool_calls or ()]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


CALLED = ("get_weather", {"city": "Rome", "days": 2})


def test_text_reasoning_and_calls_are_separated(server: ScriptedServer) -> None:
    server.says(SCRIPT)
    reply = ask(server)
    message = reply.choices[0].message
    assert (message.content, reply.choices[0].finish_reason) == ("I look.", "tool_calls")
    assert calls_of(reply) == [CALLED, CALLED]
    assert len({call.id for call in message.tool_calls or ()}) == 2
    extra = message.model_extra or {}
    assert extra["reasoning"] == extra["reasoning_content"] == "They ask."
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    thought = len(server.service.tokenizer.encode("\nThey ask.\n</think>"))
    assert reply.usage.completion_tokens_details.reasoning_tokens in range(thought - 2, thought + 3)


Told = tuple[str, str, list[tuple[str, str]], str | None]


def reply_parts(reply: ChatCompletion) -> Told:
    [choice] = reply.choices
    calls = [call.model_dump()["function"] for call in choice.message.tool_calls or ()]
    thought = (choice.message.model_extra or {}).get("reasoning", "")
    return (
        choice.message.content or "",
        thought,
        [(one["name"], one["arguments"]) for one in calls],
        choice.finish_reason,
    )


def stream_parts(pieces: list[ChatCompletionChunk]) -> Told:
    choices = [choice for chunk in pieces for choice in chunk.choices]
    deltas = [choice.delta for choice in choices]
    calls: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls or ()):
        assert call.function is not None
        if call.id:
            calls[call.index] = [call.function.name or "", ""]
        calls[call.index][1] += call.function.arguments or ""
    thought = "".join((delta.model_extra or {}).get("reasoning", "") for delta in deltas)
    text = "".join(delta.content or "" for delta in deltas)
    return text, thought, [(name, arguments) for name, arguments in calls.values()], choices[-1].finish_reason


def test_stream_and_whole_reply_agree(server: ScriptedServer) -> None:
    server.says(SCRIPT)
    pieces = chunks(server)
    assert stream_parts(pieces) == reply_parts(ask(server))
    text, thought, calls, _ = stream_parts(pieces)
    assert (text, thought) == ("I look.", "They ask.")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [CALLED, CALLED]
    # the arguments arrived in several deltas
    assert sum(len(choice.delta.tool_calls or ()) for chunk in pieces for choice in chunk.choices) > 8


def test_stream_and_whole_reply_agree_on_malformed_output(server: ScriptedServer, chance: random.Random) -> None:
    for _ in range(3):
        script = mutated(SCRIPT, chance)
        server.says(script)
        assert stream_parts(chunks(server)) == reply_parts(ask(server)), script


def test_reply_with_only_a_call_has_no_content(server: ScriptedServer) -> None:
    server.says(CALL)
    assert ask(server).choices[0].message.content is None


def test_parallel_tool_calls_false_gives_one_call(server: ScriptedServer) -> None:
    server.says(SCRIPT)
    reply = ask(server, parallel_tool_calls=False)
    assert calls_of(reply) == [CALLED]
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.usage is not None
    assert reply.usage.completion_tokens < len(server.runner.script) - 10


def test_text_that_is_not_a_call_stays_text(server: ScriptedServer) -> None:
    server.says("<tool_call>\nI do not know how.")
    reply = ask(server)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (
        "<tool_call>\nI do not know how.",
        "stop",
    )
    server.says(f"Look: {CALL}")
    uncalled: list[dict[str, Any]] = [{"tool_choice": "none"}, {"tools": []}]
    for asked in uncalled:
        reply = ask(server, **asked)
        assert reply.choices[0].message.content == f"Look: {CALL}"
        assert not reply.choices[0].message.tool_calls
    server.says('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ro')
    reply = ask(server, max_tokens=len(server.runner.script) - 1)
    assert reply.choices[0].finish_reason == "length"


def test_tool_choice_none_keeps_the_tools_in_the_prompt(server: ScriptedServer) -> None:
    server.says("Hello")
    ways: list[dict[str, Any]] = [{}, {"tool_choice": "none"}, {"tools": []}]
    replies = [ask(server, **asked) for asked in ways]
    free, none, without = (reply.usage.prompt_tokens for reply in replies if reply.usage is not None)
    assert free == none > without


def test_second_turn_finds_calls_and_reasoning_cached(server: ScriptedServer) -> None:
    generated = server.says(SCRIPT)
    question = {"role": "user", "content": "A question of its own. " * 30}
    first = ask(server, messages=[question])
    message = first.choices[0].message
    answer = {"role": "assistant", "content": message.content, "reasoning": (message.model_extra or {})["reasoning"]}
    answer["tool_calls"] = [call.model_dump() for call in message.tool_calls or ()]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "22"} for call in answer["tool_calls"]]
    server.says("Done.")
    second = ask(server, messages=[question, answer, *results])
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens + generated - 20


def test_reasoning_can_be_turned_off(server: ScriptedServer) -> None:
    server.says("Hello")
    prompts = []
    for asked in (
        {},
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ):
        reply = ask(server, **asked)
        assert reply.choices[0].message.content == "Hello"
        assert reply.usage is not None
        prompts.append(reply.usage.prompt_tokens)
    assert prompts[1] == prompts[2] > prompts[0]


@pytest.mark.parametrize(
    ("asked", "budget", "variables"),
    [
        ({}, None, {}),
        ({"reasoning_effort": "high"}, None, {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}),
        ({"reasoning_effort": "none"}, 0, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        ({"thinking_budget": 9, "thinking_token_budget": 7, "thinking_budget_tokens": -1}, 7, {}),
        ({"reasoning_budget_tokens": 5}, 5, {}),
        ({"thinking_budget_tokens": 0}, 0, {"enable_thinking": False, "thinking": False}),
        ({"reasoning": {"max_tokens": 5, "enabled": True}}, 5, {"enable_thinking": True, "thinking": True}),
        ({"reasoning": {"enabled": False}}, 0, {"enable_thinking": False, "thinking": False}),
        (
            {"reasoning": {"enabled": False}, "chat_template_kwargs": {"thinking": 1}},
            0,
            {"enable_thinking": False, "thinking": 1},
        ),
    ],
)
def test_reasoning_fields_of_all_apis_are_read(
    asked: dict[str, Any], budget: int | None, variables: dict[str, Any]
) -> None:
    request = CHAT.decode(msgspec.json.encode({"model": "", "messages": [QUESTION], **asked}))
    conversation = request.conversation()
    assert (conversation.thinking_budget, conversation.variables) == (budget, variables)


def test_logprobs_cover_every_token_of_the_text(server: ScriptedServer) -> None:
    server.says(SCRIPT)
    logprobs = ask(server, logprobs=True).choices[0].logprobs
    assert logprobs is not None
    assert "".join(token.token for token in logprobs.content or ()).strip() == "I look."


@pytest.mark.parametrize(
    ("asked", "parameter"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs.messages"),
        ({"tools": [{"type": "function", "function": {**UNENFORCED, "strict": True}}]}, f"tools.{UNENFORCED_PLACE}"),
        ({"tools": [{"type": "function", "function": UNENFORCED}], "tool_choice": "required"},
         f"tools.{UNENFORCED_PLACE}"),
        ({"tools": [WEATHER, {"type": "function", "function": UNENFORCED}],
          "tool_choice": {"type": "function", "function": {"name": "f"}}}, f"tools.{UNENFORCED_PLACE}"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"extra_body": {"thinking_token_budget": -2}}, "thinking_token_budget"),
        ({"extra_body": {"thinking_budget": 5, "use_beam_search": True}}, "thinking_token_budget"),
    ],
)  # fmt: skip
def test_error_names_the_invalid_field(server: ScriptedServer, asked: dict[str, Any], parameter: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, **asked)
    assert caught.value.param == parameter


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_unsupported_keyword_in_one_of_many_tools_is_accepted(server: ScriptedServer, choice: Any) -> None:
    server.says(CALL)
    reply = ask(server, tools=[WEATHER, {"type": "function", "function": UNENFORCED}], tool_choice=choice)
    assert reply.choices[0].finish_reason
