"""The items that requests bring, and the messages that they are.

What an assistant said in one go is told as several items: thoughts, a text, calls. Here they become one message again,
so that its prompt is the one that is cached. Refuses to know how items are kept.
"""

import base64
import binascii
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct
from msgspec.structs import replace

from app.generation.conversation import InvalidMessage, Message, ToolCall
from app.server.http.errors import InvalidRequest

MAX_ITEMS = 1 << 14
ITEM_REFERENCE = "item_reference"
COMPACTION = "compaction"  # stands for earlier items, of which its content has a summary
_CONTENT_PREFIX = "inglenook:"  # what the content of our compaction items begins with
_SUMMARY = "Summary of the conversation so far:\n\n{}"
# The text of content parts, and the key each kind keeps it under.
_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class ContentPart(Struct, omit_defaults=True):
    type: str
    text: str | None = None
    error_response: str | None = None


Content: TypeAlias = str | list[ContentPart]


class InputItem(Struct, omit_defaults=True):
    """An item of any type, with the fields of those that are read; an item of another type is passed over."""

    type: Annotated[str, Meta(max_length=64)] | None = None  # a message, where it has a role
    id: Annotated[str, Meta(max_length=256)] | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None  # of a message, or of thoughts
    summary: list[ContentPart] | None = None  # of thoughts
    call_id: Annotated[str, Meta(max_length=256)] | None = None  # of a call, and of what came of it
    name: Annotated[str, Meta(max_length=256)] | None = None  # of the tool that is called
    namespace: Annotated[str, Meta(max_length=256)] | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None  # of a custom tool
    output: str | list[ContentPart] | dict[str, Any] | None = None
    encrypted_content: str | None = None  # of a compaction

    @property
    def kind(self) -> str:
        return self.type or ("message" if self.role else ITEM_REFERENCE if self.id else "")

    def to_stored(self) -> "InputItem":
        """With all that it has where it is told again."""
        given = self.id or f"{_ID_PREFIXES.get(self.kind, 'item')}_{uuid.uuid4().hex}"
        content = self.content
        if self.kind == "message" and isinstance(content, str):
            content = [ContentPart("output_text" if self.role == "assistant" else "input_text", content)]
        return replace(self, type=self.kind, id=given, status=self.status or "completed", content=content)


def compaction_item(summary: str) -> InputItem:
    """The item for a summary. Its content is opaque to clients and not encrypted: it is their own conversation."""
    content = base64.urlsafe_b64encode(f"{_CONTENT_PREFIX}{summary}".encode()).decode()
    return InputItem(COMPACTION, f"cmp_{uuid.uuid4().hex}", encrypted_content=content)


def _summary_of(item: InputItem) -> str:
    """Raises InvalidMessage for a compaction item of another server."""
    try:
        content = base64.urlsafe_b64decode((item.encrypted_content or "").encode()).decode()
    except (binascii.Error, UnicodeError):
        content = ""
    if not content.startswith(_CONTENT_PREFIX):
        raise InvalidMessage(
            "This compaction item was made by another server", "Compact the conversation here, or send its items."
        )
    return content.removeprefix(_CONTENT_PREFIX)


def items_of(given: str | Sequence[InputItem] | None) -> list[InputItem]:
    """What a request brings, as items; an empty text is none."""
    if isinstance(given, str):
        return [InputItem("message", role="user", content=given)] if given else []
    return list(given or ())


def messages_of(
    instructions: str | None,
    earlier: Sequence[InputItem],
    items: Sequence[InputItem],
    tool_name: Callable[[str, str | None], str],
) -> list[Message]:
    """The conversation of `earlier` items, which were read before, and those of a request. `tool_name` is what a model
    calls a tool, by its name and namespace. Raises InvalidRequest naming the item that no model can be given."""
    builder = _MessageBuilder(tool_name)
    if instructions:
        builder.add_instructions(instructions)
    for item in earlier:
        builder.add_item(item)
    for index, item in enumerate(items):
        try:
            builder.add_item(item)
        except InvalidMessage as error:
            path = f"input[{index}]"
            raise InvalidRequest(f"{path}: {error.message}", error.remedy, parameter=path) from error
    return builder.finish()


@dataclass(slots=True)
class _AssistantParts:
    """By an assistant, in one go."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message("assistant", "".join(self.texts), "".join(self.reasoning) or None, tuple(self.calls))


class _MessageBuilder:
    """Messages, made of items one after the other."""

    def __init__(self, tool_name: Callable[[str, str | None], str]) -> None:
        self._tool_name = tool_name
        self._messages: list[Message] = []
        self._assistant: _AssistantParts | None = None

    def finish(self) -> list[Message]:
        self._close_assistant()
        return self._messages

    def add_instructions(self, text: str) -> None:
        """By the system or the developer. Most templates know the first of them alone, and in the first place: what
        comes before everything else is one message of the system, and what comes later a part of what the user says."""
        self._close_assistant()
        if not self._messages or (len(self._messages) == 1 and self._messages[0].role == "system"):
            self._join("system", text)
        else:
            self._join("user", text)

    def add_item(self, item: InputItem) -> None:
        """Raises InvalidMessage."""
        match item.kind:
            case "message":
                self._add_message(item)
            case "reasoning":
                self._open_assistant().reasoning.append(_text(item.content) or _text(item.summary))
            case "function_call" | "custom_tool_call" if item.status != "incomplete":
                self._open_assistant().calls.append(self._tool_call(item))
            case "function_call_output" | "custom_tool_call_output":
                self._close_assistant()
                self._messages.append(Message("tool", _output(item), tool_call_id=_required(item, "call_id")))
            case kind if kind == COMPACTION:
                self._add_message(InputItem(role="assistant", content=_SUMMARY.format(_summary_of(item))))
            case kind if kind == ITEM_REFERENCE:
                raise InvalidMessage(
                    "Items are not referred to here", "Send the item itself, or use previous_response_id."
                )
            case "":
                raise InvalidMessage("It has no type", "Give it one, or a role.")

    def _add_message(self, item: InputItem) -> None:
        text, role = _text(item.content), item.role
        if role is None:
            raise InvalidMessage("A message needs a role", "Say whose it is.")
        if role == "assistant":
            assistant = self._open_assistant()
            if assistant.texts and not assistant.calls:  # another time
                self._close_assistant()
                assistant = self._open_assistant()
            assistant.texts.append(text)
        elif role == "user":
            self._close_assistant()
            self._join("user", text)
        else:
            self.add_instructions(text)

    def _join(self, role: Literal["system", "user"], text: str) -> None:
        """Behind what the same one said just before, since many templates want roles to take turns."""
        if self._messages and self._messages[-1].role == role:
            text = f"{self._messages.pop().content}\n\n{text}"
        self._messages.append(Message(role, text))

    def _open_assistant(self) -> _AssistantParts:
        self._assistant = self._assistant or _AssistantParts()
        return self._assistant

    def _close_assistant(self) -> None:
        if self._assistant is not None:
            self._messages.append(self._assistant.message())
            self._assistant = None

    def _tool_call(self, item: InputItem) -> ToolCall:
        name, call_id = self._tool_name(_required(item, "name"), item.namespace), _required(item, "call_id")
        if item.kind == "custom_tool_call":
            return ToolCall(name, {"input": item.input or ""}, call_id)
        if isinstance(item.arguments, Mapping):
            return ToolCall(name, item.arguments, call_id)
        return ToolCall.parse(name, item.arguments or "", call_id)


def _required(item: InputItem, name: Literal["name", "call_id"]) -> str:
    value = item.name if name == "name" else item.call_id
    if not value:
        raise InvalidMessage(f"An item of type {item.kind} needs its {name}", "Send the item as it was told.")
    return value


def _output(item: InputItem) -> str:
    if isinstance(item.output, Mapping):
        raise InvalidMessage("What comes of a call is a text or a list of texts", "Send it as text.")
    return _text(item.output)


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(map(_part_text, content))


def _part_text(part: ContentPart) -> str:
    key = _TEXTS.get(part.type)
    text = None if key is None else part.text if key == "text" else part.error_response
    if text is None:
        raise InvalidMessage(
            f"It has a part of type {part.type!r} without usable text; this version reads text only",
            "Send text, without images, audio or files.",
        )
    return text
