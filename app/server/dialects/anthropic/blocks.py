"""Message content in Anthropic's API: blocks of text, images, documents, thinking, tool calls, and tool results.

They become messages for chat templates. Tool results in a user's message become separate messages, before or after its
text, in the order of the blocks. Words replace images and documents.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from msgspec import Meta, Struct

from app.generation.attachments import Attachment, AttachmentKind
from app.generation.conversation import Message, ToolCall
from app.server.http.errors import InvalidRequest

# Only Anthropic's own models can read these blocks.
_IGNORED_TYPES = frozenset(("redacted_thinking",))
# Few templates support system messages after the first. A later one keeps its position, so that the prompt before it
# stays cached. It becomes a part of the user's message, in the tags that Claude Code uses for this.
_REMINDER = "<system-reminder>\n{}\n</system-reminder>"


_ATTACHMENTS: Final[Mapping[str, AttachmentKind]] = {"image": "image", "document": "document"}
_TEXT_SOURCES: Final = frozenset(("text", "content"))  # a plain text, and a list of blocks, which is refused


class Source(Struct):
    """The source of an image or a document."""

    type: str
    media_type: str | None = None
    data: str | None = None  # the text of a source of type "text"
    url: str | None = None


class Block(Struct):
    """The fields that blocks of messages, of system prompts, and of the results of tools share."""

    type: str
    text: str | None = None
    source: Source | str | None = None  # a string in the results of searches, which are refused
    title: str | None = None  # name of a document

    def attachment(self, path: str) -> Attachment | None:
        """Return the image or document in this block, which is at `path` in the request; None: it has none."""
        kind, source = _ATTACHMENTS.get(self.type), self.source
        if kind is None or not isinstance(source, Source) or source.type in _TEXT_SOURCES:
            return None
        return Attachment.at(kind, path, source.url or "", self.title, source.media_type)

    def to_text(self, path: str) -> str:
        """Return the text, or the words for an attachment. Raises InvalidRequest for a block of another type."""
        if (attached := self.attachment(path)) is not None:
            return attached.words
        if self.type == "document" and isinstance(self.source, Source) and self.source.type == "text":
            return _required(self.source.data, f"{path}.source.data")
        if self.type != "text":
            raise unsupported_block(self.type, path)
        return _required(self.text, f"{path}.text")


class ResultBlock(Block):
    """A block in the result of a tool."""

    tool_name: str | None = None  # name of a tool that a tool search has found


class ContentBlock(Block):
    """A block of a message. Its type determines which fields it has."""

    thinking: str | None = None
    id: str | None = None  # id of a call; the next two fields also belong to a call
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # id of the call that a result answers; the next two fields also belong to a result
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


class InputMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


BlockT = TypeVar("BlockT", bound=Block)
SystemPrompt: TypeAlias = str | list[Block]
InputMessages: TypeAlias = Annotated[list[InputMessage], Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class _LocatedBlock:
    """A block and its path in the request."""

    block: ContentBlock
    path: str
    is_reminder: bool = False  # whether it is a system message that comes after another message

    @property
    def text(self) -> str:
        text = self.block.to_text(self.path)
        return _REMINDER.format(text) if self.is_reminder else text


def system_texts(system: SystemPrompt | None) -> Iterator[str]:
    """Yield the texts of a system prompt. Raises InvalidRequest for a block that has no text."""
    if isinstance(system, str):
        yield system
    for block, path in _with_paths(system, "system"):
        yield block.to_text(path)


def attachments_of(system: SystemPrompt | None, messages: Sequence[InputMessage]) -> Iterator[Attachment]:
    """Return the images and documents of a request."""
    found: list[tuple[Block, str]] = [*_with_paths(system, "system")]
    for index, message in enumerate(messages):
        for block, path in _with_paths(message.content, f"messages[{index}].content"):
            found += [(block, path), *_with_paths(block.content, f"{path}.content")]
    attachments = (block.attachment(path) for block, path in found)
    return filter(None, attachments)


def _with_paths(content: str | Sequence[BlockT] | None, path: str) -> Iterator[tuple[BlockT, str]]:
    """Yield the blocks of `content`, which is at `path` in the request, each with its path."""
    for index, block in enumerate(() if content is None or isinstance(content, str) else content):
        yield block, f"{path}[{index}]"


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
    for block, block_path in _with_paths(content, path):
        yield _LocatedBlock(block, block_path, is_reminder)


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
        content = "\n".join(_result_text(*one) for one in _with_paths(content, f"{located.path}.content"))
    if block.is_error:
        content = f"Error: {content}"
    return Message("tool", content, tool_call_id=call_id, name=names.get(call_id))


def _result_text(block: ResultBlock, path: str) -> str:
    if block.type == "tool_reference":
        return _required(block.tool_name, f"{path}.tool_name")
    return block.to_text(path)


def unsupported_block(kind: str, path: str) -> InvalidRequest:
    """Return the error for a block without text."""
    problem = f"{path}: this block of type {kind!r} is not supported; this version reads text only"
    return InvalidRequest(problem, "Send text.", parameter=path)


def _required(value: str | None, path: str) -> str:
    if value is None:
        raise InvalidRequest(f"{path}: it is required", parameter=path)
    return value
