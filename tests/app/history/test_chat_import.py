"""Export and import of chats."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.history.chat_file import VERSION, ChatFile, FileChat, FileMessage, as_json, as_markdown
from app.history.chat_import import UnreadableChats, add_chats, read_chats
from app.history.history import History
from app.history.records import Attachment, Chat, ChatSettings, Role, SamplingChoice, State, StoredMessage, path_to


@pytest.fixture
def history() -> History:
    return History(None)


def branch(history: History, chat: Chat) -> list[tuple[str, str]]:
    messages = {message.id: message for message in history.messages.in_chat(chat.id)}
    return [(message.role.value, message.text) for message in path_to(messages, chat.shown)]


def told(file: Path, content: Any) -> Path:
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def test_export_imports_with_all_branches(history: History, tmp_path: Path) -> None:
    chat = history.chats.create(ChatSettings("sys", SamplingChoice(top_k=3)), "Title")
    asked = history.messages.add_user_message(chat.id, None, "one", [Attachment("f.py", "x = 1")])
    for text in ("two", "zwei"):
        reply = history.messages.start_reply(chat.id, asked.id, "tiny")
        history.messages.write_reply(reply.id, text, "thought", state=State.CUT)
    history.chats.show(chat.id, asked.id + 1)
    file = tmp_path / "chat.json"
    file.write_bytes(as_json([(history.chats.get(chat.id), history.messages.in_chat(chat.id))]))

    def content(message: StoredMessage) -> tuple[object, ...]:
        return message.role, message.text, message.attachments, message.reasoning, message.model, message.state

    exported = [content(one) for one in history.messages.in_chat(chat.id)]
    history.delete(chat.id)
    [again] = add_chats(history, read_chats(file))
    assert (again.title, again.settings, again.num_messages) == ("Title", chat.settings, 3)
    assert [content(one) for one in history.messages.in_chat(again.id)] == exported
    assert branch(history, again) == [("user", "one"), ("assistant", "two")]


def test_imported_chats_are_pinned_and_archived_as_before(history: History, tmp_path: Path) -> None:
    for title, pinned, archived in [("plain", False, False), ("pinned", True, False), ("both", True, True)]:
        chat = history.chats.create(ChatSettings(), title)
        history.messages.add_user_message(chat.id, None, "one")
        history.chats.pin(chat.id, pinned=pinned)
        history.chats.archive(chat.id, archived=archived)
    chats = [*history.chats.listed(), *history.chats.listed(archived=True)]
    file = tmp_path / "all.json"
    file.write_bytes(as_json([(chat, history.messages.in_chat(chat.id)) for chat in chats]))
    other = History(None)
    add_chats(other, read_chats(file))
    assert [(one.title, one.is_pinned) for one in other.chats.listed()] == [("pinned", True), ("plain", False)]
    assert [(one.title, one.is_pinned) for one in other.chats.listed(archived=True)] == [("both", True)]


def test_markdown_has_the_shown_branch(history: History) -> None:
    chat = history.chats.create(ChatSettings("Be brief."), "A\ntitle")
    asked = history.messages.add_user_message(chat.id, None, "See file.", [Attachment("a.md", "```py\nx\n```")])
    reply = history.messages.start_reply(chat.id, asked.id, "tiny")
    history.messages.write_reply(reply.id, "Seen.", "hm", state=State.WHOLE)
    history.messages.add_user_message(chat.id, asked.id, "elsewhere")
    history.chats.show(chat.id, reply.id)
    text = as_markdown(history.chats.get(chat.id), history.messages.in_chat(chat.id))
    assert text.startswith("# A title\n\n## System\n\nBe brief.\n\n## You (")
    assert "a.md:\n\n````\n```py\nx\n```\n````\n\nSee file." in text
    assert "## Assistant, tiny (" in text
    assert text.endswith("hm\n\n</details>\n\nSeen.\n")
    assert "elsewhere" not in text


def test_markdown_names_a_model_file_without_its_folder(history: History) -> None:
    chat = history.chats.create(ChatSettings())
    asked = history.messages.add_user_message(chat.id, None, "Hi")
    reply = history.messages.start_reply(chat.id, asked.id, "/home/ann/models/Tiny.Q4_0.gguf")
    history.messages.write_reply(reply.id, "Hello.", "", state=State.WHOLE)
    text = as_markdown(history.chats.get(chat.id), history.messages.in_chat(chat.id))
    assert "## Assistant, Tiny.Q4_0 (" in text


def node(role: str, text: str | None, parent: str | None, **more: Any) -> dict[str, Any]:
    message = {"author": {"role": role}, "content": {"content_type": "text", "parts": [text]}, **more} if text else None
    return {"id": "x", "message": message, "parent": parent, "children": []}


def test_chatgpt_conversations_are_imported(history: History, tmp_path: Path) -> None:
    image = {"asset_pointer": "file-service://x"}
    mapping = {
        "b2": node("assistant", "Hallo.", "u1", metadata={"model_slug": "gpt-4o"}, create_time=12.5),
        "root": node("system", None, None),
        "s": node("system", "Be kind.", "root"),
        "u1": node("user", "Hi", "s", create_time=11.0),
        "tool": node("tool", "searched", "u1"),
        "b1": node("assistant", "Hello.", "tool"),
        "u2": node("user", "More", "b1"),
        "circle": node("user", "lost", "circle"),
    }
    mapping["u2"]["message"]["content"]["parts"] = ["More", image, "please"]
    file = told(
        tmp_path / "conversations.json",
        [{"title": "Greeting", "create_time": 10.0, "mapping": mapping, "current_node": "u2"}, {"mapping": {}}],
    )
    [chat] = add_chats(history, read_chats(file))
    assert (chat.title, chat.created, chat.settings.system) == ("Greeting", 10.0, "Be kind.")
    assert branch(history, chat) == [("user", "Hi"), ("assistant", "Hello."), ("user", "More\nplease")]
    other = next(one for one in history.messages.in_chat(chat.id) if one.text == "Hallo.")
    assert (other.model, other.created) == ("gpt-4o", 12.5)


MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": "Hello.", "thinking": "hm"},
    {"role": "tool", "content": "42"},
]


@pytest.mark.parametrize(
    "content",
    [{"model": "llama3", "messages": MESSAGES, "stream": False}, [{"model": "llama3", "messages": MESSAGES}], MESSAGES],
)
def test_request_bodies_are_imported(history: History, tmp_path: Path, content: Any) -> None:
    [chat] = add_chats(history, read_chats(told(tmp_path / "x.json", content)))
    assert chat.settings.system == "Be kind."
    assert branch(history, chat) == [("user", "Hi"), ("assistant", "Hello.")]
    assert history.messages.in_chat(chat.id)[1].reasoning == "hm"


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"messages": 3}', b'[{"role": 1}]']
)
def test_files_without_chats_are_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UnreadableChats, match="no readable chats"):
        read_chats(tmp_path / "x.json")
    with pytest.raises(UnreadableChats, match="No such file"):
        read_chats(tmp_path / "missing.json")


def test_invalid_indices_are_ignored(history: History, tmp_path: Path) -> None:
    messages = [{"role": "user", "text": "a", "parent": 5}, {"role": "assistant", "text": "b", "parent": -1}]
    content = {"format": "inglenook-chat", "version": 1, "chats": [{"messages": messages, "shown": 99}]}
    [chat] = add_chats(history, read_chats(told(tmp_path / "x.json", content)))
    assert [message.parent for message in history.messages.in_chat(chat.id)] == [None, None]


def test_chat_is_imported_once(history: History, tmp_path: Path) -> None:
    def trip(created: float, text: str) -> FileChat:
        return FileChat(title="Trips", created=created, messages=[FileMessage(role=Role.USER, text=text, parent=None)])

    def imported(*chats: FileChat) -> list[str]:
        file = tmp_path / "chats.json"
        file.write_bytes(msgspec.json.encode(ChatFile(version=VERSION, chats=[*chats])))
        return [it.title for it in add_chats(history, read_chats(file))]

    first, other = trip(1000.0, "Where to?"), trip(2000.0, "When?")
    assert imported(first) == ["Trips"]
    with pytest.raises(UnreadableChats, match="All chats of this file are already here"):
        imported(first)
    assert imported(first, other) == ["Trips (imported)"]
    assert sorted(it.title for it in history.chats.listed()) == ["Trips", "Trips (imported)"]
