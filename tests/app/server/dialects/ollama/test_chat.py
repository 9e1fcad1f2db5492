"""Chats through the real ollama client, compared with exact output."""

from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import msgspec
import ollama
import pytest

from app.generation.service import ChatService
from app.generation.template import ChatTemplateRenderer
from app.server.application import AccessPolicy, ServerContext, create_application
from app.server.dialects.ollama.replies import ChatWriter
from app.server.http.access import Authenticator
from tests.app.server.dialects.ollama.real_client import client
from tests.app.server.dialects.openai.test_chat import expected_text
from tests.app.server.dialects.openai.test_tools import CLOCK, PARAMETERS, QUESTION, SCRIPT, WEATHER
from tests.app.server.fixed_models import fixed_models
from tests.app.server.live_server import LiveServer
from tests.app.server.scripted_server import ScriptedServer

ASKED = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": ASKED}]
ANSWER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def chat(server: LiveServer, **asked: Any) -> Any:
    with client(server) as api:
        # top_k 0 disables the limit, so that the hash model's output is exact
        options = {"top_k": 0, **asked.pop("options", {})}
        reply = api.chat(server.service.name, **{"messages": MESSAGES, **asked}, options=options)
        return list(reply) if asked.get("stream") else reply


def test_reply_equals_the_model_output_streamed_and_whole(hash_server: LiveServer) -> None:
    asked: dict[str, Any] = {"options": {"num_predict": 40, "temperature": 0.5}}
    whole = chat(hash_server, **asked)
    parts = chat(hash_server, **asked, stream=True)
    expected = expected_text(hash_server, ASKED, 40)
    assert whole.message.content == "".join(part.message.content for part in parts)
    assert expected.startswith(whole.message.content)
    last = parts[-1]
    assert [part.done for part in parts] == [*[False] * (len(parts) - 1), True]
    assert all(part.eval_count is None for part in parts[:-1])
    for reply in (whole, last):
        assert (reply.done_reason, reply.eval_count) == ("length", 40)
        assert reply.prompt_eval_count == len(hash_server.service.tokenizer.encode(ASKED)) + 31 - 1
        assert reply.total_duration >= reply.prompt_eval_duration + reply.eval_duration > 0


def test_changing_num_ctx_keeps_the_cache(hash_server: LiveServer) -> None:
    conversation = [*MESSAGES, {"role": "assistant", "content": "Paris. " * 60}, {"role": "user", "content": "And?"}]
    before = hash_server.engine.state()
    for context in (1024, 1500, 2048, 1 << 20):
        chat(hash_server, messages=conversation, options={"num_ctx": context, "num_predict": 2})
    after = hash_server.engine.state()
    assert (before.kv_blocks, hash_server.engine.config.context_length) == (after.kv_blocks, 2048)
    reused = chat(hash_server, messages=conversation, options={"num_ctx": 1111, "num_predict": 1})
    details = httpx.post(
        f"{hash_server.url}/v1/chat/completions",
        json={"model": "hash", "messages": conversation, "max_tokens": 1, "num_ctx": 999},
    ).json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= reused.prompt_eval_count - 16
    with pytest.raises(
        ollama.ResponseError, match=r"exceeded max context length: .* the context holds 64.* raise or omit num_ctx"
    ):
        chat(hash_server, messages=conversation, options={"num_ctx": 64})


def test_calls_are_complete_and_thinking_is_separate(scripted_server: ScriptedServer) -> None:
    count = scripted_server.says(SCRIPT)
    whole = chat(scripted_server, messages=[QUESTION], tools=[WEATHER, CLOCK], think=True)
    parts = chat(scripted_server, messages=[QUESTION], tools=[WEATHER, CLOCK], think=True, stream=True)
    assert whole.message.thinking == "They ask."
    assert whole.message.content == "I look."
    assert [(call.function.name, call.function.arguments) for call in whole.message.tool_calls] == [
        ("get_weather", {"city": "Rome", "days": 2})
    ] * 2
    assert (whole.done_reason, whole.eval_count) == ("stop", count)
    assert "".join(part.message.thinking or "" for part in parts) == whole.message.thinking
    assert [call for part in parts for call in part.message.tool_calls or ()] == whole.message.tool_calls


def test_next_turn_accepts_calls_and_results(scripted_server: ScriptedServer) -> None:
    scripted_server.says("It is sunny.")
    call = {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    said = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_name": "get_weather", "content": "sun"}]
    reply = chat(scripted_server, messages=[QUESTION, *said], tools=[WEATHER])
    assert (reply.message.content, reply.message.tool_calls) == ("It is sunny.", None)


def test_think_false_reaches_the_template(scripted_server: ScriptedServer) -> None:
    scripted_server.says("Yes.")
    thinking, silent, plain = (chat(scripted_server, think=think).prompt_eval_count for think in (True, False, None))
    assert silent > thinking == plain  # the template adds an empty thought if thinking is off
    with client(scripted_server) as api:
        assert api.show("scripted").capabilities == ["completion", "tools", "thinking"]


def test_reply_follows_a_format(smollm2_server: LiveServer) -> None:
    kept = chat(smollm2_server, format=ANSWER, options={"num_ctx": 300})
    jsonschema.validate(msgspec.json.decode(kept.message.content), ANSWER)


def test_small_model_makes_a_forced_call(
    smollm2_server: LiveServer, scripted_server: ScriptedServer, renderer: ChatTemplateRenderer
) -> None:
    """The model does not support tools. Another model's template and the grammar force the call."""
    service = ChatService("small", scripted_server.service.tokenizer, smollm2_server.streams, renderer)
    transport = httpx.ASGITransport(
        create_application(fixed_models(service), ServerContext(AccessPolicy(Authenticator(["key"]), ["ingle.test"])))
    )
    asked = {"model": "small", "messages": [QUESTION], "tools": [WEATHER], "tool_choice": "required", "think": False}

    async def call() -> dict[str, Any]:
        async with httpx.AsyncClient(transport=transport, base_url="http://ingle.test") as http:
            answer = await http.post("/api/chat", json={**asked, "stream": False}, headers={"x-api-key": "key"})
            reply: dict[str, Any] = answer.json()
            return reply

    called = smollm2_server.call(call())["message"]["tool_calls"][0]["function"]
    assert called["name"] == "get_weather"
    jsonschema.validate(called["arguments"], PARAMETERS)


def test_ping_is_an_empty_message_that_is_not_done(hash_server: LiveServer) -> None:
    writer = ChatWriter("hash", hash_server.service.tokenizer)
    part = ollama.ChatResponse.model_validate_json(writer.framing().ping("queued"))
    assert (part.done, part.message.content, part.message.role) == (False, "", "assistant")


def test_request_without_messages_is_answered_as_a_load(hash_server: LiveServer) -> None:
    for keep_alive in ("5m", -1):
        reply = chat(hash_server, messages=[], keep_alive=keep_alive)
        assert (reply.done, reply.done_reason, reply.message.content) == (True, "load", "")


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"options": {"temperature": 101}}, "options.temperature"),
        ({"options": {"top_k": "many"}}, "options.top_k"),
        ({"format": {"type": "no type"}}, "format"),
    ],
)
def test_error_names_unsupported_values(hash_server: LiveServer, asked: dict[str, Any], problem: str) -> None:
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError, match=problem) as refused:
            chat(hash_server, **asked, stream=stream)
        assert refused.value.status_code == 400
