"""Drafts: the text of the prompt with its attachments, and text files to attach."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tui.client import Chats, ClientError
from tui.open_chat import OpenChat
from tui.types import Attachment, ChatId

LARGEST = 2_000_000  # bytes; more than any current context can hold


def read_attachment(path: Path) -> Attachment:
    """Read a text file. Raises ClientError if it is not text, is too large, or cannot be read."""
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError as error:
        raise ClientError(f"{path} not found.", "Check the path.") from error
    except OSError as error:
        raise ClientError(f"{path} cannot be read: {error.strerror}.", "Check the path.") from error
    if len(data) > LARGEST:
        raise ClientError(f"{path.name} is larger than {LARGEST:,} bytes.", "Attach only the part that you need.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ClientError(f"{path.name} is not a text file.", "Images are not supported yet.") from error
    if "\0" in text:
        raise ClientError(f"{path.name} is not a text file.", "Images are not supported yet.")
    return Attachment(path.name, text)


def dropped_path(pasted: str) -> Path | None:
    """Return the file whose path was pasted, as terminals do when a file is dropped on them; None for other text."""
    candidate = pasted.strip().strip("'\"").replace("\\ ", " ").removeprefix("file://")
    if "\n" in candidate or not candidate.startswith(("/", "~")) or len(candidate) > 4096:
        return None
    path = Path(candidate).expanduser()
    try:
        return path if path.is_file() else None
    except OSError:
        return None


_FILES_ALONE = "\n"  # stored as the text of a draft that has only files, so that its chat stays in the list


@dataclass(frozen=True, slots=True)
class Prompt:
    """A message that is not sent yet."""

    text: str = ""
    attachments: tuple[Attachment, ...] = ()

    @classmethod
    def of(cls, prompts: Iterable["Prompt"]) -> "Prompt":
        """Join several prompts into one."""
        found = list(prompts)
        text = "\n\n".join(prompt.text for prompt in found if prompt.text)
        return cls(text, tuple(one for prompt in found for one in prompt.attachments))

    @property
    def all_text(self) -> str:
        """All text that the model would read: the attachments, then the message."""
        return "\n".join([*(attachment.text for attachment in self.attachments), self.text])


class Drafts:
    """The drafts of all chats, and of the new chat of this window."""

    def __init__(self, chats: Chats) -> None:
        self._chats = chats
        self._unsent: dict[ChatId | None, Prompt] = {}
        self._lock = asyncio.Lock()  # so that the last of several writes wins
        self._is_read = False  # whether the window's stored draft was read; it is not overwritten before

    async def read_window_draft(self) -> Prompt:
        """Return the draft of the new chat that this window had when it was last closed."""
        text = await self._chats.draft()
        self._is_read = True
        return self.with_files(None, text)

    def with_files(self, chat: ChatId | None, text: str) -> Prompt:
        """Return a draft with the stored text and the files that were attached in this run."""
        return Prompt(text.strip(), self.unsent(chat).attachments)

    def unsent(self, chat: ChatId | None) -> Prompt:
        """Return what remains as the draft once the message that is being sent is stored."""
        return self._unsent.get(chat, Prompt())

    async def save(self, chat: OpenChat, unsent: Prompt, sending: Prompt | None = None) -> None:
        """Save a chat's draft. The message that is being `sending` stays part of it until the client has stored it."""
        if chat.id is None and (chat.private or not self._is_read):
            return
        await self._save(chat.id, unsent, Prompt.of([sending or Prompt(), unsent]).text)

    async def save_as_chat(self, chat: OpenChat, draft: Prompt) -> None:
        """Create a chat from a draft, so that it stays in the list after its new chat is left."""
        summary = (await self._chats.create(chat.settings, private=chat.private)).summary
        await self._save(summary.id, draft, draft.text)
        await self.clear_new(chat)

    async def clear_new(self, chat: OpenChat) -> None:
        """Clear the draft of the new chat, because a chat was created from it."""
        if not chat.private and self._is_read:
            await self._save(None, Prompt(), "")

    async def _save(self, chat: ChatId | None, unsent: Prompt, text: str) -> None:
        self._unsent[chat] = unsent
        text = text or _FILES_ALONE * bool(unsent.attachments)
        await asyncio.shield(self._write(chat, text))

    async def _write(self, chat: ChatId | None, text: str) -> None:
        async with self._lock:
            await self._chats.save_draft(chat, text)
