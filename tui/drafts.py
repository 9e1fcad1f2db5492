"""What was typed and not sent: the text on the disk, the files for as long as the program runs. Knows no widget.

Of a private chat that does not exist yet nothing is kept; of one that does, its client takes care.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from tui.client import Chats
from tui.nouns import Attachment, ChatId
from tui.open_chat import OpenChat


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

    async def of_new_chat(self, chat: OpenChat) -> Prompt:
        """What to begin with in a chat that does not exist yet."""
        return Prompt() if chat.private else self.with_files(None, await self._chats.draft())

    def with_files(self, chat: ChatId | None, text: str) -> Prompt:
        """A draft as the client knows it, and the files that were beside it."""
        return Prompt(text, self.rest(chat).attachments)

    def rest(self, chat: ChatId | None) -> Prompt:
        """What will be left once everything has been sent that is under way."""
        return self._rests.get(chat, Prompt())

    async def keep(self, chat: OpenChat, rest: Prompt, sending: Prompt | None = None) -> None:
        """What is being sent may come back, and is a part of the draft until the client has it."""
        if chat.id is None and chat.private:
            return
        await self._keep(chat.id, rest, Prompt.of([sending or Prompt(), rest]).text)

    async def begun(self, chat: OpenChat) -> None:
        """A chat exists now; the next one begins with nothing."""
        if not chat.private:
            await self._keep(None, Prompt(), "")

    async def _keep(self, chat: ChatId | None, rest: Prompt, text: str) -> None:
        self._rests[chat] = rest
        await asyncio.shield(self._write(chat, text))

    async def _write(self, chat: ChatId | None, text: str) -> None:
        async with self._turn:
            await self._chats.keep_draft(chat, text)
