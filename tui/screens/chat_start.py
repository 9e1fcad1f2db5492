"""The start of the chat screen: its first chat, the question given at startup, and what it suggests to the user."""

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Coroutine

from textual.worker import Worker

from tui.client import Client
from tui.drafts import Prompt, with_named_files
from tui.open_chat import settings_of_new_chats
from tui.plain_text import sanitize
from tui.show_errors import show_errors
from tui.types import ChatId
from tui.widgets.conversation import Conversation
from tui.widgets.top_bar import TopBar

_NOTICE_SECONDS = 60.0  # seconds to show a notice about damage, which is several sentences long


class ChatStart:
    """The work at the start of the chat. The widgets that are not needed to type the first message come later."""

    def __init__(
        self,
        conversation: Conversation,
        client: Client,
        bar: TopBar,
        choose: Callable[[], Awaitable[None]],
        *,
        chat: ChatId | None,
        question: str,
        resumes: bool,
    ) -> None:
        """`chat` is opened first, and `question` sent in it. With `resumes`, `choose` lets the user choose a chat."""
        self._conversation = conversation
        self._client = client
        self._bar = bar
        self._choose = choose
        self._chat = chat
        self._question = question
        self._resumes = resumes
        self._is_offering = False  # whether the last chat is offered

    def begin(self) -> None:
        """Start all work in the background."""
        self._run(self._open_first)
        for work in (self._import_for_replies, self._recommend_model, self._show_notices):
            self._conversation.call_after_refresh(self._run, work)

    def _run(self, work: Callable[[], Coroutine[None, None, None]]) -> Worker[None]:
        return self._conversation.run_worker(work, group="start", description=work.__name__)

    async def _open_first(self) -> None:
        """Open the chat given at startup, or restore the last draft. Send the question given at startup."""
        conversation = self._conversation
        if self._chat is not None:
            await conversation.open(self._chat)
        else:
            await self._use_default_settings()
        await conversation.composer.start()
        if self._question:
            self._ask(Prompt(sanitize(self._question)))
        elif self._resumes:
            await self._choose()
        elif self._chat is None:
            await self._offer_last_chat()

    def _ask(self, question: Prompt) -> None:
        """Send a question with the files that it names. If one cannot be attached, let the user edit the question."""
        with show_errors(self._conversation):
            self._conversation.outbox.send(with_named_files(question))
            return
        self._conversation.composer.write(question)

    async def _use_default_settings(self) -> None:
        """Apply the preset that the user made the default."""
        chat = self._conversation.chat
        with show_errors(self._conversation):
            settings = await settings_of_new_chats(self._client.chats)
            if chat.id is None:
                await self._conversation.configure(chat, settings)

    async def _offer_last_chat(self) -> None:
        self._is_offering = True
        with show_errors(self._conversation):
            await self.renew_offer()

    async def renew_offer(self) -> None:
        """Offer the newest chat of all windows, until the user opens a chat. Raises ClientError."""
        if self._is_offering:
            chats = [one for one in await self._client.chats.summaries() if one.message_count and not one.private]
            self._conversation.welcome.offer(max(chats, key=lambda one: one.updated, default=None))

    def end_offer(self) -> None:
        """Stop offering a chat, because the user has opened one."""
        self._is_offering = False
        self._conversation.welcome.offer(None)

    async def _recommend_model(self) -> None:
        """Suggest a better model to a new user while the default one loads."""
        with show_errors(self._conversation):
            if (better := await self._client.models.recommended()) is not None:
                self._conversation.welcome.recommend(better)

    async def _show_notices(self) -> None:
        """Show notices of the store, and show in the top bar whether chats are saved."""
        async for notice in self._client.chats.notices():
            self._bar.is_saved = notice.is_saved
            self._conversation.app.notify(
                notice.remedy, title=notice.message, severity="warning", timeout=_NOTICE_SECONDS, markup=False
            )

    async def _import_for_replies(self) -> None:
        """Import the modules that the first reply needs, while the user is still typing."""
        await asyncio.to_thread(importlib.import_module, "tui.widgets.reply_text")
