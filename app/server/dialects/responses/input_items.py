"""Input items of requests, and their conversion to messages.

One turn of an assistant has several items: reasoning, text, and calls. They become one message, so that the prompt is
the same as the cached one.
"""

import base64
import binascii
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from app.generation.attachments import Attachment
from app.generation.conversation import InvalidMessage, Message, ToolCall
from app.server.dialects.openai.content_parts import ContentPart, attachments_of, text_of
from app.server.http.errors import InvalidRequest

MAX_ITEMS = 1 << 14
ITEM_REFERENCE = "item_reference"
COMPACTION = "compaction"  # replaces earlier items by a summary of them
_CONTENT_PREFIX = "inglenook:"  # start of the content of this server's compaction items
_SUMMARY = "Summary of the conversation so far:\n\n{}"
_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


Content: TypeAlias = str | list[ContentPart]
ContentT = TypeVar("ContentT", bound=Content | dict[str, Any] | None)


class InputItem(Struct, omit_defaults=True):
    """An item of any type, with the fields that are read. Items of unknown types are ignored."""

    type: Annotated[str, Meta(max_length=64)] | None = None  # absent: a message, if there is a role
    id: Annotated[str, Meta(max_length=256)] | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None  # content of a message or of reasoning
    summary: list[ContentPart] | None = None  # summary of reasoning
    call_id: Annotated[str, Meta(max_length=256)] | None = None  # id of a call, also in its output
    name: Annotated[str, Meta(max_length=256)] | None = None  # name of the called tool
    namespace: Annotated[str, Meta(max_length=256)] | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None  # input of a custom tool
    output: str | list[ContentPart] | dict[str, Any] | None = None
    encrypted_content: str | None = None  # content of a compaction

    @property
    def kind(self) -> str:
        return self.type or ("message" if self.role else ITEM_REFERENCE if self.id else "")

    def to_stored(self) -> "InputItem":
        """Return the item with all the fields that it has when it is listed."""
        given = self.id or f"{_ID_PREFIXES.get(self.kind, 'item')}_{uuid.uuid4().hex}"
        content = self.content
        if self.kind == "message" and isinstance(content, str):
            content = [ContentPart("output_text" if self.role == "assistant" else "input_text", content)]
        return replace(self, type=self.kind, id=given, status=self.status or "completed", content=content)


def compaction_item(summary: str) -> InputItem:
    """Return the item for a summary. Clients treat its content as opaque; it is not encrypted, since it is their own
    chat.
    """
    content = base64.urlsafe_b64encode(f"{_CONTENT_PREFIX}{summary}".encode()).decode()
    return InputItem(COMPACTION, f"cmp_{uuid.uuid4().hex}", encrypted_content=content)


def _summary_of(item: InputItem) -> str:
    """Return the summary in an item. Raises InvalidMessage for a compaction item of another server."""
    try:
        content = base64.urlsafe_b64decode((item.encrypted_content or "").encode()).decode()
    except (binascii.Error, UnicodeError):
        content = ""
    if not content.startswith(_CONTENT_PREFIX):
        raise InvalidMessage(
            "This compaction item was made by another server",
            "Compact the conversation on this server, or send the original items.",
        )
    return content.removeprefix(_CONTENT_PREFIX)


def items_of(given: str | Sequence[InputItem] | None) -> list[InputItem]:
    """Return the input of a request as items, in which words replace images and documents.

    An empty string gives no item.
    """
    if isinstance(given, str):
        return [InputItem("message", role="user", content=given)] if given else []
    return [replace(one, content=_described(one.content), output=_described(one.output)) for one in given or ()]


def attachments_in(given: str | Sequence[InputItem] | None) -> Iterator[Attachment]:
    """Yield the images and documents in the input of a request."""
    for index, item in enumerate(() if given is None or isinstance(given, str) else given):
        yield from attachments_of(item.content, f"input[{index}].content")
        yield from attachments_of(None if isinstance(item.output, dict) else item.output, f"input[{index}].output")


def _described(content: ContentT) -> ContentT | list[ContentPart]:
    """Replace the images and documents in `content` by words."""
    if not isinstance(content, list):
        return content
    attached = [part.attachment("") for part in content]
    return [ContentPart("input_text", one.words) if one else part for part, one in zip(content, attached, strict=True)]


def messages_of(
    instructions: str | None,
    earlier: Sequence[InputItem],
    items: Sequence[InputItem],
    tool_name: Callable[[str, str | None], str],
) -> list[Message]:
    """Convert `earlier` items, which were validated before, and the items of a request to messages.

    `tool_name` returns the model's name of a tool from its name and namespace. Raises InvalidRequest naming the item
    that cannot be converted.
    """
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
    """The parts of one turn of the assistant."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message("assistant", "".join(self.texts), "".join(self.reasoning) or None, tuple(self.calls))


class _MessageBuilder:
    """Builds messages from items in order."""

    def __init__(self, tool_name: Callable[[str, str | None], str]) -> None:
        self._tool_name = tool_name
        self._messages: list[Message] = []
        self._assistant: _AssistantParts | None = None

    def finish(self) -> list[Message]:
        self._close_assistant()
        return self._messages

    def add_instructions(self, text: str) -> None:
        """Add a text of the system or the developer.

        Most templates support only one system message, at the start. Texts before all other messages become one system
        message; later ones become a part of the user's message.
        """
        self._close_assistant()
        if not self._messages or (len(self._messages) == 1 and self._messages[0].role == "system"):
            self._join("system", text)
        else:
            self._join("user", text)

    def add_item(self, item: InputItem) -> None:
        """Add an item. Raises InvalidMessage."""
        match item.kind:
            case "message":
                self._add_message(item)
            case "reasoning":
                self._open_assistant().reasoning.append(text_of(item.content) or text_of(item.summary))
            case "function_call" | "custom_tool_call" if item.status != "incomplete":
                self._open_assistant().calls.append(self._tool_call(item))
            case "function_call_output" | "custom_tool_call_output":
                self._close_assistant()
                self._messages.append(Message("tool", _output(item), tool_call_id=_required(item, "call_id")))
            case kind if kind == COMPACTION:
                self._add_message(InputItem(role="assistant", content=_SUMMARY.format(_summary_of(item))))
            case kind if kind == ITEM_REFERENCE:
                raise InvalidMessage(
                    "Item references are not supported", "Send the item itself, or use previous_response_id."
                )
            case "":
                raise InvalidMessage("The item has no type", "Send a type or a role.")

    def _add_message(self, item: InputItem) -> None:
        text, role = text_of(item.content), item.role
        if role is None:
            raise InvalidMessage("The message has no role", "Send a role.")
        if role == "assistant":
            assistant = self._open_assistant()
            if assistant.texts and not assistant.calls:  # the item starts a new turn
                self._close_assistant()
                assistant = self._open_assistant()
            assistant.texts.append(text)
        elif role == "user":
            self._close_assistant()
            self._join("user", text)
        else:
            self.add_instructions(text)

    def _join(self, role: Literal["system", "user"], text: str) -> None:
        """Append a text to the last message if that has the same role, or else add a message.

        Many templates require alternating roles.
        """
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
        raise InvalidMessage(f"An item of type {item.kind} needs its {name}", "Send the item as it was returned.")
    return value


def _output(item: InputItem) -> str:
    if isinstance(item.output, Mapping):
        raise InvalidMessage("The output of a call must be a string or a list of text parts", "Send text.")
    return text_of(item.output)
