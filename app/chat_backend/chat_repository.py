"""The chats that the screens show: those of the history on disk, and private ones in memory."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from app.chat_backend.client_errors import to_thread
from app.chat_backend.converters import (
    PRIVATE,
    chat_of,
    message_of,
    notice_of,
    settings_of,
    stored_settings,
    summary_of,
)
from app.chat_backend.prompt_messages import prompt_messages
from app.errors import AppError
from app.history import records
from app.history.chat_file import as_json, as_markdown
from app.history.chat_import import add_chats, read_chats
from app.history.history import History
from app.history.notices import HistoryNotice
from app.history.records import NoSuchChat, path_to
from tui.types import (
    Attachment,
    Chat,
    ChatId,
    ChatSettings,
    ChatSummary,
    ExportFormat,
    Message,
    MessageId,
    Notice,
    Preset,
    Role,
    SearchHit,
)

T = TypeVar("T")

Title = Callable[[ChatId], Awaitable[str]]


class ChatRepository:
    """Implements `tui.client.Chats`. `in_progress` holds the replies being generated, as pairs of chat id and message
    id.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._private = History(None)
        self.in_progress: set[tuple[ChatId, int]] = set()
        # generates the title of a chat; None: titles are the first words of the chat
        self.make_title: Title | None = None

    def locate(self, chat: ChatId) -> tuple[History, int]:
        """Return the history that stores a chat, and the chat's number in it. Raises NoSuchChat."""
        history = self._private if self.is_private(chat) else self._history
        number = chat.removeprefix(PRIVATE)
        if not number.isdecimal():
            raise NoSuchChat
        return history, int(number)

    def is_private(self, chat: ChatId) -> bool:
        """Whether the chat must never be written to disk."""
        return chat.startswith(PRIVATE)

    def conversations_to_forget(self) -> list[list[Mapping[str, object]]]:
        """Return all branches of the deleted chats as lists of messages, so that the engine can forget them."""
        conversations = []
        for chat in self._history.deleted():
            messages = {message.id: message for message in self._history.messages.in_chat(chat)}
            found = self._history.chats.get(chat, deleted=True)
            leaves = messages.keys() - {message.parent for message in messages.values()}
            branches = [path_to(messages, leaf) for leaf in leaves]
            conversations += [prompt_messages(found, branch, with_reasoning=True) for branch in branches]
        return conversations

    async def _do(self, chat: ChatId, work: Callable[[History, int], T]) -> T:
        """Run `work` in a thread with the chat's history and number, and return its result."""
        return await to_thread(lambda: work(*self.locate(chat)))

    def close(self) -> None:
        """Close both histories. Private chats are lost, and deleted chats are erased from disk."""
        self._private.close()
        self._history.close()

    async def summaries(self, *, archived: bool = False) -> Sequence[ChatSummary]:
        return await to_thread(self._summaries, archived)

    def _summaries(self, archived: bool) -> Sequence[ChatSummary]:
        elsewhere = self._history.replies_elsewhere()
        stored = [
            summary_of(chat, private=False, replying_elsewhere=chat.id in elsewhere)
            for chat in self._history.chats.listed(archived=archived)
        ]
        private = [summary_of(chat, private=True) for chat in self._private.chats.listed(archived=archived)]
        return sorted([*private, *stored], key=lambda chat: (not chat.pinned, -chat.updated))

    async def create(self, settings: ChatSettings, *, private: bool = False) -> Chat:
        history = self._private if private else self._history
        created = await to_thread(history.chats.create, stored_settings(settings))
        return chat_of(created, (), "", private=private, in_progress=())

    async def open(self, chat: ChatId) -> Chat:
        return await to_thread(self._open, chat)

    def _open(self, chat: ChatId) -> Chat:
        history, number = self.locate(chat)
        in_progress = {message for where, message in self.in_progress if where == chat}
        elsewhere = history.replies_elsewhere().get(number, ())
        found, messages = history.chats.get(number), history.messages.in_chat(number)
        draft, private = history.inputs.draft(number), history is self._private
        return chat_of(found, messages, draft, private=private, in_progress=in_progress, elsewhere=elsewhere)

    async def add(
        self, chat: ChatId, parent: MessageId | None, text: str, attachments: Sequence[Attachment] = ()
    ) -> Message:
        def say(history: History, number: int) -> Message:
            files = [records.Attachment(file.name, file.text) for file in attachments]
            return message_of(
                history.messages.add_user_message(number, None if parent is None else int(parent), text, files)
            )

        return await self._do(chat, say)

    async def rewrite(self, chat: ChatId, reply: MessageId, text: str) -> Message:
        def write(history: History, number: int) -> Message:
            return message_of(history.messages.rewrite(number, int(reply), text))

        return await self._do(chat, write)

    async def show_branch(self, chat: ChatId, leaf: MessageId) -> None:
        await self._do(chat, lambda history, number: history.chats.show(number, int(leaf)))

    async def configure(self, chat: ChatId, settings: ChatSettings) -> None:
        await self._do(chat, lambda history, number: history.chats.configure(number, stored_settings(settings)))

    async def title(self, chat: ChatId) -> str:
        made = "" if self.make_title is None else await self.make_title(chat)
        return made or (await self.open(chat)).summary.title

    async def rename(self, chat: ChatId, title: str) -> None:
        await self._do(chat, lambda history, number: history.chats.rename(number, title))

    async def pin(self, chat: ChatId, pinned: bool) -> None:
        await self._do(chat, lambda history, number: history.chats.pin(number, pinned=pinned))

    async def archive(self, chat: ChatId, archived: bool) -> None:
        await self._do(chat, lambda history, number: history.chats.archive(number, archived=archived))

    async def delete(self, chat: ChatId) -> None:
        await self._do(chat, lambda history, number: history.delete(number))

    async def undelete(self, chat: ChatId) -> None:
        await self._do(chat, lambda history, number: history.chats.undelete(number))

    async def search(self, text: str) -> Sequence[SearchHit]:
        return await to_thread(self._search, text)

    def _search(self, text: str) -> Sequence[SearchHit]:
        return [
            SearchHit(
                summary_of(hit.chat, private=history is self._private),
                MessageId(str(hit.message)),
                None if hit.role is None else Role(hit.role.value),
                hit.before,
                hit.match,
                hit.after,
            )
            for history in (self._private, self._history)
            for hit in history.search.find(text)
        ]

    async def draft(self) -> str:
        return await to_thread(self._history.new_draft)

    async def save_draft(self, chat: ChatId | None, text: str) -> None:
        if chat is None:
            await to_thread(self._history.save_new_draft, text)
        else:
            await self._do(chat, lambda history, number: history.inputs.save_draft(text, number))

    async def inputs(self) -> Sequence[str]:
        return await to_thread(self._history.inputs.recent)

    async def presets(self) -> Sequence[Preset]:
        stored = await to_thread(self._history.inputs.presets)
        return [Preset(preset.name, settings_of(preset.settings)) for preset in stored]

    async def save_preset(self, preset: Preset) -> None:
        await to_thread(self._history.inputs.save_preset, records.Preset(preset.name, stored_settings(preset.settings)))

    async def delete_preset(self, name: str) -> None:
        await to_thread(self._history.inputs.delete_preset, name)

    async def export(self, chat: ChatId, path: Path, form: ExportFormat) -> None:
        await to_thread(self._export, chat, path, form)

    def _export(self, chat: ChatId, path: Path, form: ExportFormat) -> None:
        history, number = self.locate(chat)
        found, messages = history.chats.get(number), history.messages.in_chat(number)
        is_json = form is ExportFormat.JSON
        _write(path, as_json([(found, messages)]) if is_json else as_markdown(found, messages).encode())

    async def export_all(self, path: Path) -> int:
        return await to_thread(self._export_all, path)

    def _export_all(self, path: Path) -> int:
        chats = self._history.with_messages()
        _write(path, as_json(chats))
        return len(chats)

    async def notices(self) -> AsyncGenerator[Notice, None]:
        loop, in_progress = asyncio.get_running_loop(), asyncio.Queue[HistoryNotice]()

        def on_notice(notice: HistoryNotice) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(in_progress.put_nowait, notice)

        for notice in self._history.subscribe(on_notice):
            yield notice_of(notice)
        while True:
            yield notice_of(await in_progress.get())

    async def import_chats(self, path: Path) -> Sequence[ChatSummary]:
        chats = await to_thread(add_chats, self._history, await to_thread(read_chats, path))
        return [summary_of(chat, private=False) for chat in chats]


def _write(path: Path, content: bytes) -> None:
    """Write a new file that only the user can read."""
    try:
        with open(path, "xb", opener=_private) as file:
            file.write(content)
    except FileExistsError:
        raise AppError(f"the file {path} already exists", "Choose another name.") from None


def _private(path: str, flags: int) -> int:
    import os

    return os.open(path, flags, 0o600)
