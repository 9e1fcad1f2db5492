"""Import chats from files that this program or another one exported.

Three formats are known: Inglenook's JSON, ChatGPT's conversations.json, and request bodies as scripts store them for
Ollama and OpenAI's API: {"model": ..., "messages": [{"role": ..., "content": ...}]}. Files are not trusted: every value
is checked for its type, and content that is not text is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from app.errors import AppError
from app.history.chat_file import ChatFile, FileChat, FileMessage
from app.history.history import History
from app.history.records import Chat, ChatSettings, Preset, Role, StoredMessage, Trim

MAX_BYTES = 1 << 30
_IMPORTED = " (imported)"  # ends the title of a chat if another one has the same title
_KNOWN = "Supported: JSON exported by ingle, ChatGPT's conversations.json, and lists of messages with role and content."


class UnreadableChats(AppError):
    """The file contains no readable chats."""


class Author(Struct):
    role: str = ""


class NodeContent(Struct):
    parts: list[Any] | None = None
    text: str | None = None


class NodeMessage(Struct):
    author: Author = msgspec.field(default_factory=Author)
    content: NodeContent = msgspec.field(default_factory=NodeContent)
    create_time: float | None = None
    metadata: dict[str, Any] | None = None


class Node(Struct):
    message: NodeMessage | None = None
    parent: str | None = None


class ChatGPTConversation(Struct):
    """One conversation of conversations.json: a tree of nodes, some without a message."""

    mapping: dict[str, Node]
    title: str | None = None
    create_time: float | None = None
    current_node: str | None = None


class ContentPart(Struct):
    text: str = ""


class RequestMessage(Struct):
    role: str
    content: str | list[ContentPart] | None = ""
    reasoning: str | None = None
    thinking: str | None = None


class RequestConversation(Struct):
    """A conversation in the format of Ollama's and OpenAI's requests."""

    messages: list[RequestMessage]
    model: str = ""
    title: str = ""
    system: str = ""


def read_chats(path: Path) -> list[FileChat]:
    """Read the chats of a file. Raises UnreadableChats."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UnreadableChats(f"the file {path} is larger than {MAX_BYTES >> 30} GB", "Split it.")
        content = path.read_bytes()
    except OSError as problem:
        raise UnreadableChats(f"{path}: {problem.strerror or problem}", "Give the path of a JSON file.") from problem
    for attempt in (_inglenook, _chatgpt, _requests):
        try:
            return attempt(content)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            continue
    raise UnreadableChats(f"the file {path} contains no readable chats", _KNOWN)


def add_chats(history: History, chats: Sequence[FileChat]) -> list[Chat]:
    """Store chats that `read_chats` returned. Chats that are already stored are left out.

    A chat with the title of another one is marked as imported. The chats are stored together or not at all. Raises
    UnreadableChats if all chats are already stored.
    """
    with history.transaction():
        added = _add_new(history, chats)
    if chats and not added:
        raise UnreadableChats("All chats of this file are already here", "Delete a chat to import it again.")
    return added


def add_archived(history: History, chats: Sequence[FileChat], presets: Sequence[Preset]) -> int:
    """Store the chats of an archive that are not stored yet, and the presets whose names are not used.

    Everything is stored together or not at all. Returns the number of chats.
    """
    with history.transaction():
        names = {preset.name for preset in history.inputs.presets()}
        for preset in presets:
            if preset.name not in names:
                history.inputs.save_preset(preset)
        return len(_add_new(history, chats))


def _add_new(history: History, chats: Sequence[FileChat]) -> list[Chat]:
    stored = [chat for archived in (False, True) for chat in history.chats.listed(archived=archived)]
    known, titles = {(chat.title, chat.created) for chat in stored}, {chat.title for chat in stored}
    new = [chat for chat in chats if chat.messages and not (chat.created and (chat.title, chat.created) in known)]
    # exports list the newest chats first, and lists show the newest ids first
    added = [_add_chat(history, chat, _IMPORTED if chat.title in titles else "") for chat in reversed(new)]
    return added[::-1]


def _add_chat(history: History, chat: FileChat, mark: str) -> Chat:
    title = f"{chat.title}{mark}" if chat.title else ""
    created = history.chats.create(chat.settings, title, created=chat.created or None)
    ids: list[int] = []
    for message in chat.messages:
        parent = message.parent if message.parent is not None and 0 <= message.parent < len(ids) else None
        stored = StoredMessage(
            id=0,
            chat=created.id,
            parent=None if parent is None else ids[parent],
            role=message.role,
            text=message.text,
            attachments=message.attachments,
            steps=message.steps,
            reasoning=message.reasoning,
            reasoning_seconds=message.reasoning_seconds,
            model=message.model,
            state=message.state,
            usage=message.usage,
            created=message.created or created.created,
        )
        ids.append(history.messages.add(stored).id)
    if chat.shown is not None and 0 <= chat.shown < len(ids):
        history.chats.show(created.id, ids[chat.shown])
    summaries = {ids[index]: text for index, text in chat.summaries.items() if 0 <= index < len(ids)}
    trim = Trim(tuple(ids[index] for index in chat.left_out if 0 <= index < len(ids)), summaries=summaries)
    is_given = bool(title) and (chat.title_given or bool(mark))
    history.chats.set_imported(created.id, title, trim, is_title_given=is_given, changed=chat.changed)
    history.chats.pin(created.id, pinned=chat.pinned)
    history.chats.archive(created.id, archived=chat.archived)
    return history.chats.get(created.id)


def _inglenook(content: bytes) -> list[FileChat]:
    return msgspec.json.decode(content, type=ChatFile).chats


def _chatgpt(content: bytes) -> list[FileChat]:
    conversations = msgspec.json.decode(content, type=list[ChatGPTConversation], strict=False)
    return [_of_chatgpt(conversation) for conversation in conversations]


def _of_chatgpt(conversation: ChatGPTConversation) -> FileChat:
    """Convert a conversation.

    Nodes without text from the user or the model are left out. Their children are attached to the nearest ancestor that
    is kept.
    """
    messages: list[FileMessage] = []
    indices: dict[str, int | None] = {}
    system = ""
    for name, node in _in_order(conversation.mapping):
        parent = indices.get(node.parent) if node.parent else None
        message = node.message
        text = _text_of(message) if message else ""
        role = message.author.role if message else ""
        if message is None or not text or role not in set(Role):
            indices[name] = parent
            system = system or (text if role == "system" else "")
            continue
        model = str((message.metadata or {}).get("model_slug", "")) if role == Role.ASSISTANT else ""
        created = message.create_time or conversation.create_time or 0.0
        indices[name] = len(messages)
        messages.append(FileMessage(role=Role(role), text=text, parent=parent, model=model, created=created))
    return FileChat(
        title=conversation.title or "",
        settings=ChatSettings(system=system),
        messages=messages,
        shown=indices.get(conversation.current_node or ""),
        created=conversation.create_time or 0.0,
    )


def _in_order(mapping: Mapping[str, Node]) -> Iterator[tuple[str, Node]]:
    """Yield every node after its parent. Nodes in a cycle are left out."""
    children: dict[str | None, list[str]] = {}
    for name, node in mapping.items():
        parent = node.parent if node.parent in mapping else None
        children.setdefault(parent, []).append(name)
    waiting = children.get(None, [])[::-1]
    while waiting:
        name = waiting.pop()
        yield name, mapping[name]
        waiting += children.get(name, [])[::-1]


def _text_of(message: NodeMessage) -> str:
    parts = [part for part in message.content.parts or () if isinstance(part, str)]
    return "\n".join([*parts, *([message.content.text] if message.content.text else [])]).strip()


def _requests(content: bytes) -> list[FileChat]:
    """Read one conversation, a list of conversations, or a list of messages."""
    raw = msgspec.json.decode(content)
    conversations = raw if isinstance(raw, list) else [raw]
    if conversations and all(isinstance(one, dict) and "role" in one for one in conversations):
        conversations = [{"messages": conversations}]
    return [_of_request(one) for one in msgspec.convert(conversations, list[RequestConversation])]


def _of_request(conversation: RequestConversation) -> FileChat:
    system = conversation.system
    messages: list[FileMessage] = []
    for message in conversation.messages:
        text = _plain(message.content)
        if message.role in ("system", "developer"):
            system = "\n\n".join(part for part in (system, text) if part)
        elif message.role in set(Role):
            model = conversation.model if message.role == Role.ASSISTANT else ""
            reasoning = message.reasoning or message.thinking or ""
            parent = len(messages) - 1 if messages else None
            role = Role(message.role)
            messages.append(FileMessage(role=role, text=text, parent=parent, reasoning=reasoning, model=model))
    return FileChat(title=conversation.title, settings=ChatSettings(system=system), messages=messages)


def _plain(content: str | list[ContentPart] | None) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())
