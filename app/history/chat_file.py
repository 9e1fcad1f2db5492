"""Export chats: the shown branch of one as Markdown, or all branches of several as JSON, which can be imported."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import PurePath

import msgspec
from msgspec import Struct

from app.history.records import (
    Attachment,
    Chat,
    ChatSettings,
    Role,
    State,
    StoredMessage,
    StoredUsage,
    ToolStep,
    path_to,
)

FORMAT = "inglenook-chat"
VERSION = 1

_WHO = {Role.USER: "You", Role.ASSISTANT: "Assistant"}


class FileMessage(Struct, kw_only=True, omit_defaults=True):
    """A message. `parent` is the index of the previous message in the file."""

    role: Role
    text: str
    parent: int | None = None
    attachments: tuple[Attachment, ...] = ()
    steps: tuple[ToolStep, ...] = ()
    reasoning: str = ""
    reasoning_seconds: float = 0.0
    model: str = ""
    state: State = State.WHOLE
    usage: StoredUsage | None = None
    created: float = 0.0


class FileChat(Struct, kw_only=True, omit_defaults=True):
    """A chat, with each message after its parent. `shown` is the index of the last message of the shown branch."""

    title: str = ""
    title_given: bool = True  # whether the user set the title
    settings: ChatSettings = ChatSettings()
    messages: list[FileMessage]
    shown: int | None = None
    created: float = 0.0
    changed: float = 0.0  # 0: when its last message was created
    left_out: tuple[int, ...] = ()  # indices of messages that are not sent to the model
    summaries: dict[int, str] = {}  # keyed by the index of the last message that each replaces
    pinned: bool = False
    archived: bool = False


class ChatFile(Struct, tag_field="format", tag=FORMAT):
    """The exported file."""

    version: int
    chats: list[FileChat]


def as_json(chats: Iterable[tuple[Chat, Sequence[StoredMessage]]]) -> bytes:
    """Return chats with all their branches as JSON."""
    written = ChatFile(VERSION, [_file_chat(chat, messages) for chat, messages in chats])
    return msgspec.json.format(msgspec.json.encode(written), indent=2) + b"\n"


def _file_chat(chat: Chat, messages: Sequence[StoredMessage]) -> FileChat:
    indices = {message.id: index for index, message in enumerate(messages)}
    return FileChat(
        title=chat.title,
        title_given=chat.is_title_given,
        settings=chat.settings,
        messages=[_file_message(message, indices) for message in messages],
        shown=None if chat.shown is None else indices.get(chat.shown),
        created=chat.created,
        changed=chat.changed,
        left_out=tuple(indices[one] for one in chat.trim.left_out if one in indices),
        summaries={indices[one]: text for one, text in chat.trim.by_message.items() if one in indices},
        pinned=chat.is_pinned,
        archived=chat.is_archived,
    )


def _file_message(message: StoredMessage, indices: dict[int, int]) -> FileMessage:
    return FileMessage(
        role=message.role,
        text=message.text,
        parent=None if message.parent is None else indices.get(message.parent),
        attachments=message.attachments,
        steps=message.steps,
        reasoning=message.reasoning,
        reasoning_seconds=message.reasoning_seconds,
        model=message.model,
        state=message.state,
        usage=message.usage,
        created=message.created,
    )


def as_markdown(chat: Chat, messages: Sequence[StoredMessage]) -> str:
    """Return the shown branch as Markdown."""
    branch = path_to({message.id: message for message in messages}, chat.shown)
    parts = [f"# {' '.join((chat.title or chat.beginning or 'Chat').split())}"]
    if chat.settings.system:
        parts.append(f"## System\n\n{chat.settings.system}")
    parts += [_section(message) for message in branch]
    return "\n\n".join(parts) + "\n"


def _section(message: StoredMessage) -> str:
    when = datetime.fromtimestamp(message.created, UTC).isoformat(timespec="minutes")
    model = _short_name(message.model)
    author = f"{_WHO[message.role]}, {model}" if model else _WHO[message.role]
    files = [f"{file.name}:\n\n{_fenced(file.text)}" for file in message.attachments]
    steps = [part for step in message.steps for part in (step.text, _called(step)) if part]
    reasoning = [_details("Reasoning", message.reasoning)] if message.reasoning else []
    return "\n\n".join([f"## {author} ({when})", *files, *steps, *reasoning, message.text])


def _short_name(model: str) -> str:
    """Return the last component of an absolute path without ".gguf", and other names unchanged."""
    return PurePath(model).name.removesuffix(".gguf") if PurePath(model).is_absolute() else model


def _called(step: ToolStep) -> str:
    return _details(f"Tool {step.name}", f"{_fenced(step.arguments)}\n\n{_fenced(step.result)}")


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{content}\n\n</details>"


def _fenced(text: str) -> str:
    """Return text as a code block, with fences longer than any in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text}\n{fence}"
