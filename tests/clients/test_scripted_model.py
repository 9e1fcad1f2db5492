"""The chat template of the scripted model selects the reply for each conversation."""

from collections.abc import Mapping
from typing import Any

import jinja2
import pytest

from tests.clients.scripted_model import CALL_A_TOOL, NOTE_TEXT, Call, chat_template

CALLS = [(Call("read", {"path": "a"}), "call0"), (Call("read", {"filePath": "a"}), "call1")]
TOOL_REQUEST = {"role": "user", "content": f"Now: {CALL_A_TOOL}."}


def start_of_reply(*messages: Mapping[str, Any], tool: str = "", argument: str = "") -> str:
    function = {"name": tool, "parameters": {"properties": {argument: {"type": "string"}}}}
    template = jinja2.Environment(autoescape=False).from_string(chat_template(CALLS))  # noqa: S701 (not HTML)
    rendered = template.render(messages=messages, tools=[{"function": function}], add_generation_prompt=True)
    return rendered.rpartition("<|start:")[2].removesuffix("|>")


def test_message_without_tool_request_gets_the_answer() -> None:
    assert start_of_reply({"role": "user", "content": "Hello"}, tool="read", argument="path") == "answer"


@pytest.mark.parametrize(("argument", "start"), [("path", "call0"), ("filePath", "call1"), ("other", "answer")])
def test_model_calls_the_tool_whose_argument_is_known(argument: str, start: str) -> None:
    assert start_of_reply(TOOL_REQUEST, tool="read", argument=argument) == start


@pytest.mark.parametrize(("result", "start"), [(f"1: {NOTE_TEXT}", "ran"), ("no such file", "failed")])
def test_reply_after_tool_result_depends_on_note_text(result: str, start: str) -> None:
    assert start_of_reply(TOOL_REQUEST, {"role": "tool", "content": result}, tool="read", argument="path") == start
