"""Every method that writes rows also updates their digests."""

import inspect
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from app.history.chat_file import FileChat, FileMessage
from app.history.chat_import import add_chats
from app.history.chats import Chats
from app.history.database import FILE_NAME
from app.history.digests import digest_of
from app.history.history import History
from app.history.inputs import Inputs
from app.history.messages import Messages
from app.history.records import Attachment, ChatSettings, Preset, Role, State, StoredMessage, StoredUsage, Trim
from app.history.schema import COLUMNS

CHAT, ASKED, ANSWERED, GONE = 1, 1, 2, 2
OTHER = ChatSettings("Be brief.")
READERS = {"listed", "get", "deleted_before", "in_chat", "draft", "windows", "recent", "presets"}


def adopt(history: History, folder: Path) -> None:
    """Save a draft in a window, close the window, and turn its draft into a chat."""
    with History(folder) as other:
        other.save_new_draft("typed in a second window")
    history.new_draft()


def add(history: History, folder: Path) -> None:
    del folder
    files = (Attachment("a.txt", "x"),)
    history.messages.add(
        StoredMessage(id=0, chat=CHAT, parent=ASKED, role=Role.USER, text="x", attachments=files, created=2)
    )


def restore(history: History, folder: Path) -> None:
    del folder
    history.delete(GONE)
    history.chats.undelete(GONE)


def erase(history: History, folder: Path) -> None:
    del folder
    history.chats.delete(GONE)
    history.chats.erase([GONE])


def bring_in(history: History, folder: Path) -> None:
    del folder
    said = [FileMessage(role=Role.USER, text="Hi."), FileMessage(role=Role.ASSISTANT, text="Ho.", parent=0)]
    add_chats(history, [FileChat(title="of a file", settings=OTHER, messages=said, shown=0, created=3.0)])


def finish(history: History, folder: Path) -> None:
    del folder
    usage = StoredUsage(reply_tokens=1)
    history.messages.write_reply(ANSWERED, "y", "z", reasoning_seconds=1.5, state=State.WHOLE, usage=usage)


# Method name -> a call of it, for every method that writes to the three tables.
WRITERS: Mapping[str, Callable[[History, Path], object]] = {
    "create": lambda history, folder: history.chats.create(OTHER, "mine", created=5.0),
    "rename": lambda history, folder: history.chats.rename(CHAT, "named\0\ud800"),
    "give_title": lambda history, folder: history.chats.give_title(GONE, "by a model"),
    "configure": lambda history, folder: history.chats.configure(CHAT, OTHER),
    "trim": lambda history, folder: history.chats.trim(CHAT, Trim((1,), "short")),
    "set_imported": lambda history, folder: history.chats.set_imported(
        CHAT, "imported", Trim((1,)), is_title_given=False, changed=7.0
    ),
    "pin": lambda history, folder: history.chats.pin(CHAT, pinned=True),
    "archive": lambda history, folder: history.chats.archive(CHAT, archived=True),
    "show": lambda history, folder: history.chats.show(CHAT, ASKED),
    "delete": lambda history, folder: history.delete(GONE),
    "undelete": restore,
    "erase": erase,
    "add": add,
    "add_user_message": lambda history, folder: history.messages.add_user_message(
        CHAT, ANSWERED, "more", [Attachment("a.txt", "x")]
    ),
    "rewrite": lambda history, folder: history.messages.rewrite(CHAT, ANSWERED, "better"),
    "start_reply": lambda history, folder: history.messages.start_reply(CHAT, ASKED, "tiny"),
    "write_reply": finish,
    "save_draft": lambda history, folder: history.inputs.save_draft("half a", CHAT),
    "move_draft": adopt,
    "save_preset": lambda history, folder: history.inputs.save_preset(Preset("kept", OTHER)),
    "delete_preset": lambda history, folder: history.inputs.delete_preset("kept"),
    "add_chats": bring_in,
}


def public(kind: type) -> Iterator[str]:
    return (name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_"))


def changed_rows(folder: Path) -> list[tuple[str, object]]:
    """Return the rows whose digest is missing or wrong."""
    changed = []
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection:
        for table, columns in COLUMNS.items():
            for *row, digest in connection.execute(f"SELECT {', '.join(columns)}, digest FROM {table}"):  # noqa: S608
                changed += [] if digest == digest_of(tuple(row)) else [(table, row[0])]
    return changed


def test_table_lists_every_writing_method() -> None:
    methods = {name for kind in (Chats, Messages, Inputs) for name in public(kind)}
    assert methods - READERS == WRITERS.keys() - {"add_chats"}


@pytest.mark.parametrize("writer", WRITERS)
def test_every_write_method_updates_row_digests(tmp_path: Path, writer: str) -> None:
    with History(tmp_path) as history:
        for _ in (CHAT, GONE):
            asked = history.messages.add_user_message(history.chats.create(ChatSettings()).id, None, "Go.")
            history.messages.start_reply(asked.chat, asked.id, "tiny")
        history.inputs.save_draft("begun", CHAT)
        history.inputs.save_preset(Preset("kept"))
        history.save_new_draft("typed")
        WRITERS[writer](history, tmp_path)
        assert changed_rows(tmp_path) == []
    with History(tmp_path) as again:
        assert (again.notices, again.rescue) == ((), None)
    assert changed_rows(tmp_path) == []
