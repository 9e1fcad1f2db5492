"""Message content in Anthropic's API: blocks of text, thinking, tool calls, and tool results.

They become messages for chat templates. Tool results in a user's message become separate messages, before or after its
text, in the order of the blocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from app.generation.conversation import Message, ToolCall
from app.server.http.errors import InvalidRequest

# Only Anthropic's own models can read these blocks.
_IGNORED_TYPES = frozenset(("redacted_thinking",))
# Few templates support system messages after the first. A later one keeps its position, so that the prompt before it
# stays cached. It becomes a part of the user's message, in the tags that Claude Code uses for this.
_REMINDER = "<system-reminder>\n{}\n</system-reminder>"


class ResultBlock(Struct):
    """A block in the result of a tool."""

    type: str
    text: str | None = None
    tool_name: str | None = None  # name of a tool that a tool search has found


class ContentBlock(Struct):
    """A block of a message. Its type determines which fields it has."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None  # id of a call; the next two fields also belong to a call
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # id of the call that a result answers; the next two fields also belong to a result
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


class SystemBlock(Struct):
    type: str
    text: str | None = None


class InputMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


SystemPrompt: TypeAlias = str | list[SystemBlock]
InputMessages: TypeAlias = Annotated[list[InputMessage], Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class _LocatedBlock:
    """A block and its path in the request."""

    block: ContentBlock
    path: str
    is_reminder: bool = False  # whether it is a system message that comes after another message

    @property
    def text(self) -> str:
        if self.block.type != "text":
            raise unsupported_block(self.block.type, self.path)
        text = _required(self.block.text, f"{self.path}.text")
        return _REMINDER.format(text) if self.is_reminder else text


def system_texts(system: SystemPrompt | None) -> Iterator[str]:
    """Yield the texts of a system prompt. Raises InvalidRequest for blocks other than text."""
    if isinstance(system, str):
        yield system
        return
    for index, block in enumerate(system or ()):
        yield _LocatedBlock(ContentBlock(block.type, block.text), f"system[{index}]").text


def messages_of(input_messages: Sequence[InputMessage]) -> list[Message]:
    """Convert messages. Consecutive messages of the same role become one.

    Raises InvalidRequest naming the block that cannot be converted.
    """
    messages: list[Message] = []
    names: dict[str, str] = {}  # id of a call -> name of the tool
    first = next(
        (index for index, message in enumerate(input_messages) if message.role != "system"), len(input_messages)
    )
    if first:
        blocks = [located for index in range(first) for located in _located_blocks(input_messages[index], index)]
        messages.append(Message("system", "\n".join(located.text for located in blocks)))
    for is_assistant, indices in groupby(
        range(first, len(input_messages)), key=lambda index: input_messages[index].role == "assistant"
    ):
        blocks = [
            located for index in indices for located in _located_blocks(input_messages[index], index, as_reminders=True)
        ]
        if is_assistant:
            parts = _assistant_message(blocks)
            names |= {call.id: call.name for call in parts.tool_calls if call.id is not None}
            messages.append(parts)
        else:
            messages += _user_messages(blocks, names)
    return messages


def _located_blocks(message: InputMessage, index: int, *, as_reminders: bool = False) -> Iterator[_LocatedBlock]:
    """Yield the blocks of a message. With `as_reminders`, blocks of system messages are marked as reminders."""
    content, path, is_reminder = (
        message.content,
        f"messages[{index}].content",
        as_reminders and message.role == "system",
    )
    if isinstance(content, str):
        yield _LocatedBlock(ContentBlock("text", content), path, is_reminder)
        return
    for number, block in enumerate(content):
        yield _LocatedBlock(block, f"{path}[{number}]", is_reminder)


@dataclass(slots=True)
class _AssistantParts:
    """The parts of an assistant's message."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, located: _LocatedBlock) -> None:
        block = located.block
        if block.type == "thinking":
            self.reasoning.append(block.thinking or "")
        elif block.type == "tool_use":
            name = _required(block.name, f"{located.path}.name")
            self.calls.append(ToolCall(name, block.input or {}, block.id))
        elif block.type not in _IGNORED_TYPES:
            self.texts.append(located.text)


def _assistant_message(blocks: Sequence[_LocatedBlock]) -> Message:
    """Join the blocks without a separator, because they were one reply."""
    parts = _AssistantParts()
    for located in blocks:
        parts.add(located)
    return Message("assistant", "".join(parts.texts), "".join(parts.reasoning) or None, tuple(parts.calls))


def _user_messages(blocks: Sequence[_LocatedBlock], names: Mapping[str, str]) -> Iterator[Message]:
    for is_result, indices in groupby(blocks, key=lambda located: located.block.type == "tool_result"):
        if is_result:
            yield from (_tool_message(located, names) for located in indices)
        else:
            yield Message("user", "\n".join(located.text for located in indices))


def _tool_message(located: _LocatedBlock, names: Mapping[str, str]) -> Message:
    block = located.block
    call_id = _required(block.tool_use_id, f"{located.path}.tool_use_id")
    content = block.content or ""
    if not isinstance(content, str):
        texts = (_result_text(one, f"{located.path}.content[{index}]") for index, one in enumerate(content))
        content = "\n".join(texts)
    if block.is_error:
        content = f"Error: {content}"
    return Message("tool", content, tool_call_id=call_id, name=names.get(call_id))


def _result_text(block: ResultBlock, path: str) -> str:
    if block.type == "tool_reference":
        return _required(block.tool_name, f"{path}.tool_name")
    if block.type != "text":
        raise unsupported_block(block.type, path)
    return _required(block.text, f"{path}.text")


def unsupported_block(kind: str, path: str) -> InvalidRequest:
    """Return the error for a block that is not text."""
    problem = f"{path}: blocks of type {kind!r} are not supported; this version reads text only"
    return InvalidRequest(problem, "Send text, without images, documents, or audio.", parameter=path)


def _required(value: str | None, path: str) -> str:
    if value is None:
        raise InvalidRequest(f"{path}: it is required", parameter=path)
    return value
