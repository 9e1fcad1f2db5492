"""Generic tools in every dialect, with the default model, whose chat template does not support tools."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import openai
import pytest

from app.generation.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import LiveServer, controlled_engine

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Get the weather of a city", "parameters": SCHEMA}
OPENAI_TOOLS = [{"type": "function", "function": FUNCTION}]
CLAUDE_TOOLS = [{"name": "get_weather", "description": FUNCTION["description"], "input_schema": SCHEMA}]
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
ARGUMENTS = {"city": "Paris", "unit": "celsius"}
CALL = {"id": "c00000001", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}}
RESULT = "18 degrees"

Called = list[tuple[str, Any]]  # (name, arguments) of each call in a reply


def openai_body(*, forced: bool, after_call: bool) -> tuple[str, dict[str, Any]]:
    turns = [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": CALL["id"], "content": RESULT},
    ]
    body = {"messages": [QUESTION, *(turns if after_call else [])], "tools": OPENAI_TOOLS, "max_tokens": 60}
    return "/v1/chat/completions", {**body, "temperature": 0, "tool_choice": "required" if forced else "auto"}


def responses_body(*, forced: bool, after_call: bool) -> tuple[str, dict[str, Any]]:
    call = {"type": "function_call", "call_id": CALL["id"], "name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
    turns = [call, {"type": "function_call_output", "call_id": CALL["id"], "output": RESULT}]
    tools = [{"type": "function", **FUNCTION}]
    body = {"input": [QUESTION, *(turns if after_call else [])], "tools": tools, "max_output_tokens": 60}
    settings = {"tool_choice": "required" if forced else "auto", "store": False, "temperature": 0}
    return "/v1/responses", {**body, **settings}


def anthropic_body(*, forced: bool, after_call: bool) -> tuple[str, dict[str, Any]]:
    use = {"type": "tool_use", "id": CALL["id"], "name": "get_weather", "input": ARGUMENTS}
    result = {"type": "tool_result", "tool_use_id": CALL["id"], "content": RESULT}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    body = {"model": "smollm2:135m", "messages": [QUESTION, *(turns if after_call else [])], "max_tokens": 60}
    choice = {"type": "any" if forced else "auto"}
    return "/v1/messages", {**body, "temperature": 0, "tools": CLAUDE_TOOLS, "tool_choice": choice}


def ollama_body(*, forced: bool, after_call: bool) -> tuple[str, dict[str, Any]]:
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": ARGUMENTS}}]}
    turns = [called, {"role": "tool", "tool_name": "get_weather", "content": RESULT}]
    body = {"model": "smollm2:135m", "messages": [QUESTION, *(turns if after_call else [])], "tools": OPENAI_TOOLS}
    options = {"stream": False, "options": {"num_predict": 60, "temperature": 0}}
    return "/api/chat", {**body, **options, "tool_choice": "required" if forced else "auto"}


def openai_reply(reply: Any) -> tuple[str, Called]:
    message = reply["choices"][0]["message"]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return message["content"] or "", [(one["name"], json.loads(one["arguments"])) for one in functions]


def responses_reply(reply: Any) -> tuple[str, Called]:
    items = reply["output"]
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    return text, [(it["name"], json.loads(it["arguments"])) for it in items if it["type"] == "function_call"]


def anthropic_reply(reply: Any) -> tuple[str, Called]:
    blocks = reply["content"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return text, [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]


def ollama_reply(reply: Any) -> tuple[str, Called]:
    functions = [call["function"] for call in reply["message"].get("tool_calls") or ()]
    return reply["message"]["content"], [(one["name"], one["arguments"]) for one in functions]


DIALECTS: Mapping[str, tuple[Callable[..., tuple[str, dict[str, Any]]], Callable[[Any], tuple[str, Called]]]] = {
    "openai": (openai_body, openai_reply),
    "responses": (responses_body, responses_reply),
    "anthropic": (anthropic_body, anthropic_reply),
    "ollama": (ollama_body, ollama_reply),
}


def ask(server: LiveServer, path: str, body: Mapping[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, trust_env=False, timeout=600)


def check(text: str, called: Called) -> None:
    """Check that the reply is either text or one call."""
    assert bool(text) != bool(called)
    assert "<response>" not in text
    assert "<tool_call>" not in text
    for name, arguments in called:
        assert name == "get_weather"
        jsonschema.validate(arguments, SCHEMA)
    assert len(called) <= 1


@pytest.mark.parametrize("dialect", DIALECTS)
def test_turns_before_and_after_a_call_are_valid(smollm2_server: LiveServer, dialect: str) -> None:
    body, read = DIALECTS[dialect]
    for forced, after_call in ((True, False), (False, False), (False, True)):
        reply = ask(smollm2_server, *body(forced=forced, after_call=after_call))
        assert reply.status_code == 200, reply.text
        text, called = read(reply.json())
        check(text, called)
        assert called or not forced


def test_turn_after_a_call_finds_the_call_cached(smollm2_server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none") as client:
        messages: list[Any] = [{"role": "user", "content": "How warm is it in Lisbon today?"}]
        asked: dict[str, Any] = {"model": "smollm2:135m", "tools": OPENAI_TOOLS, "max_tokens": 60, "temperature": 0}
        first = client.chat.completions.create(messages=messages, tool_choice="required", **asked)
        called = first.choices[0].message
        assert called.tool_calls
        messages += [called, {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": RESULT}]
        second = client.chat.completions.create(messages=messages, **asked)
    assert first.usage
    assert second.usage
    assert second.usage.prompt_tokens_details
    found = second.usage.prompt_tokens_details.cached_tokens or 0
    assert found >= (first.usage.total_tokens - 1) // 16 * 16  # all full blocks are cached; the last token never is


def test_call_is_streamed_in_several_deltas(smollm2_server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none") as client:
        asked: dict[str, Any] = {"model": "smollm2:135m", "messages": [QUESTION], "tools": OPENAI_TOOLS, "stream": True}
        asked |= {"tool_choice": "required", "max_tokens": 60, "temperature": 0}
        chunks = list(client.chat.completions.create(**asked))
    deltas = [delta for chunk in chunks for choice in chunk.choices for delta in choice.delta.tool_calls or ()]
    assert len(deltas) > 2
    arguments = json.loads("".join(delta.function.arguments or "" for delta in deltas if delta.function))
    jsonschema.validate(arguments, SCHEMA)
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "tool_calls"


def test_tool_choice_none_gives_text_without_a_call(smollm2_server: LiveServer) -> None:
    path, body = openai_body(forced=False, after_call=True)
    text, called = openai_reply(ask(smollm2_server, path, {**body, "tool_choice": "none"}).json())
    assert (bool(text), called) == (True, [])


def test_token_limit_leaves_no_partial_marker_in_the_text(smollm2_server: LiveServer) -> None:
    path, body = openai_body(forced=False, after_call=False)
    for limit in range(1, 6):
        cut = {**body, "tool_choice": "none", "max_tokens": limit}
        text, called = openai_reply(ask(smollm2_server, path, cut).json())
        assert not text or not "<response>".startswith(text)
        assert called == []


def test_schema_that_cannot_be_compiled_is_an_error_only_for_required_calls(smollm2_server: LiveServer) -> None:
    path, body = openai_body(forced=False, after_call=False)
    odd = {"name": "odd", "parameters": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}}
    tools = [{"type": "function", "function": odd}]
    assert ask(smollm2_server, path, {**body, "tools": tools}).status_code == 200
    refused = ask(smollm2_server, path, {**body, "tools": tools, "tool_choice": "required"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools.odd.properties.a.$ref")


@pytest.fixture(scope="module")
def server_without_tools(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[LiveServer]:
    """A server on which generic tools are turned off."""
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer("smollm2:135m", engine, tokenizer, renderer, generic_tools=False) as server:
        yield server


@pytest.mark.parametrize("dialect", DIALECTS)
def test_tools_are_refused_if_generic_tools_are_off(server_without_tools: LiveServer, dialect: str) -> None:
    body, _ = DIALECTS[dialect]
    refused = ask(server_without_tools, *body(forced=False, after_call=False))
    assert refused.status_code == 400
    assert "does not support tools" in refused.text
    assert "generic_tools" in refused.text


def test_server_reports_how_the_model_calls_tools(
    server_without_tools: LiveServer, hash_server: LiveServer, scripted_server: LiveServer
) -> None:
    def reported(server: LiveServer) -> tuple[str, Sequence[str]]:
        shown = ask(server, "/api/show", {"model": server.service.name}).json()["capabilities"]
        listed = httpx.get(f"{server.url}/api/v0/models", trust_env=False).json()["data"][0]["capabilities"]
        assert ("tool_use" in listed) == ("tools" in shown)
        return httpx.get(f"{server.url}/props", trust_env=False).json()["tool_support"], shown

    assert reported(server_without_tools) == ("none", ["completion"])
    assert reported(hash_server) == ("generic", ["completion", "tools", "generic_tools"])
    assert reported(scripted_server) == ("native", ["completion", "tools", "thinking"])
