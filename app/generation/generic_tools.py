"""Tools for models whose chat template does not support them.

The system message describes the tools. A grammar restricts each reply to either calls or an answer, each after its own
mark, because small models never call a tool if any text is allowed. Calls and results of earlier turns become assistant
and user messages, which any template accepts. A call is rendered exactly as it was generated, so that its KV blocks are
found again.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Final

from app.generation.conversation import SYSTEM_ROLES, Json, Message, ToolCall
from app.generation.tool_parsers.reply_format import CallSyntax, ReplyFormat


class ToolSupport(Enum):
    """How tools are presented to a model. The values appear in the API and in command output."""

    NATIVE = "native"  # the chat template renders tools
    GENERIC = "generic"  # this module describes tools as text
    NONE = "none"


ANSWER_MARK: Final = "<response>"

# This markup occurs in the training data of most models with plain templates.
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
    """Return the reply format `known`, extended by generic calls and an answer mark."""
    messages = replace(known.messages, answer=known.messages.answer + ANSWER_MARK, answer_mark=ANSWER_MARK)
    return replace(known, calls=_CALLS, messages=messages)


def generic_messages(messages: Sequence[Message], definitions: Sequence[Mapping[str, Json]]) -> list[Message]:
    """Convert a conversation to messages without tool roles and fields, with `definitions` in the system message."""
    marked = bool(definitions)
    converted = [_as_text(message, marked=marked) for message in _with_results_as_users(messages)]
    return _with_instructions(converted, definitions) if definitions else converted


def _as_text(message: Message, *, marked: bool) -> Message:
    """Return an assistant message as the text that was generated, and other messages unchanged."""
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
    """Join consecutive tool results, and the user message after them, into one user message.

    Many templates require that user and assistant messages alternate.
    """
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
    """Append the instructions to the system message, so that its start stays the same if the tools change."""
    lines = "\n".join(json.dumps(definition, ensure_ascii=False, default=dict) for definition in definitions)
    instructions = _INSTRUCTIONS.replace("%s", lines)
    if messages and messages[0].role in SYSTEM_ROLES:
        first = replace(messages[0], content=f"{messages[0].content}\n\n{instructions}".lstrip())
        return [first, *messages[1:]]
    return [Message("system", instructions), *messages]
