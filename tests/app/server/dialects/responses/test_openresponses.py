"""The compliance cases of Open Responses (https://www.openresponses.org), except for images.

The tests check that the requests of these cases are accepted, and that replies have the fields of the schema.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.app.server.scripted_server import ScriptedServer

Json = dict[str, Any]

WEATHER: Json = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}},
        "required": ["location"],
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}\n</tool_call>'


def message(role: str, content: str) -> Json:
    return {"type": "message", "role": role, "content": content}


BASIC: Json = {"input": [message("user", "Say hello in exactly 3 words.")]}
STREAMING: Json = {"input": [message("user", "Count from 1 to 5.")]}
PIRATE = "You are a pirate. Always respond in pirate speak."
SYSTEM: Json = {"input": [message("system", PIRATE), message("user", "Say hello.")]}
TOOLS: Json = {"input": [message("user", "What's the weather like in San Francisco?")], "tools": [WEATHER]}
GREETING = "Hello Alice! Nice to meet you. How can I help you today?"
TURNS: Json = {
    "input": [
        message("user", "My name is Alice."),
        message("assistant", GREETING),
        message("user", "What is my name?"),
    ]
}

NUMBER = (int, float)
NONE = type(None)
RESPONSE: dict[str, Any] = {
    "id": str,
    "object": str,
    "created_at": int,
    "completed_at": (int, NONE),
    "status": str,
    "incomplete_details": (dict, NONE),
    "model": str,
    "previous_response_id": (str, NONE),
    "instructions": (str, NONE),
    "output": list,
    "error": (dict, NONE),
    "tools": list,
    "tool_choice": (str, dict),
    "truncation": str,
    "parallel_tool_calls": bool,
    "text": dict,
    "top_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "top_logprobs": int,
    "temperature": NUMBER,
    "reasoning": (dict, NONE),
    "usage": (dict, NONE),
    "max_output_tokens": (int, NONE),
    "max_tool_calls": (int, NONE),
    "store": bool,
    "background": bool,
    "service_tier": str,
    "metadata": dict,
    "safety_identifier": (str, NONE),
    "prompt_cache_key": (str, NONE),
}
TOOL: dict[str, Any] = {
    "type": str,
    "name": str,
    "description": (str, NONE),
    "parameters": (dict, NONE),
    "strict": (bool, NONE),
}
ITEMS: dict[str, dict[str, Any]] = {
    "message": {"id": str, "status": str, "role": str, "content": list},
    "function_call": {"id": str, "call_id": str, "name": str, "arguments": str, "status": str},
}
PART: dict[str, Any] = {"type": str, "text": str, "annotations": list, "logprobs": list}
OF_ITEM: dict[str, Any] = {"item_id": str, "output_index": int}
OF_PART = {**OF_ITEM, "content_index": int}
EVENTS: dict[str, dict[str, Any]] = {
    "response.created": {"response": dict},
    "response.in_progress": {"response": dict},
    "response.output_item.added": {"output_index": int, "item": dict},
    "response.content_part.added": {**OF_PART, "part": dict},
    "response.output_text.delta": {**OF_PART, "delta": str, "logprobs": list},
    "response.output_text.done": {**OF_PART, "text": str, "logprobs": list},
    "response.content_part.done": {**OF_PART, "part": dict},
    "response.function_call_arguments.delta": {**OF_ITEM, "delta": str},
    "response.function_call_arguments.done": {**OF_ITEM, "arguments": str},
    "response.output_item.done": {"output_index": int, "item": dict},
    "response.completed": {"response": dict},
}


def check(value: Json, fields: dict[str, Any]) -> None:
    for name, kind in fields.items():
        assert isinstance(value[name], kind), (name, value[name])


def check_response(response: Json) -> None:
    check(response, RESPONSE)
    for tool in response["tools"]:
        check(tool, TOOL)
    for item in response["output"]:
        check_item(item)
    assert response["text"]["format"]["type"] == "text"


def check_item(item: Json) -> None:
    check(item, ITEMS[item["type"]])
    for part in item.get("content", ()):
        check(part, PART)


def events(body: str) -> Iterator[Json]:
    for block in body.split("\n\n")[:-1]:
        name, data = (line.partition(": ")[2] for line in block.split("\n"))
        event: Json = json.loads(data)
        assert event["type"] == name
        check(event, {**EVENTS[name], "sequence_number": int})
        if "item" in event:
            check_item(event["item"])
        if "response" in event:
            check_response(event["response"])
        yield event


def asked(server: ScriptedServer, says: str, request: Json, *, stream: bool) -> httpx.Response:
    server.says(says)
    body = {"model": "scripted", **request, "stream": stream}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, trust_env=False, timeout=None)  # noqa: S113
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("request_", [BASIC, SYSTEM, TURNS], ids=["basic", "system prompt", "multi-turn"])
def test_text_gives_a_completed_response(scripted_server: ScriptedServer, request_: Json) -> None:
    response = asked(scripted_server, "Hello there, friend.", request_, stream=False).json()
    check_response(response)
    assert (response["status"], len(response["output"])) == ("completed", 1)


def test_stream_ends_with_a_completed_event(scripted_server: ScriptedServer) -> None:
    *_, last = events(asked(scripted_server, "1, 2, 3, 4, 5", STREAMING, stream=True).text)
    assert (last["type"], last["response"]["status"]) == ("response.completed", "completed")


def test_model_calls_the_tool(scripted_server: ScriptedServer) -> None:
    response = asked(scripted_server, CALL, TOOLS, stream=False).json()
    check_response(response)
    assert [item["type"] for item in response["output"]] == ["function_call"]


def test_streamed_call_has_function_call_events(scripted_server: ScriptedServer) -> None:
    reported = list(events(asked(scripted_server, CALL, TOOLS, stream=True).text))
    kinds = {event["type"] for event in reported}
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
    for kind in ("added", "done"):
        items = [event["item"]["type"] for event in reported if event["type"] == f"response.output_item.{kind}"]
        assert items == ["function_call"]
