"""The second request of a turn of Claude Code 2.1.197, with changed texts, is answered, and its prefix is cached.

The prefix matches although a line at the start of the prompt changes with each request.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from app.server.dialects.anthropic.changing_lines import CHANGING_LINES, KEEP_ALL_LINES, ChangingLines
from app.server.dialects.anthropic.requests import MessageRequest
from tests.app.server.scripted_server import ScriptedServer

HEADERS = {
    "authorization": "Bearer none",
    "user-agent": "claude-cli/2.1.197 (external, sdk-cli)",
    "x-app": "cli",
    "x-claude-code-session-id": "00000000-0000-4000-8000-000000000000",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,mid-conversation-system-2026-04-07",
    "anthropic-dangerous-direct-browser-access": "true",
    "anthropic-version": "2023-06-01",
}
LATER = "x-anthropic-billing-header: cc_version=2.2.0.0d9; cc_entrypoint=cli; cch=fa690; cc_is_subagent=true;"
READ = '<tool_call>\n{"name": "Read", "arguments": {"file_path": "/etc/hostname"}}\n</tool_call>'


@pytest.fixture
def asked(scripted_server: ScriptedServer) -> dict[str, Any]:
    text = Path(__file__).with_name("claude_code_request.json").read_text(encoding="utf-8")
    request: dict[str, Any] = json.loads(text)
    return request | {"model": scripted_server.service.name}


def send(server: ScriptedServer, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    url = f"{server.url}/v1/messages?beta=true"
    answer = httpx.post(url, json=asked, headers=HEADERS, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    for line in answer.text.splitlines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_request_of_claude_code_is_answered(scripted_server: ScriptedServer, asked: dict[str, Any]) -> None:
    scripted_server.says(f"<think>\nThere is more.\n</think>\n\nI read.\n{READ}")
    events = list(send(scripted_server, asked))
    begun = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert begun == ["thinking", "text", "tool_use"]
    pieces = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    written = "".join(piece["partial_json"] for piece in pieces if piece["type"] == "input_json_delta")
    assert json.loads(written) == {"file_path": "/etc/hostname"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_changing_line_does_not_prevent_cache_hits(scripted_server: ScriptedServer, asked: dict[str, Any]) -> None:
    later = copy.deepcopy(asked)
    later["system"][0]["text"] = LATER
    later["metadata"]["user_id"] = "another"
    scripted_server.says("Done.")
    for request in (asked, later):
        *_, outcome, _ = send(scripted_server, request)
        usage = outcome["usage"]
        assert usage["prompt_tokens_details"]["left_out"] == ["x-anthropic-billing-header"]
    found, computed = usage["cache_read_input_tokens"], usage["input_tokens"]
    assert found >= 0.99 * (found + computed)


@pytest.mark.parametrize(("lines", "left_out"), [(CHANGING_LINES, True), (KEEP_ALL_LINES, False)])
def test_changing_lines_are_kept_on_request(asked: dict[str, Any], lines: ChangingLines, left_out: bool) -> None:
    conversation = msgspec.convert(asked, MessageRequest).conversation(lines)
    first = conversation.messages[0].content
    assert (
        bool(conversation.left_out) == left_out == first.startswith("You are an agent of the client's.\n\nInstructions")
    )
    assert first.startswith("x-anthropic-billing-header: ") != left_out


def test_only_whole_matching_lines_are_removed() -> None:
    line = "x-anthropic-billing-header: a"
    kept = CHANGING_LINES.remove_from([f"One\n{line}\nTwo", line, "", f"No {line}"])
    assert kept.texts == ["One\nTwo", "", f"No {line}"]
    assert kept.left_out == ("x-anthropic-billing-header",)
    assert CHANGING_LINES.remove_from(["Hello"]).left_out == ()
