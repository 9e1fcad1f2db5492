"""Drafts of messages: the text of the prompt and its attachments."""

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tui.client import Chats, ClientError
from tui.open_chat import OpenChat
from tui.types import Attachment, ChatId

LARGEST = 2_000_000  # maximum size of an attachment in bytes; larger than any current context


def read_attachment(path: Path) -> Attachment:
    """Read a text file. Raises ClientError if it is not text, is too large, or cannot be read."""
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError as error:
        raise ClientError(f"there is no file {path}.", "Check the path.") from error
    except IsADirectoryError as error:
        raise ClientError(f"cannot attach {path}, because it is a folder.", "Attach its files.") from error
    except OSError as error:
        raise ClientError(f"the file {path} cannot be read: {error.strerror}.", "Check the path.") from error
    if b"\0" in data:
        raise _not_text(path)
    if len(data) > LARGEST:
        most = LARGEST // 1_000_000
        raise ClientError(f"the file {path.name} is larger than {most} MB.", "Attach only the part that you need.")
    try:
        return Attachment(path.name, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_text(path) from error


def _not_text(path: Path) -> ClientError:
    return ClientError(f"the file {path.name} is not text.", "Only text files can be attached.")


def dropped_path(pasted: str) -> Path | None:
    """Return the file whose path was pasted, or None if the text is not a path to a file.

    Terminals paste the path of a file that is dropped on them.
    """
    candidate = pasted.strip().strip("'\"").replace("\\ ", " ").removeprefix("file://")
    if "\n" in candidate or not candidate.startswith(("/", "~")) or len(candidate) > 4096:
        return None
    return _existing_file(candidate)


def _existing_file(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if path.is_file() else None
    except (OSError, RuntimeError):  # expanduser raises RuntimeError for unknown users
        return None


_FILES_ALONE = "\n"  # text of a draft that has only files: a draft without text would remove its chat from the list


@dataclass(frozen=True, slots=True)
class Prompt:
    """A message that has not been sent."""

    text: str = ""
    attachments: tuple[Attachment, ...] = ()

    @classmethod
    def of(cls, prompts: Iterable["Prompt"]) -> "Prompt":
        """Join several messages into one."""
        found = list(prompts)
        text = "\n\n".join(prompt.text for prompt in found if prompt.text)
        return cls(text, tuple(one for prompt in found for one in prompt.attachments))

    @property
    def all_text(self) -> str:
        """All text that the model would read: the attachments, followed by the message."""
        return "\n".join([*(attachment.text for attachment in self.attachments), self.text])


_NAMED = re.compile(r"(?<!\S)@(\S+)")
_PUNCTUATION = ".,;:!?)]}'\""  # may follow a path in a sentence


def with_named_files(prompt: Prompt) -> Prompt:
    """Attach each file that the text names as "@path", and remove its "@".

    Other words that start with "@" remain text. Raises ClientError if a file cannot be attached.
    """
    attachments = list(prompt.attachments)

    def attach(word: re.Match[str]) -> str:
        names = (word[1], word[1].rstrip(_PUNCTUATION))
        path = next((path for name in names if (path := _existing_file(name)) is not None), None)
        if path is None:
            return word[0]
        if (file := read_attachment(path)) not in attachments:
            attachments.append(file)
        return word[1]

    return Prompt(_NAMED.sub(attach, prompt.text), tuple(attachments))


class Drafts:
    """The drafts of all chats, and of this window's new chat."""

    def __init__(self, chats: Chats) -> None:
        self._chats = chats
        self._unsent: dict[ChatId | None, Prompt] = {}
        self._lock = asyncio.Lock()  # writes run one after another, so that the last one takes effect
        self._is_read = False  # whether this window's stored draft was read; until then it must not be overwritten

    async def read_window_draft(self) -> Prompt:
        """Return the draft that was in this window's new chat when the window was last closed."""
        text = await self._chats.draft()
        self._is_read = True
        return self.with_files(None, text)

    def with_files(self, chat: ChatId | None, text: str) -> Prompt:
        """Return a draft that consists of the stored text and the files that were attached in this run."""
        return Prompt(text.strip(), self.unsent(chat).attachments)

    def unsent(self, chat: ChatId | None) -> Prompt:
        """Return a chat's draft without the message that is being sent."""
        return self._unsent.get(chat, Prompt())

    async def save(self, chat: OpenChat, unsent: Prompt, sending: Prompt | None = None) -> None:
        """Save a chat's draft. The message `sending` is part of it until the client has stored that message."""
        if chat.id is None and (chat.private or not self._is_read):
            return
        await self._save(chat.id, unsent, Prompt.of([sending or Prompt(), unsent]).text)

    async def save_as_chat(self, chat: OpenChat, draft: Prompt) -> None:
        """Create a chat from the draft of a new chat that the user leaves, so that it is listed."""
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
