"""Storing, searching, deleting, and restoring chats, from one process and from several."""

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from app.history.database import FILE_NAME
from app.history.history import History
from app.history.records import (
    Attachment,
    ChatSettings,
    HistoryTooNew,
    HistoryUnavailable,
    NoSuchChat,
    Preset,
    Role,
    SamplingChoice,
    State,
    StoredUsage,
    Trim,
    WhenFull,
    path_to,
    read,
    written,
)
from app.history.schema import VERSION

SETTINGS = ChatSettings("Be brief.", SamplingChoice(temperature=0.3, seed=7, thinking=False), WhenFull.SUMMARIZE)
USAGE = StoredUsage(device_tokens=3, computed_tokens=4, reply_tokens=5, miss="differs from token 3 on")


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "history")


def reply(history: History, chat: int, to: int, text: str) -> int:
    message = history.messages.start_reply(chat, to, "tiny")
    history.messages.write_reply(message.id, text, "hm", reasoning_seconds=0.5, state=State.WHOLE, usage=USAGE)
    return message.id


def test_chat_survives_reopening(history: History, tmp_path: Path) -> None:
    chat = history.chats.create(SETTINGS)
    asked = history.messages.add_user_message(chat.id, None, "Why?\0\ud800 é", [Attachment("a.txt", "x\ny")])
    answered = reply(history, chat.id, asked.id, "Because.")
    history.close()
    with History(tmp_path / "history") as again:
        [found] = again.chats.listed()
        assert (found.settings, found.shown, found.num_messages) == (SETTINGS, answered, 2)
        assert found.beginning == "Why?\ufffd\ufffd é"
        question, answer = again.messages.in_chat(chat.id)
        assert (question.text, question.attachments) == ("Why?\ufffd\ufffd é", (Attachment("a.txt", "x\ny"),))
        assert (answer.parent, answer.role, answer.text, answer.reasoning) == (
            asked.id,
            Role.ASSISTANT,
            "Because.",
            "hm",
        )
        assert (answer.model, answer.state, answer.usage, answer.reasoning_seconds) == ("tiny", State.WHOLE, USAGE, 0.5)


def test_branches_share_their_first_messages(history: History) -> None:
    chat = history.chats.create(ChatSettings())
    first = history.messages.add_user_message(chat.id, None, "one")
    answer = reply(history, chat.id, first.id, "two")
    left, right = (history.messages.add_user_message(chat.id, answer, text).id for text in ("three", "drei"))
    messages = {message.id: message for message in history.messages.in_chat(chat.id)}
    assert [message.text for message in path_to(messages, left)] == ["one", "two", "three"]
    assert [message.text for message in path_to(messages, right)] == ["one", "two", "drei"]
    assert history.chats.get(chat.id).shown == right
    history.chats.show(chat.id, left)
    assert history.chats.get(chat.id).shown == left
    rewritten = history.messages.rewrite(chat.id, answer, "zwei")
    assert (rewritten.parent, rewritten.role) == (first.id, Role.ASSISTANT)
    original = messages[answer]
    assert (rewritten.model, rewritten.state) == (original.model, State.EDITED)


def test_user_title_overrides_generated_title(history: History) -> None:
    chat = history.chats.create(ChatSettings())
    history.chats.give_title(chat.id, "by the model")
    assert history.chats.get(chat.id).title == "by the model"
    history.chats.rename(chat.id, "mine")
    history.chats.give_title(chat.id, "by the model again")
    assert history.chats.get(chat.id).title == "mine"


def test_pinned_chats_are_first_and_archived_ones_separate(history: History) -> None:
    old, new, gone = (history.chats.create(ChatSettings(), title) for title in ("old", "new", "gone"))
    history.chats.pin(old.id, pinned=True)
    history.chats.archive(gone.id, archived=True)
    assert [chat.title for chat in history.chats.listed()] == ["old", "new"]
    assert [chat.title for chat in history.chats.listed(archived=True)] == ["gone"]
    history.messages.add_user_message(new.id, None, "x")
    history.chats.pin(old.id, pinned=False)
    assert [chat.title for chat in history.chats.listed()] == ["new", "old"]
    history.chats.trim(new.id, Trim((1,), "short"))
    assert history.chats.get(new.id).trim == Trim((1,), "short")


def test_summary_of_the_older_format_applies_to_its_messages() -> None:
    assert read('{"left_out":[1,2],"summary":"short"}', Trim).by_message == {2: "short"}
    trim = Trim((1, 2, 5), summaries={2: "short", 5: "shorter"})
    assert read(written(trim), Trim) == trim


def test_deleted_chat_can_be_restored_until_closing(history: History, tmp_path: Path) -> None:
    kept, gone = (history.chats.create(ChatSettings()) for _ in range(2))
    for chat in (kept, gone):
        history.messages.add_user_message(chat.id, None, f"unmistakable{chat.id} words")
        history.inputs.save_draft(f"undraft{chat.id}", chat.id)
        history.delete(chat.id)
    assert history.chats.listed() == []
    assert history.inputs.recent() == []
    assert not history.search.find("unmistakable")
    with pytest.raises(NoSuchChat):
        history.chats.get(gone.id)
    history.chats.undelete(kept.id)
    assert [chat.id for chat in history.chats.listed()] == [kept.id]
    assert history.deleted() == [gone.id]
    history.close()
    written = b"".join(path.read_bytes() for path in (tmp_path / "history").iterdir())
    for word in (b"unmistakable", b"undraft"):
        assert word + b"%d" % kept.id in written
        assert word + b"%d" % gone.id not in written


def test_search_finds_words_titles_and_texts_without_spaces(history: History) -> None:
    chat = history.chats.create(ChatSettings())
    asked = history.messages.add_user_message(chat.id, None, "The quick brown fox, naïve and tired, jumps.")
    history.messages.add_user_message(chat.id, asked.id, "我喜欢喝咖啡 100% of the_time")
    history.chats.rename(chat.id, "Foxes of Norway")
    [hit] = history.search.find("brow QUICK")
    assert (hit.message, hit.before, hit.match) == (asked.id, "The quick ", "brow")
    assert hit.after.startswith("n fox")
    assert [hit.message for hit in history.search.find("naive")] == [asked.id]
    assert [hit.match for hit in history.search.find("norway")] == ["Norway"]
    assert [hit.match for hit in history.search.find("喝咖啡")] == ["喝咖啡"]
    assert len(history.search.find("0% of the_")) == 1
    for nothing in ("", '"', "zebra", "quick zebra", "* OR", "'; DROP TABLE chats"):
        assert not history.search.find(nothing)


def test_omitted_text_around_a_match_is_marked(history: History) -> None:
    chat = history.chats.create(ChatSettings())
    first = history.messages.add_user_message(chat.id, None, "word " * 20 + "needle" + " word" * 20)
    history.messages.add_user_message(chat.id, first.id, "word " * 8 + "pin" + " word" * 8)
    [cut], [whole] = history.search.find("needle"), history.search.find("pin")
    assert (cut.before, cut.after) == ("…" + "word " * 8, " word" * 8 + "…")
    assert (whole.before, whole.after) == ("word " * 8, " word" * 8)


def test_text_around_a_match_has_whole_words(history: History) -> None:
    chat = history.chats.create(ChatSettings())
    history.messages.add_user_message(chat.id, None, "sentence " * 6 + "needle" + " sentence" * 6)
    [hit] = history.search.find("needle")
    assert (hit.before, hit.after) == ("…" + "sentence " * 4, " sentence" * 4 + "…")


def test_growing_reply_is_searchable(history: History) -> None:
    chat = history.chats.create(ChatSettings())
    asked = history.messages.add_user_message(chat.id, None, "Go.")
    coming = history.messages.start_reply(chat.id, asked.id, "tiny")
    for text in ("alpha", "alpha beta", "alpha beta gamma"):
        history.messages.write_reply(coming.id, text, "")
        assert [hit.message for hit in history.search.find(text)] == [coming.id]
    assert history.messages.in_chat(chat.id)[1].state is State.COMING


def test_drafts_inputs_and_presets_are_stored(history: History) -> None:
    chat = history.chats.create(ChatSettings())
    history.inputs.save_draft("new one")
    history.inputs.save_draft("half a", chat.id)
    assert (history.inputs.draft(), history.inputs.draft(chat.id)) == ("new one", "half a")
    history.messages.add_user_message(chat.id, None, "half a thought")
    assert (history.inputs.draft(), history.inputs.draft(chat.id)) == ("new one", "")
    history.messages.add_user_message(chat.id, None, "second")
    history.messages.add_user_message(chat.id, None, "half a thought")
    assert history.inputs.recent() == ["half a thought", "second"]
    history.inputs.save_preset(Preset("b", SETTINGS))
    history.inputs.save_preset(Preset("a"))
    history.inputs.save_preset(Preset("b", ChatSettings("other")))
    assert history.inputs.presets() == [Preset("a"), Preset("b", ChatSettings("other"))]
    history.inputs.delete_preset("a")
    assert [preset.name for preset in history.inputs.presets()] == ["b"]


def test_several_processes_share_the_file(history: History, tmp_path: Path) -> None:
    chat = history.chats.create(ChatSettings())
    with History(tmp_path / "history") as other:
        asked = other.messages.add_user_message(chat.id, None, "from the other one")
        assert [message.id for message in history.messages.in_chat(chat.id)] == [asked.id]
        history.delete(chat.id)
        with pytest.raises(NoSuchChat):
            other.chats.get(chat.id)


def test_file_is_private_to_its_owner(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        history = History(tmp_path / "a" / "history")
        history.messages.add_user_message(history.chats.create(ChatSettings()).id, None, "secret")
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*")}
    finally:
        os.umask(before)
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    history.close()


def test_history_of_a_newer_program_is_rejected(history: History, tmp_path: Path) -> None:
    history.close()
    file = tmp_path / "history" / FILE_NAME
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.execute("UPDATE about SET version = ?", (VERSION + 1,))
    connection.close()
    before = file.read_bytes()
    with pytest.raises(HistoryTooNew, match=f"version {VERSION + 1}"):
        History(tmp_path / "history")
    assert file.read_bytes() == before


def test_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryUnavailable, match="file"):
        History(tmp_path / "file" / "history")


def test_history_in_memory_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with History(None) as history:
        chat = history.chats.create(ChatSettings())
        history.messages.add_user_message(chat.id, None, "between us")
        assert len(history.messages.in_chat(chat.id)) == 1
        assert list(tmp_path.iterdir()) == []


def test_failed_transaction_leaves_no_change(history: History) -> None:
    chat = history.chats.create(ChatSettings())
    with pytest.raises(NoSuchChat):
        history.messages.add_user_message(chat.id + 1, None, "to nobody")
    assert history.inputs.recent() == []
