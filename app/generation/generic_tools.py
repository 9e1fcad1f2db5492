"""Tools for models whose chat template has no place for them.

The system message describes the tools, and a grammar holds each reply to calls or to an answer, each behind a mark of
its own: where a small model may write anything, it never calls. Calls and results of earlier turns become texts of the
assistant and of the user, which any template takes. A call is written again as it was generated, so that its KV blocks
are found.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Final

from app.generation.conversation import SYSTEM_ROLES, Json, Message, ToolCall
from app.generation.tool_parsers.reply_format import CallSyntax, ReplyFormat


class ToolSupport(Enum):
    """How a model is told of tools and calls them. The values are those that servers and commands tell."""

    NATIVE = "native"  # as its chat template has it
    GENERIC = "generic"  # as text, by this module
    NONE = "none"


ANSWER_MARK: Final = "<response>"

# The markup that most models with plain templates have seen in training, if any.
_CALLS = CallSyntax("generic", ("<tool_call>\n{objects}\n</tool_call>",))
_INSTRUCTIONS = """# Tools

You can call these tools:
<tools>
%s
</tools>

Begin every reply with <response> or with <tool_call>. To answer the user, write text:
<response>Your answer
To call a tool, write its name and its arguments as a JSON object:
<tool_call>
{"name": "the tool's name", "arguments": {...}}
</tool_call>"""


def generic_format(known: ReplyFormat) -> ReplyFormat:
    """The format of replies that answer or call generically, with the thoughts and messages of the model's own."""
    messages = replace(known.messages, answer=known.messages.answer + ANSWER_MARK, answer_mark=ANSWER_MARK)
    return replace(known, calls=_CALLS, messages=messages)


def generic_messages(messages: Sequence[Message], definitions: Sequence[Mapping[str, Json]]) -> list[Message]:
    """The messages of a conversation without roles and fields for tools, and with `definitions` described in front."""
    marked = bool(definitions)
    converted = [_as_text(message, marked=marked) for message in _with_results_as_users(messages)]
    return _with_instructions(converted, definitions) if definitions else converted


def _as_text(message: Message, *, marked: bool) -> Message:
    """An assistant's message as it was generated; others unchanged."""
    if message.tool_calls:
        parts = [message.content, *map(_call, message.tool_calls)]
        return replace(message, content="\n".join(filter(None, parts)), tool_calls=())
    if marked and message.role == "assistant":
        return replace(message, content=ANSWER_MARK + message.content)
    return message


def _call(call: ToolCall) -> str:
    written = {"name": call.name, "arguments": call.arguments}
    return f"<tool_call>\n{json.dumps(written, ensure_ascii=False, default=dict)}\n</tool_call>"


def _with_results_as_users(messages: Sequence[Message]) -> Iterator[Message]:
    """Results that follow one another, and what the user says behind them, become one message: many templates want
    users and assistants in turn."""
    results: list[str] = []
    for message in messages:
        if message.role == "tool":
            results.append(f"<tool_response>\n{message.content}\n</tool_response>")
            continue
        if results and message.role == "user":
            yield replace(message, content="\n".join((*results, message.content)))
        else:
            yield from [Message("user", "\n".join(results))] if results else []
            yield message
        results = []
    if results:
        yield Message("user", "\n".join(results))


def _with_instructions(messages: Sequence[Message], definitions: Sequence[Mapping[str, Json]]) -> list[Message]:
    """Behind what the system message says, so that its beginning stays the same where the tools change."""
    lines = "\n".join(json.dumps(definition, ensure_ascii=False, default=dict) for definition in definitions)
    instructions = _INSTRUCTIONS.replace("%s", lines)
    if messages and messages[0].role in SYSTEM_ROLES:
        first = replace(messages[0], content=f"{messages[0].content}\n\n{instructions}".lstrip())
        return [first, *messages[1:]]
    return [Message("system", instructions), *messages]
