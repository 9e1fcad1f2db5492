"""Tests of app/generation/conversation.py."""

from typing import Any

import pytest

from app.generation.conversation import InvalidMessage, Message, ToolCall, parse_arguments


def test_plain_message_has_only_role_and_content() -> None:
    assert Message("user", "hi").to_template() == {"role": "user", "content": "hi"}


def test_missing_content_is_empty() -> None:
    assert Message("assistant", tool_calls=(ToolCall("now", {}),)).to_template()["content"] == ""


def test_every_field_reaches_the_template() -> None:
    call = ToolCall("weather", {"city": "Rome", "days": [1, 2]}, id="c1")
    assert Message("assistant", "yes", reasoning="hm", tool_calls=(call,)).to_template() == {
        "thinking": "hm",
        "role": "assistant",
        "content": "yes",
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Rome", "days": [1, 2]}},
            }
        ],
    }
    assert Message("tool", "22", tool_call_id="c1", name="weather").to_template() == {
        "role": "tool",
        "content": "22",
        "tool_call_id": "c1",
        "name": "weather",
    }


def test_call_without_id_has_no_id_key() -> None:
    assert ToolCall("now", {}).to_template() == {"type": "function", "function": {"name": "now", "arguments": {}}}


@pytest.mark.parametrize(("text", "arguments"), [('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}), ("", {})])
def test_arguments_are_parsed(text: str, arguments: dict[str, object]) -> None:
    assert ToolCall.parse("f", text, id="c") == ToolCall("f", arguments, id="c")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["{", "[1]", '"a"', "null", "1", "[" * 100_000])
def test_non_object_arguments_are_refused(text: str) -> None:
    with pytest.raises(InvalidMessage, match="'get_time'") as caught:
        ToolCall.parse("get_time", text)
    assert caught.value.remedy


@pytest.mark.parametrize(("text", "arguments"), [("", {}), ("{}", {}), ('{"a": 1}', {"a": 1})])
def test_json_objects_are_parsed_as_arguments(text: str, arguments: dict[str, Any]) -> None:
    assert parse_arguments(text) == arguments


@pytest.mark.parametrize("text", ["[1]", "1", "{", "null", '{"a":' * 100_000])
def test_arguments_that_are_not_a_json_object_raise(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_arguments(text)
