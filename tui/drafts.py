"""What was typed and not sent: the text on the disk, the files for as long as the program runs. Knows no widget.

The draft of a new chat belongs to this window until that chat is left. Then it becomes a chat of the list, without
messages. A new private chat has no draft on the disk; the client keeps those of private chats that exist in memory.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from tui.client import Chats
from tui.nouns import Attachment, ChatId
from tui.open_chat import OpenChat

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
        self._rests: dict[ChatId | None, Prompt] = {}
        self._turn = asyncio.Lock()  # whoever asks last, writes last
        self._is_read = False  # the draft that this window had when it ended; not overwritten before

    async def of_window(self) -> Prompt:
        """The draft of a new chat that this window had when it ended."""
        text = await self._chats.draft()
        self._is_read = True
        return self.with_files(None, text)

    def with_files(self, chat: ChatId | None, text: str) -> Prompt:
        """A draft as the client knows it, and the files that were beside it."""
        return Prompt(text.strip(), self.rest(chat).attachments)

    def rest(self, chat: ChatId | None) -> Prompt:
        """What will be left once everything has been sent that is under way."""
        return self._rests.get(chat, Prompt())

    async def keep(self, chat: OpenChat, rest: Prompt, sending: Prompt | None = None) -> None:
        """What is being sent may come back, and is a part of the draft until the client has it."""
        if chat.id is None and (chat.private or not self._is_read):
            return
        await self._keep(chat.id, rest, Prompt.of([sending or Prompt(), rest]).text)

    async def part(self, chat: OpenChat, draft: Prompt) -> None:
        """Make a chat of a draft whose new chat is left, so that it stays in the list."""
        summary = (await self._chats.create(chat.settings, private=chat.private)).summary
        await self._keep(summary.id, draft, draft.text)
        await self.begun(chat)

    async def begun(self, chat: OpenChat) -> None:
        """A chat exists now; the next one begins with nothing."""
        if not chat.private and self._is_read:
            await self._keep(None, Prompt(), "")

    async def _keep(self, chat: ChatId | None, rest: Prompt, text: str) -> None:
        self._rests[chat] = rest
        text = text or _FILES_ALONE * bool(rest.attachments)
        await asyncio.shield(self._write(chat, text))

    async def _write(self, chat: ChatId | None, text: str) -> None:
        async with self._turn:
            await self._chats.keep_draft(chat, text)
