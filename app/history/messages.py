"""The messages of chats: a question is on disk before it is sent, and a reply is saved while it is generated."""

import time
from collections.abc import Sequence

import msgspec

from app.history.column_types import Row
from app.history.database import Database
from app.history.digests import CHANGED, checked, sign
from app.history.records import (
    Attachment,
    Attachments,
    NoSuchChat,
    Role,
    State,
    StoredMessage,
    StoredUsage,
    ToolStep,
    read,
    storable,
    written,
)
from app.history.schema import COLUMNS
from app.history.sqlite_errors import Damaged

_COLUMNS = ", ".join(COLUMNS["messages"])


class Messages:
    """The table of messages. Methods raise NoSuchChat, and the errors of Database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def in_chat(self, chat: int) -> Sequence[StoredMessage]:
        """Return all messages of a chat, each after its parent."""
        with self._database.reading() as connection:
            select = f"SELECT {_COLUMNS}, digest FROM messages WHERE chat = ? ORDER BY id"  # noqa: S608
            rows = connection.execute(select, (chat,))
            return [_message(row) for row in rows]

    def add(self, message: StoredMessage) -> StoredMessage:
        """Store a new message and assign its id. It becomes the end of the shown branch."""
        with self._database.writing() as connection:
            known = connection.execute("SELECT 1 FROM chats WHERE id = ?", (message.chat,)).fetchone()
            if known is None:
                raise NoSuchChat
            marks = ", ".join("?" * 11)
            columns = _COLUMNS.removeprefix("id, ")
            insert = f"INSERT INTO messages ({columns}) VALUES ({marks}) RETURNING id"  # noqa: S608
            [number] = connection.execute(insert, _values(message)).fetchone()
            update = "UPDATE chats SET shown = ?, changed = ? WHERE id = ?"
            connection.execute(update, (number, message.created, message.chat))
            sign(connection, "messages", number)
            sign(connection, "chats", message.chat)
        return msgspec.structs.replace(message, id=number)

    def add_user_message(
        self, chat: int, parent: int | None, text: str, attachments: Sequence[Attachment] = ()
    ) -> StoredMessage:
        """Store a user message, add it to the inputs, and delete the chat's draft, in one transaction."""
        message = StoredMessage(
            id=0,
            chat=chat,
            parent=parent,
            role=Role.USER,
            text=text,
            attachments=tuple(attachments),
            created=time.time(),
        )
        with self._database.writing() as connection:
            stored = self.add(message)
            given = (chat, storable(text), message.created)
            insert = "INSERT INTO inputs (chat, text, created) VALUES (?, ?, ?) RETURNING id"
            [number] = connection.execute(insert, given).fetchone()
            sign(connection, "inputs", number)
            connection.execute("DELETE FROM drafts WHERE chat = ?", (chat,))
        return stored

    def rewrite(self, chat: int, reply: int, text: str) -> StoredMessage:
        """Store the user's version of a reply as a sibling of that reply."""
        with self._database.writing():
            original = next((message for message in self.in_chat(chat) if message.id == reply), None)
            parent, model = (None, "") if original is None else (original.parent, original.model)
            edited = StoredMessage(
                id=0, chat=chat, parent=parent, role=Role.ASSISTANT, text=text, model=model, state=State.EDITED,
                created=time.time(),
            )  # fmt: skip
            return self.add(edited)

    def start_reply(self, chat: int, parent: int, model: str) -> StoredMessage:
        empty = StoredMessage(
            id=0, chat=chat, parent=parent, role=Role.ASSISTANT, text="", model=model, state=State.COMING,
            created=time.time(),
        )  # fmt: skip
        return self.add(empty)

    def write_reply(
        self,
        message: int,
        text: str,
        reasoning: str,
        *,
        reasoning_seconds: float = 0.0,
        state: State = State.COMING,
        usage: StoredUsage | None = None,
        steps: Sequence[ToolStep] = (),
    ) -> None:
        """Save the current state of a reply."""
        values = {
            "text": storable(text),
            "attachments": storable(written(Attachments(steps=tuple(steps)))),
            "reasoning": storable(reasoning),
            "reasoning_seconds": reasoning_seconds,
            "state": state,
            "usage": storable(written(usage)),
        }
        columns = ", ".join(f"{column} = ?" for column in values)
        with self._database.writing() as connection:
            connection.execute(f"UPDATE messages SET {columns} WHERE id = ?", (*values.values(), message))  # noqa: S608
            sign(connection, "messages", message)
        if state is not State.COMING:
            self._database.checkpoint()


def _values(message: StoredMessage) -> tuple[object, ...]:
    return (
        message.chat,
        message.parent,
        message.role,
        storable(message.text),
        storable(written(Attachments(message.attachments, message.steps))),
        storable(message.reasoning),
        message.reasoning_seconds,
        message.model,
        message.state,
        storable(written(message.usage)),
        message.created,
    )


def _message(row: Row) -> StoredMessage:
    """Convert a row to a message. An unknown state becomes FAILED. Raises Damaged."""
    match checked("messages", row):
        case (
            int(number), int(chat), int() | None as parent, str(role), str(text), str(attachments), str(reasoning),
            float(seconds), str(model), str(state), str(usage), float(created),
        ):  # fmt: skip
            kept = read(attachments, Attachments)
            return StoredMessage(
                id=number,
                chat=chat,
                parent=parent,
                role=Role.USER if role == Role.USER else Role.ASSISTANT,
                text=text,
                attachments=kept.files,
                steps=kept.steps,
                reasoning=reasoning,
                reasoning_seconds=seconds,
                model=model,
                state=State(state) if state in set(State) else State.FAILED,
                usage=read(usage, StoredUsage) if usage else None,
                created=created,
            )
    raise Damaged(CHANGED)
