"""Requests of Codex CLI with all of its fields, all of its tool types, and the items that it sends back."""

import json
from typing import Any

import httpx

from tests.app.server.scripted_server import ScriptedServer

Json = dict[str, Any]


def function(name: str, **properties: Json) -> Json:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {
        "type": "function",
        "name": name,
        "description": f"It does {name}",
        "strict": False,
        "parameters": parameters,
    }


def message(role: str, *texts: str) -> Json:
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": "msg_01a2032e-c8a5-7510-b68a-7cf0389b5897", "role": role, "content": content}


TEXT = {"type": "string"}
PATCH: Json = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files. This is a FREEFORM tool, so do not wrap the patch in JSON.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /(.|\\n)+/'},
}
AGENTS: Json = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Tools for sub-agents",
    "tools": [function("close_agent", target=TEXT)],
}
REQUEST: Json = {
    "model": "scripted",
    "stream": True,
    "input": [
        message("developer", "You are a coding agent running in the Codex CLI."),
        message("developer", "<skills_instructions>", "<permissions instructions>"),
        message("user", "<environment_context>\n  <cwd>/home/me</cwd>\n</environment_context>"),
        message("user", "List the files here."),
    ],
    "tools": [
        function("exec_command", cmd=TEXT),
        function("view_image", path=TEXT),
        PATCH,
        AGENTS,
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        {"type": "image_generation", "output_format": "png"},
        {"type": "mcp", "server_label": "files", "server_url": "https://example.com", "require_approval": "never"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2032e-c858-7f21-8bda-207c788896c9",
    "text": {"verbosity": "low"},
    "client_metadata": {"thread_id": "01a2032e-c858-7f21-8bda-207c788896c9"},
}
CALLS = (
    {"name": "exec_command", "arguments": {"cmd": "ls"}},
    {"name": "apply_patch", "arguments": {"input": "*** Begin Patch\n*** End Patch"}},
    {"name": "multi_agent_v1__close_agent", "arguments": {"target": "7"}},
)
SCRIPT = "<think>\nA list.\n</think>\n\nI look." + "".join(
    f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in CALLS
)


def asked(server: ScriptedServer, *, says: str, **fields: Any) -> list[Json]:
    """Return the events of a streamed reply to Codex's request."""
    server.says(says)
    url = f"{server.url}/v1/responses"
    answer = httpx.post(url, json=REQUEST | fields, trust_env=False, timeout=None)  # noqa: S113
    assert answer.status_code == 200, answer.text
    return [json.loads(block.partition("data: ")[2]) for block in answer.text.split("\n\n")[:-1]]


def sent_back(item: Json) -> Json:
    """Return an item as Codex sends it in its next request: without status, annotations, and logprobs."""
    return {name: value for name, value in item.items() if name not in ("status", "annotations", "logprobs")}


def test_turn_with_tools_continues_from_the_cache(scripted_server: ScriptedServer) -> None:
    events = asked(scripted_server, says=SCRIPT)
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in items] == [
        "reasoning",
        "message",
        "function_call",
        "custom_tool_call",
        "function_call",
    ]
    reasoning, _, command, patch, close = items
    assert [part["text"] for part in reasoning["summary"]] == ["A list."]
    assert json.loads(command["arguments"]) == {"cmd": "ls"}
    assert (patch["name"], patch["input"]) == ("apply_patch", "*** Begin Patch\n*** End Patch")
    assert (close["name"], close["namespace"]) == ("close_agent", "multi_agent_v1")
    inputs = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(inputs) == patch["input"]
    outputs = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "note.txt"} for item in items[2:]
    ]
    history = [*REQUEST["input"], *map(sent_back, items), *outputs]
    again = asked(scripted_server, says="There is one file.", input=history)[-1]["response"]
    first = events[-1]["response"]["usage"]
    assert again["status"] == "completed"
    cached = again["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= first["input_tokens"] + first["output_tokens"] - 20


def test_empty_input_is_answered(scripted_server: ScriptedServer) -> None:
    probe = asked(scripted_server, says="Hello", input=[], tools=[], instructions="You are a coding agent.")
    assert [event["type"] for event in probe] == ["response.created", "response.in_progress", "response.completed"]


def test_unknown_tools_are_not_called(scripted_server: ScriptedServer) -> None:
    reported = asked(scripted_server, says="Hello")[-1]["response"]["tools"]
    assert [tool["type"] for tool in reported] == ["function", "function", "custom", "namespace"]
