"""Requests of Anthropic's API: how they are converted, and which errors invalid ones get."""

import json
import re
import threading
from typing import Any

import anthropic
import httpx
import msgspec
import pytest

from app.generation.conversation import Conversation, ToolUse
from app.generation.template import ChatTemplateRenderer
from app.server.dialects.anthropic.changing_lines import CHANGING_LINES
from app.server.dialects.anthropic.requests import MessageRequest
from app.server.http.errors import InvalidRequest
from app.text.tokenizer import Tokenizer
from tests.app.server.dialects.anthropic.test_messages import CLOCK, QUESTION, WEATHER, ask, client
from tests.app.server.dialects.openai.test_embeddings import EmbeddingServer
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.app.server.scripted_server import ScriptedServer

SEARCHED = {"type": "search_result", "source": "https://example.com", "title": "a", "content": []}
UNKEPT = {"type": "json_schema", "schema": {"type": "no"}}
USE = {"type": "tool_use", "id": "1", "name": "now", "input": {}}


def conversation(**asked: Any) -> Conversation:
    wanted = {"model": "", "max_tokens": 1, "messages": [QUESTION], **asked}
    return msgspec.convert(wanted, MessageRequest).conversation(CHANGING_LINES)


@pytest.mark.parametrize(
    ("choice", "allowed", "use", "parallel"),
    [
        (None, None, ToolUse.FREE, None),
        ({"type": "auto"}, None, ToolUse.FREE, None),
        ({"type": "auto", "disable_parallel_tool_use": True}, None, ToolUse.FREE, False),
        ({"type": "any", "disable_parallel_tool_use": False}, None, ToolUse.FORCED, True),
        ({"type": "tool", "name": "now", "disable_parallel_tool_use": True}, ["now"], ToolUse.FORCED, False),
        ({"type": "none"}, [], ToolUse.FREE, None),
    ],
)
def test_tool_choice_limits_the_callable_tools(
    choice: Any, allowed: list[str] | None, use: ToolUse, parallel: bool | None
) -> None:
    asked = conversation(tools=[WEATHER, CLOCK], tool_choice=choice)
    names = None if asked.allowed is None else [tool.name for tool in asked.allowed]
    assert (names, asked.use, asked.parallel_calls) == (allowed, use, parallel)
    assert [tool.name for tool in asked.tools] == ["get_weather", "now"]


@pytest.mark.parametrize(
    ("thinking", "effort", "budget", "variables"),
    [
        (None, "high", 0, {"enable_thinking": False, "thinking": False}),
        ({"type": "disabled"}, None, 0, {"enable_thinking": False, "thinking": False}),
        ({"type": "enabled", "budget_tokens": 2048}, None, 2048, {"enable_thinking": True, "thinking": True}),
        (
            {"type": "adaptive", "display": "omitted"},
            "low",
            None,
            {"reasoning_effort": "low", "enable_thinking": True, "thinking": True},
        ),
    ],
)
def test_thinking_sets_budget_and_template_variables(
    thinking: Any, effort: str | None, budget: int | None, variables: dict[str, Any]
) -> None:
    asked = conversation(thinking=thinking, output_config={"effort": effort})
    assert (asked.thinking_budget, asked.variables) == (budget, variables)


def test_client_tools_are_in_the_prompt_and_server_tools_are_not() -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 1000},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 10, "display_height_px": 10},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
        {"type": "something_new", "name": "described", "input_schema": {"type": "object", "properties": {}}},
    ]
    reported = conversation(tools=tools).tools
    assert [tool.name for tool in reported] == ["bash", "str_replace_based_edit_tool", "memory", "described"]
    [function] = [tool.definition["function"] for tool in reported if tool.name == "bash"]
    assert isinstance(function, dict)
    assert function["description"]
    assert "command" in function["parameters"]["properties"]


def test_consecutive_messages_are_merged_and_results_name_their_tool() -> None:
    given: list[dict[str, Any]] = [
        {"role": "user", "content": "One"},
        {"role": "user", "content": [{"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "AAAA"},
                {"type": "text", "text": "I lo"},
                {"type": "text", "text": "ok."},
                USE,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "9:00"}] * 2},
                {"type": "tool_result", "tool_use_id": "0", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    reported = conversation(messages=given, system=system).messages
    assert [(message.role, message.content) for message in reported] == [
        ("system", "Be\nbrief."),
        ("user", "One\ntwo"),
        ("assistant", "I look."),
        ("tool", "9:00\n9:00"),
        ("tool", "Error: "),
        ("user", "And?"),
    ]
    assert (reported[2].reasoning, [call.name for call in reported[2].tool_calls]) == ("Hm.", ["now"])
    assert [(message.tool_call_id, message.name) for message in reported[3:5]] == [("1", "now"), ("0", None)]


def test_later_system_messages_keep_their_position() -> None:
    given: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "system", "content": [{"type": "text", "text": "There are agents."}]},
        {"role": "assistant", "content": "Hello"},
        {"role": "system", "content": "It is late."},
    ]
    reported = conversation(messages=given, system="Be brief.").messages
    assert [(message.role, message.content) for message in reported] == [
        ("system", "Be brief.\nBe kind."),
        ("user", "Hello\n<system-reminder>\nThere are agents.\n</system-reminder>"),
        ("assistant", "Hello"),
        ("user", "<system-reminder>\nIt is late.\n</system-reminder>"),
    ]


def message(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [QUESTION, {"role": role, "content": [*blocks]}]}


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        (message({"type": "text", "text": "See"}, {"type": "image"}), "messages[1].content[1]"),
        (message({"type": "document", "source": {"type": "content", "content": "a"}}), "messages[1].content[0]"),
        (message({"type": "document", "source": {"type": "text"}}), "messages[1].content[0].source.data"),
        (message({"type": "audio"}), "messages[1].content[0]"),
        (
            message({"type": "tool_result", "tool_use_id": "1", "content": [SEARCHED]}),
            "messages[1].content[0].content[0]",
        ),
        (message({"type": "tool_result", "content": "x"}), "messages[1].content[0].tool_use_id"),
        (message({"type": "text"}), "messages[1].content[0].text"),
        (message(USE, role="assistant"), "messages"),
        (message({"type": "tool_use", "id": "1"}, role="assistant"), "messages[1].content[0].name"),
        ({"system": [{"type": "audio"}]}, "system[0]"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "bash_20250124"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ],
)
def test_unsupported_content_is_refused_with_its_path(asked: dict[str, Any], path: str) -> None:
    body = msgspec.json.encode({"model": "", "max_tokens": 1, "messages": [QUESTION], **asked})
    wanted = msgspec.json.decode(body, type=MessageRequest)
    with pytest.raises(InvalidRequest) as caught:
        wanted.conversation(CHANGING_LINES)
    assert caught.value.parameter == path
    assert caught.value.message.startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("asked", "reported"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"extra_body": {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}}, "mcp_servers"),
        ({"extra_body": {"top_p": -1}}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": []}, "messages"),
        ({"output_config": {"format": UNKEPT}}, "output_config.format.schema"),
        ({"extra_body": {"output_format": UNKEPT}}, "output_format.schema"),
        ({"messages": [{"role": "user", "content": "too long " * 3000}]}, "prompt is too long: "),
    ],
)
def test_errors_have_the_format_of_the_api(hash_server: LiveServer, asked: dict[str, Any], reported: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(hash_server, **asked)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert reported in body["error"]["message"]


def test_too_long_prompt_has_the_message_that_clients_match(hash_server: LiveServer) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(hash_server, messages=[{"role": "user", "content": "too long " * 1500}])
    assert re.search(r"prompt is too long: \d+ tokens > 2048 maximum", str(caught.value))


def test_paths_below_messages_have_the_same_error_format(hash_server: LiveServer) -> None:
    with client(hash_server) as api, pytest.raises(anthropic.NotFoundError) as caught:
        api.messages.batches.list()
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")


def test_request_without_a_model_uses_the_served_model(hash_server: LiveServer) -> None:
    body = {"messages": [QUESTION], "max_tokens": 1}
    for more in ({}, {"model": None}):
        for path in ("messages", "messages/count_tokens"):
            answer = httpx.post(f"{hash_server.url}/v1/{path}", json={**body, **more}, trust_env=False, timeout=60)
            assert answer.status_code == 200, answer.text


def test_text_has_no_citations_field(hash_server: LiveServer) -> None:
    body = {"messages": [QUESTION], "max_tokens": 3}
    url = f"{hash_server.url}/v1/messages"
    whole = httpx.post(url, json=body, trust_env=False, timeout=60)
    streamed = httpx.post(url, json={**body, "stream": True}, trust_env=False, timeout=60)
    assert whole.json()["content"][0]["type"] == "text"
    assert "citations" not in whole.text + streamed.text


def test_error_type_follows_from_the_status(hash_server: LiveServer) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(hash_server, model="claude-of-tomorrow")
    body: Any = missing.value.body
    assert body["error"]["type"] == "not_found_error"
    headers = {"content-type": "application/json"}
    large = httpx.post(
        f"{hash_server.url}/v1/messages", content=b" " * (11 << 20), headers=headers, trust_env=False, timeout=60
    )
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    strange = httpx.post(f"{hash_server.url}/v1/messages", headers={"origin": "https://a.example"}, trust_env=False)
    assert (strange.status_code, strange.json()["error"]["type"]) == (403, "permission_error")


def test_embedding_model_refuses_messages() -> None:
    with EmbeddingServer() as server:
        body = {"model": "digest", "messages": [QUESTION], "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/messages", json=body, trust_env=False)
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    assert "generates no text" in answer.json()["error"]["message"]


def test_failed_stream_ends_with_an_error(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    engine, runner = controlled_engine(tokenizer.vocab_size, context=256)
    body = {"model": "hash", "messages": [QUESTION], "max_tokens": 40, "stream": True}
    with LiveServer("hash", engine, tokenizer, renderer) as server:
        runner.steps_allowed = threading.Semaphore(3)
        with httpx.stream("POST", f"{server.url}/v1/messages", json=body, timeout=60, trust_env=False) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: message_start"
            runner.failures = 1
            runner.steps_allowed.release(1000)
            *_, name, data = (line for line in lines if line)
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"


def test_models_endpoint_lists_the_served_model(hash_server: LiveServer) -> None:
    with client(hash_server) as api:
        [listed] = api.models.list()
        assert listed == api.models.retrieve("hash")
    assert (listed.id, listed.display_name, listed.max_input_tokens) == ("hash", "hash", 2048)


def test_headers_and_unknown_fields_are_accepted(scripted_server: ScriptedServer) -> None:
    scripted_server.says("Hello")
    with client(scripted_server) as api:
        reply = api.beta.messages.create(
            model="scripted",
            max_tokens=5,
            messages=[{"role": "user", "content": "Hi"}],
            betas=["interleaved-thinking-2025-05-14", "something-new"],
            metadata={"user_id": "user_1"},
            service_tier="auto",
            context_management={"edits": []},
            extra_headers={"anthropic-version": "2023-06-01", "authorization": "Bearer none"},
            extra_body={"a_field_of_tomorrow": {"deep": [1]}, "cache_control": {"type": "ephemeral"}},
        )
    assert reply.stop_reason == "end_turn"
