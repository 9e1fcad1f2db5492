"""The content of messages in Anthropic's API: blocks of text, of thoughts, of calls and of their results.

From these to the messages that templates read: the results of a user's message become messages of their own, in front
of its text or behind it as they stand. Refuses to know what a request says besides.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from app.generation.conversation import Message, ToolCall
from app.server.http.errors import InvalidRequest

# Kept with a model's words by the API's own models; a model here has no use for them.
_UNREAD = frozenset(("redacted_thinking",))
# Few templates know a system that speaks again later. Where it does, stays in place, so that nothing before it is
# computed anew; it is a part of the user's message, in the marks that Claude Code has for that.
_REMINDER = "<system-reminder>\n{}\n</system-reminder>"


class ResultBlock(Struct):
    """A block in the result of a tool."""

    type: str
    text: str | None = None
    tool_name: str | None = None  # of a tool that a search for tools has found


class ContentBlock(Struct):
    """A block of a message; which of the fields there are, depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None  # of a call, as the next two
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # of a result, as the next two
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
class _Placed:
    """A block, and where it stands in the request."""

    block: ContentBlock
    place: str
    marked: bool = False  # the system said it in the middle of the conversation

    @property
    def text(self) -> str:
        if self.block.type != "text":
            raise unreadable(self.block.type, self.place)
        text = _required(self.block.text, f"{self.place}.text")
        return _REMINDER.format(text) if self.marked else text


def system_texts(system: SystemPrompt | None) -> Iterator[str]:
    """The texts of a system prompt. Raises InvalidRequest for what is none."""
    if isinstance(system, str):
        yield system
        return
    for index, block in enumerate(system or ()):
        yield _Placed(ContentBlock(block.type, block.text), f"system[{index}]").text


def messages_of(given: Sequence[InputMessage]) -> list[Message]:
    """The messages, of which several in a row of one role are one. Raises InvalidRequest naming the block that cannot
    be given to a model."""
    messages: list[Message] = []
    names: dict[str, str] = {}  # of the tools that were called, by the call's id
    first = next((index for index, message in enumerate(given) if message.role != "system"), len(given))
    if first:
        blocks = [placed for index in range(first) for placed in _placed(given[index], index)]
        messages.append(Message("system", "\n".join(placed.text for placed in blocks)))
    for is_said, several in groupby(range(first, len(given)), key=lambda index: given[index].role == "assistant"):
        blocks = [placed for index in several for placed in _placed(given[index], index, reminds=True)]
        if is_said:
            said = _of_assistant(blocks)
            names |= {call.id: call.name for call in said.tool_calls if call.id is not None}
            messages.append(said)
        else:
            messages += _of_user(blocks, names)
    return messages


def _placed(message: InputMessage, index: int, *, reminds: bool = False) -> Iterator[_Placed]:
    """The blocks of a message. If it `reminds`, what the system says is marked as such."""
    content, place, marked = message.content, f"messages[{index}].content", reminds and message.role == "system"
    if isinstance(content, str):
        yield _Placed(ContentBlock("text", content), place, marked)
        return
    for number, block in enumerate(content):
        yield _Placed(block, f"{place}[{number}]", marked)


@dataclass(slots=True)
class _Said:
    """What the blocks of an assistant's message say."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, placed: _Placed) -> None:
        block = placed.block
        if block.type == "thinking":
            self.thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            name = _required(block.name, f"{placed.place}.name")
            self.calls.append(ToolCall(name, block.input or {}, block.id))
        elif block.type not in _UNREAD:
            self.texts.append(placed.text)


def _of_assistant(blocks: Sequence[_Placed]) -> Message:
    """Without a sign between its texts: they are those of a reply, which was one."""
    said = _Said()
    for placed in blocks:
        said.add(placed)
    return Message("assistant", "".join(said.texts), "".join(said.thoughts) or None, tuple(said.calls))


def _of_user(blocks: Sequence[_Placed], names: Mapping[str, str]) -> Iterator[Message]:
    for is_result, several in groupby(blocks, key=lambda placed: placed.block.type == "tool_result"):
        if is_result:
            yield from (_result(placed, names) for placed in several)
        else:
            yield Message("user", "\n".join(placed.text for placed in several))


def _result(placed: _Placed, names: Mapping[str, str]) -> Message:
    block = placed.block
    call_id = _required(block.tool_use_id, f"{placed.place}.tool_use_id")
    content = block.content or ""
    if not isinstance(content, str):
        texts = (_result_text(one, f"{placed.place}.content[{index}]") for index, one in enumerate(content))
        content = "\n".join(texts)
    if block.is_error:
        content = f"Error: {content}"
    return Message("tool", content, tool_call_id=call_id, name=names.get(call_id))


def _result_text(block: ResultBlock, place: str) -> str:
    if block.type == "tool_reference":
        return _required(block.tool_name, f"{place}.tool_name")
    if block.type != "text":
        raise unreadable(block.type, place)
    return _required(block.text, f"{place}.text")


def unreadable(kind: str, place: str) -> InvalidRequest:
    """The refusal of a block that is no text."""
    problem = f"{place}: a block of type {kind!r} cannot be read; this version reads text only"
    return InvalidRequest(problem, "Send it as text, without images, documents or audio.", parameter=place)


def _required(value: str | None, place: str) -> str:
    if value is None:
        raise InvalidRequest(f"{place}: it is required", parameter=place)
    return value
