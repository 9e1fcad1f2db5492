"""Conversion of the Responses API's input items to messages."""

from typing import Any

import msgspec
import pytest

from app.generation.conversation import Message, ToolCall
from app.server.dialects.responses.input_items import InputItem, compaction_item, items_of, messages_of
from app.server.dialects.responses.tools import qualified
from app.server.http.errors import InvalidRequest


def read(*items: dict[str, Any], instructions: str | None = None, earlier: int = 0) -> list[Message]:
    given = [msgspec.convert(item, InputItem) for item in items]
    return messages_of(instructions, given[:earlier], given[earlier:], qualified)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


THOUGHTS = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
CALL = {"type": "function_call", "name": "look", "call_id": "1", "arguments": '{"at": 1}'}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "Nothing"}
LOOK = ToolCall("look", {"at": 1}, "1")


@pytest.mark.parametrize("earlier", [0, 3, 6])
def test_items_of_one_turn_become_one_message(earlier: int) -> None:
    assert read(user("Hi"), THOUGHTS, TEXT, CALL, RESULT, TEXT, TEXT, earlier=earlier) == [
        Message("user", "Hi"),
        Message("assistant", "I look.", "Hm.", (LOOK,)),
        Message("tool", "Nothing", tool_call_id="1"),
        Message("assistant", "I look."),
        Message("assistant", "I look."),
    ]


def test_text_after_a_call_is_in_the_same_message() -> None:
    assert read(TEXT, CALL, TEXT) == [Message("assistant", "I look.I look.", tool_calls=(LOOK,))]


def test_roles_alternate_and_instructions_come_first() -> None:
    reported = read(
        {"role": "developer", "content": "Be kind."},
        {"role": "system", "content": [{"type": "input_text", "text": "Be"}, {"type": "input_text", "text": "short."}]},
        user("It is late."),
        user("Hi"),
        {"role": "developer", "content": "Be quick."},
        TEXT,
        {"role": "developer", "content": "Be slow."},
        instructions="Be brief.",
    )
    first = "Be brief.\n\nBe kind.\n\nBe\nshort."
    assert reported == [
        Message("system", first),
        Message("user", "It is late.\n\nHi\n\nBe quick."),
        Message("assistant", "I look."),
        Message("user", "Be slow."),
    ]


def test_custom_tool_calls_and_outputs_are_read() -> None:
    patch = {"type": "custom_tool_call", "name": "apply_patch", "call_id": "2", "input": "*** Begin"}
    result = {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "Done"}]}
    call = ToolCall("apply_patch", {"input": "*** Begin"}, "2")
    assert read(patch, result) == [
        Message("assistant", tool_calls=(call,)),
        Message("tool", "Done", tool_call_id="2"),
    ]


def test_tool_of_a_namespace_has_its_prefix() -> None:
    [message] = read({**CALL, "namespace": "mcp__files__"})
    assert [call.name for call in message.tool_calls] == ["mcp__files__look"]


def test_unknown_items_are_ignored() -> None:
    others: list[dict[str, Any]] = [
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "a"}},
        {"type": "local_shell_call", "call_id": "3", "status": "completed", "action": {"type": "exec", "command": []}},
        {"type": "computer_call_output", "call_id": "4", "output": {"type": "computer_screenshot"}},
        {**CALL, "arguments": '{"at', "status": "incomplete"},
    ]
    assert read(user("Hi"), *others, TEXT) == [Message("user", "Hi"), Message("assistant", "I look.")]


@pytest.mark.parametrize("content", ["gAAAA", "", "aW5nbGVub29r", "\u00e9", None])
def test_compaction_of_another_server_is_refused(content: str | None) -> None:
    with pytest.raises(InvalidRequest, match="another server"):
        read(user("Hi"), {"type": "compaction", "encrypted_content": content})


def test_compaction_becomes_an_assistant_message() -> None:
    item = compaction_item("They spoke of é.")
    asked = {"type": "compaction", "encrypted_content": item.encrypted_content}
    [_, message] = read(user("Hi"), asked)
    assert (message.role, message.content.splitlines()[-1]) == ("assistant", "They spoke of é.")


def test_stored_item_has_all_fields() -> None:
    [kept] = [item.to_stored() for item in items_of("Hi")]
    reported = msgspec.to_builtins(kept)
    assert reported.pop("id").startswith("msg_")
    content = [{"type": "input_text", "text": "Hi"}]
    assert reported == {"type": "message", "role": "user", "status": "completed", "content": content}
    assert items_of("") == items_of(None) == []
