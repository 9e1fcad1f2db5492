"""A line that appears when another window has continued the open chat."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from textual import work
from textual.content import Content
from textual.message import Message as Posted

from tui.client import Chats, ClientError
from tui.open_chat import OpenChat
from tui.types import Finish, Message, MessageId
from tui.widgets.text_fields import WordButtons, word

_POLL = 1.5  # seconds between two polls for messages of other windows


class Elsewhere(WordButtons):
    """Polls for messages that other windows add to the open chat. The shown branch stays as it is."""

    DEFAULT_CSS = "Elsewhere { height: 1; display: none; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }"

    class Found(Posted):
        """Another window has added or changed these messages."""

        def __init__(self, chat: OpenChat, messages: Sequence[Message]) -> None:
            super().__init__()
            self.chat = chat
            self.messages = messages

    class ShowAsked(Posted):
        """The user wants to see the branch with this message."""

        def __init__(self, message: MessageId) -> None:
            super().__init__()
            self.message = message

    def __init__(self, chats: Chats, idle_chat: Callable[[], OpenChat | None]) -> None:
        """Create a hidden line. `idle_chat` returns the open chat, or None while this window adds messages to it."""
        super().__init__()
        self._chats = chats
        self._idle_chat = idle_chat
        self._chat: OpenChat | None = None  # the chat that was continued
        self._newest: MessageId | None = None

    def on_mount(self) -> None:
        self.set_interval(_POLL, self.poll)

    @work(exclusive=True, group="elsewhere")
    async def poll(self) -> None:
        """Find messages of other windows, and show the line."""
        chat = self._idle_chat()
        if chat is not None and chat is not self._chat:
            self.hide()
        if chat is None or chat.id is None or chat.private:
            return
        with suppress(ClientError):  # the next action of the user reports the error
            if not await self._is_behind(chat):
                return
            found = [one for one in (await self._chats.open(chat.id)).messages if _is_news(chat, one)]
            if found and chat is self._idle_chat():
                self._show(chat, [one for one in found if one.id not in chat.branches])
                self.post_message(self.Found(chat, found))

    async def _is_behind(self, chat: OpenChat) -> bool:
        """Whether the store may have messages that `chat` lacks, or has as unfinished replies of another window."""
        if any(one.finish is Finish.ELSEWHERE for one in chat.path()):
            return True
        summaries = [*await self._chats.summaries(), *await self._chats.summaries(archived=True)]
        return any(one.id == chat.id and one.message_count > len(chat.branches) for one in summaries)

    def _show(self, chat: OpenChat, added: Sequence[Message]) -> None:
        if added:
            self._chat, self._newest = chat, added[-1].id
            words = Content("This chat was continued in another window.   ")
            self.update(
                Content.assemble(words.stylize("$text-warning"), word("Show", "show"), ("   ^t lists branches", "dim"))
            )
            self.display = True

    def hide(self) -> None:
        """Hide the line until another window continues the chat again."""
        self._chat = self._newest = None
        self.display = False

    async def action_ask(self, action: str) -> None:
        if self._newest is not None:
            self.post_message(self.ShowAsked(self._newest))
            self.hide()


def _is_news(chat: OpenChat, message: Message) -> bool:
    """Whether a stored message is unknown to `chat`, or was a reply in progress."""
    if message.id not in chat.branches:
        return True
    known = chat.branches[message.id]
    return known.finish is Finish.ELSEWHERE and message != known
