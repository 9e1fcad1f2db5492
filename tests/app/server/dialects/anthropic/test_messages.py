"""Anthropic's Messages API through the real client, with scripted replies and with the default model."""

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import anthropic
import httpx
import jsonschema  # type: ignore[import-untyped]
import msgspec
import pytest
from anthropic.types import Message

from app.generation.events import TokenCounts
from app.generation.service import ChatService
from app.generation.template import ChatTemplateRenderer
from app.server.dialects.anthropic.changing_lines import CHANGING_LINES
from app.server.dialects.anthropic.messages import FRAMING, Event, MessageReply, ToolUseContent, events, fold
from app.server.dialects.anthropic.requests import MessageRequest
from tests.app.server.live_server import LiveServer
from tests.app.server.scripted_server import ScriptedServer

QUESTION: dict[str, Any] = {"role": "user", "content": "How is the weather in Rome?"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "Tells the weather", "input_schema": SCHEMA}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
CLOCK: dict[str, Any] = {"name": "now", "input_schema": NOTHING, "type": "custom"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
SCRIPT = f"<think>\nThey ask.\n</think>\n\nI look.\n{CALL}\n{CALL}"
CALLED = ("get_weather", {"city": "Rome", "days": 2})
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}

StableParts = list[tuple[Any, ...]]


def client(server: LiveServer) -> anthropic.Anthropic:
    """An anthropic client that validates every field of a reply."""
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True)


@pytest.fixture
def server(scripted_server: ScriptedServer) -> ScriptedServer:
    return scripted_server


def fields(server: LiveServer, asked: dict[str, Any]) -> dict[str, Any]:
    given = {"model": server.service.name, "messages": [QUESTION], "max_tokens": 200}
    return given | asked


def ask(server: LiveServer, **asked: Any) -> Message:
    with client(server) as api:
        reply: Message = api.messages.create(**fields(server, asked))
        return reply


def streamed(server: LiveServer, **asked: Any) -> tuple[list[Any], Message]:
    """Return the events of a streamed reply, and the message that the client builds from them."""
    with client(server) as api, api.messages.stream(**fields(server, asked)) as stream:
        return list(stream), stream.get_final_message()


def reported(message: Message) -> StableParts:
    """Return a message without the fields that differ between replies."""
    said: StableParts = []
    for block in message.content:
        match block.type:
            case "text":
                said.append(("text", block.text))
            case "thinking":
                said.append(("thinking", block.thinking, bool(block.signature)))
            case "tool_use":
                said.append(("tool_use", block.name, block.input))
    return [*said, (message.stop_reason, message.stop_sequence, message.usage.output_tokens)]


def raw_events(server: LiveServer, **asked: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    body = fields(server, asked) | {"stream": True}
    answer = httpx.post(f"{server.url}/v1/messages?beta=true", json=body, trust_env=False, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    for event in answer.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_text_thinking_and_calls_become_content_blocks(server: ScriptedServer) -> None:
    generated = server.says(SCRIPT)
    reply = ask(server, tools=[WEATHER, CLOCK], **THINKS)
    call = ("tool_use", *CALLED)
    assert reported(reply) == [
        ("thinking", "They ask.", True),
        ("text", "I look."),
        call,
        call,
        ("tool_use", None, generated),
    ]
    assert len({block.id for block in reply.content if block.type == "tool_use"}) == 2
    assert reply.usage.output_tokens_details is not None
    assert 0 < reply.usage.output_tokens_details.thinking_tokens < 12
    assert (reply.role, reply.model, reply.id[:4]) == ("assistant", "scripted", "msg_")


@pytest.mark.parametrize(
    "asked",
    [{"tools": [WEATHER], **THINKS}, {"tools": [WEATHER], "max_tokens": 30, **THINKS}, {"stop_sequences": ["loo"]}],
)
def test_stream_and_whole_reply_agree(server: ScriptedServer, asked: dict[str, Any]) -> None:
    server.says(SCRIPT)
    events, message = streamed(server, **asked)
    assert reported(message) == reported(ask(server, **asked))
    assert sum(event.type == "content_block_delta" for event in events) > len(message.content)


def test_events_have_the_expected_order(server: ScriptedServer) -> None:
    server.says(SCRIPT)
    events = list(raw_events(server, tools=[WEATHER], **THINKS))
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events if name != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert names == ["message_start", *4 * block, "message_delta", "message_stop"]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    begun, ended = start["usage"], events[-2][1]["usage"]
    prompt = ended["input_tokens"] + ended["cache_read_input_tokens"]
    assert begun["input_tokens"] + begun["cache_read_input_tokens"] == prompt
    kinds = [data["delta"]["type"] for name, data in events if name == "content_block_delta"]
    assert sorted(set(kinds)) == ["input_json_delta", "signature_delta", "text_delta", "thinking_delta"]
    deltas = [data["delta"] for _, data in events if data.get("index") == 2 and "delta" in data]
    written = [delta["partial_json"] for delta in deltas]
    assert len(written) > 2  # the arguments arrived in several deltas
    assert json.loads("".join(written)) == CALLED[1]
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_pings_are_sent_as_ping_events() -> None:
    assert FRAMING.ping("queued") == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_cut_off_call_is_dropped(server: ScriptedServer) -> None:
    server.says(CALL)
    reply = ask(server, tools=[WEATHER], max_tokens=len(server.runner.script) - 8)
    assert reported(reply)[:-1] == []
    assert reply.stop_reason == "max_tokens"


def test_stop_sequence_is_reported(server: ScriptedServer) -> None:
    server.says("One two three.")
    reply = ask(server, stop_sequences=["four", "three"])
    assert reported(reply)[:-1] == [("text", "One two")] or reported(reply)[:-1] == [("text", "One two ")]
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "three")
    assert ask(server).stop_reason == "end_turn"


def test_usage_adds_up_to_the_counted_prompt(server: ScriptedServer) -> None:
    server.says("Hello")
    asked: dict[str, Any] = {
        "system": [{"type": "text", "text": "Be brief. " * 20, "cache_control": {"type": "ephemeral"}}],
        "tools": [WEATHER, CLOCK],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Well?"}, {"type": "text", "text": "So?"}]}],
        "thinking": {"type": "adaptive"},
    }
    first, second = ask(server, **asked).usage, ask(server, **asked).usage
    with client(server) as api:
        counted = api.messages.count_tokens(model="scripted", **asked).input_tokens
    for usage in (first, second):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
        assert usage.cache_creation_input_tokens == 0
    assert (second.cache_read_input_tokens or 0) >= counted - 16 > 100


def test_tool_results_are_read_and_the_history_is_cached(server: ScriptedServer) -> None:
    generated = server.says(SCRIPT)
    question: dict[str, Any] = {"role": "user", "content": "A question of its own. " * 30}
    first = ask(server, tools=[WEATHER], messages=[question], **THINKS)
    answer = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
    ids = [block.id for block in first.content if block.type == "tool_use"]
    results: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": ids[0], "content": [{"type": "text", "text": "22 degrees"}]},
        {"type": "tool_result", "tool_use_id": ids[1], "content": "no such city", "is_error": True},
        {"type": "text", "text": "Go on."},
    ]
    server.says("Done.")
    second = ask(server, tools=[WEATHER], messages=[question, answer, {"role": "user", "content": results}], **THINKS)
    assert reported(second)[0] == ("text", "Done.")
    assert (second.usage.cache_read_input_tokens or 0) >= first.usage.input_tokens + generated - 20


def test_reply_continues_the_last_assistant_message(server: ScriptedServer) -> None:
    server.says(" is Rome.")
    begun: dict[str, Any] = {"role": "assistant", "content": "The capital"}
    reply = ask(server, messages=[QUESTION, begun])
    assert reported(reply)[0] == ("text", " is Rome.")
    whole = {"role": "assistant", "content": "The capital is Rome."}
    server.says("Yes.")
    second = ask(server, messages=[QUESTION, whole, {"role": "user", "content": "Really?"}])
    usage = reply.usage
    prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert (second.usage.cache_read_input_tokens or 0) >= (prompt + usage.output_tokens) // 16 * 16 - 16


def test_thinking_is_on_only_if_the_request_enables_it(server: ScriptedServer) -> None:
    server.says("Hello")
    off, disabled, adaptive = (
        ask(server, **asked).usage.model_dump()
        for asked in ({}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive"}})
    )
    prompts = [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in (off, disabled, adaptive)]
    assert prompts[0] == prompts[1] > prompts[2]  # the template adds text if thinking is off


def test_zero_max_tokens_only_prefills(server: ScriptedServer) -> None:
    server.says("Hello")
    message: dict[str, Any] = {"role": "user", "content": "Something to be known beforehand. " * 10}
    warmed = ask(server, messages=[message], max_tokens=0)
    assert reported(warmed)[:-1] == []
    assert (ask(server, messages=[message]).usage.cache_read_input_tokens or 0) >= warmed.usage.input_tokens - 16


@pytest.mark.share(1)
@pytest.mark.parametrize("stream", [False, True])
def test_default_model_answers_a_question(smollm2_server: LiveServer, stream: bool) -> None:
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "extra_body": {"temperature": 0},
        "max_tokens": 10,
    }
    reply = streamed(smollm2_server, **asked)[1] if stream else ask(smollm2_server, **asked)
    assert "Paris" in reported(reply)[0][1]


def test_default_model_follows_a_schema(smollm2_server: LiveServer) -> None:
    schema = NOTHING | {"properties": {"sum": {"enum": [3, 4]}}, "required": ["sum"]}
    asked: dict[str, Any] = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    [(_, text), _] = reported(ask(smollm2_server, **asked, extra_body={"temperature": 0}))
    assert json.loads(text) in ({"sum": 3}, {"sum": 4})


@pytest.mark.share(1)
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "now"}])
def test_model_without_tool_support_makes_a_forced_call(
    smollm2_server: LiveServer,
    scripted_server: ScriptedServer,
    renderer: ChatTemplateRenderer,
    choice: dict[str, Any],
) -> None:
    qwen = scripted_server.service.tokenizer  # the tokenizer carries Qwen's chat template
    service = ChatService("smollm2:135m", qwen, smollm2_server.streams, renderer)
    service.grammars = smollm2_server.service.grammars  # both models have the same vocabulary
    asked = {"model": "", "messages": [QUESTION], "max_tokens": 100, "tools": [WEATHER, CLOCK]}
    asked["tool_choice"] = choice | {"disable_parallel_tool_use": True}
    wanted, counts = msgspec.convert(asked, MessageRequest), TokenCounts()
    conversation = wanted.conversation(CHANGING_LINES)
    replies = service.reply(conversation, wanted.generation_options(), counts=counts)

    async def reply() -> MessageReply:
        async def each() -> AsyncGenerator[Event]:
            async for batch in events(replies, "hash", counts):
                for event in batch:
                    yield event

        return await fold(each())

    message = smollm2_server.call(reply())
    call = message.content[0]
    assert isinstance(call, ToolUseContent)
    jsonschema.validate(call.input, SCHEMA if call.name == "get_weather" else NOTHING)
    assert (message.stop_reason, call.name) == ("tool_use", choice.get("name", call.name))
