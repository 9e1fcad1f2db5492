"""A draft: the text of the prompt with its attachments, and text files that become attachments."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tui.client import Chats, ClientError
from tui.open_chat import OpenChat
from tui.types import Attachment, ChatId

LARGEST = 2_000_000  # bytes; more than any context of today holds


def read_attachment(path: Path) -> Attachment:
    """The file at `path`. Raises ClientError where it is no text, or too large, or cannot be read."""
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise ClientError(f"{path} cannot be read: {error.strerror}.", "Check the path.") from error
    if len(data) > LARGEST:
        raise ClientError(f"{path.name} has more than {LARGEST:,} bytes.", "Attach the part that matters.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ClientError(f"{path.name} is no text in UTF-8.", "Only text files can be attached.") from error
    if "\0" in text:
        raise ClientError(f"{path.name} is a binary file.", "Only text files can be attached.")
    return Attachment(path.name, text)


def dropped_path(pasted: str) -> Path | None:
    """The file whose path was pasted, as terminals do it when one is dropped; None for any other text."""
    candidate = pasted.strip().strip("'\"").replace("\\ ", " ").removeprefix("file://")
    if "\n" in candidate or not candidate.startswith(("/", "~")) or len(candidate) > 4096:
        return None
    path = Path(candidate).expanduser()
    try:
        return path if path.is_file() else None
    except OSError:
        return None


_FILES_ALONE = "\n"  # a draft without text, so that its chat stays in the list


@dataclass(frozen=True, slots=True)
class Prompt:
    """A message that is not sent yet."""

    text: str = ""
    attachments: tuple[Attachment, ...] = ()

    @classmethod
    def of(cls, prompts: Iterable["Prompt"]) -> "Prompt":
        """Several as one."""
        found = list(prompts)
        text = "\n\n".join(prompt.text for prompt in found if prompt.text)
        return cls(text, tuple(one for prompt in found for one in prompt.attachments))

    @property
    def all_text(self) -> str:
        """All that the model will read of it."""
        return "\n".join([*(attachment.text for attachment in self.attachments), self.text])


class Drafts:
    """One for each chat, and one for the chat that does not exist yet."""

    def __init__(self, chats: Chats) -> None:
        self._chats = chats
        self._unsent: dict[ChatId | None, Prompt] = {}
        self._lock = asyncio.Lock()  # whoever asks last, writes last
        self._is_read = False  # the draft that this window had when it ended; not overwritten before

    async def read_window_draft(self) -> Prompt:
        """The draft of a new chat that this window had when it ended."""
        text = await self._chats.draft()
        self._is_read = True
        return self.with_files(None, text)

    def with_files(self, chat: ChatId | None, text: str) -> Prompt:
        """A draft as the client knows it, and the files that were beside it."""
        return Prompt(text.strip(), self.unsent(chat).attachments)

    def unsent(self, chat: ChatId | None) -> Prompt:
        """What will be left once everything has been sent that is under way."""
        return self._unsent.get(chat, Prompt())

    async def save(self, chat: OpenChat, unsent: Prompt, sending: Prompt | None = None) -> None:
        """What is being sent may come back, and is a part of the draft until the client has it."""
        if chat.id is None and (chat.private or not self._is_read):
            return
        await self._save(chat.id, unsent, Prompt.of([sending or Prompt(), unsent]).text)

    async def save_as_chat(self, chat: OpenChat, draft: Prompt) -> None:
        """Make a chat of a draft whose new chat is left, so that it stays in the list."""
        summary = (await self._chats.create(chat.settings, private=chat.private)).summary
        await self._save(summary.id, draft, draft.text)
        await self.clear_new(chat)

    async def clear_new(self, chat: OpenChat) -> None:
        """A chat exists now; the next one begins with nothing."""
        if not chat.private and self._is_read:
            await self._save(None, Prompt(), "")

    async def _save(self, chat: ChatId | None, unsent: Prompt, text: str) -> None:
        self._unsent[chat] = unsent
        text = text or _FILES_ALONE * bool(unsent.attachments)
        await asyncio.shield(self._write(chat, text))

    async def _write(self, chat: ChatId | None, text: str) -> None:
        async with self._lock:
            await self._chats.save_draft(chat, text)
