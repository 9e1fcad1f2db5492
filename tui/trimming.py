"""Trims a full context: decides whether it is necessary, chooses the messages to leave out, and applies the plan."""

import asyncio
from collections.abc import Awaitable, Callable

from tui.client import ClientError, Context
from tui.types import Chat, ChatId, ContextBudget, FullContext, MessageId, TrimPlan

Choose = Callable[[ChatId, MessageId | None, str, ContextBudget], Awaitable[TrimPlan | None]]


class ContextTrimmer:
    """Trims the contexts of chats.

    `choose` asks the user for a plan. `trimmed` receives a chat after it was trimmed. `on_activity` receives a chat
    whose activity has changed.
    """

    def __init__(
        self,
        context: Context,
        choose: Choose,
        trimmed: Callable[[Chat], Awaitable[None]],
        on_activity: Callable[[ChatId], None],
    ) -> None:
        self._context = context
        self._choose = choose
        self._trimmed = trimmed
        self._on_activity = on_activity
        self._making: dict[ChatId, asyncio.Future[Chat]] = {}
        self._summarizing: set[ChatId] = set()

    async def ensure_room(self, chat: ChatId | None, leaf: MessageId | None, typed: str, how: FullContext) -> bool:
        """Trim the chat as `how` allows, until `typed` and a reply fit after `leaf`. Returns False if the user cancels.

        Raises ClientError if they cannot fit.
        """
        while (budget := await self._context.budget(chat, leaf, typed)).lacking:
            if chat is None:
                raise _too_long(budget.lacking, budget.reserve)
            plan = await self._find_plan(chat, leaf, typed, how, budget)
            if plan is None or not await self.trim(chat, plan):
                return False
        return True

    async def _find_plan(
        self, chat: ChatId, leaf: MessageId | None, typed: str, how: FullContext, budget: ContextBudget
    ) -> TrimPlan | None:
        if how is FullContext.STOP:
            raise ClientError(
                f"The context is full: {budget.lacking:,} tokens over the limit. "
                f"{budget.reserve:,} tokens are kept free for the reply.",
                "Start a new chat, or use /room.",
            )
        most = await self._context.plan(chat, leaf, FullContext.DROP_OLDEST, typed)
        if not most.suffices(budget):
            raise _too_long(budget.lacking - most.tokens, budget.reserve)
        if how is FullContext.ASK:
            return await self._choose(chat, leaf, typed, budget)
        wanted = await self._context.plan(chat, leaf, how, typed)
        return wanted if wanted.suffices(budget) else most

    async def trim(self, chat: ChatId, plan: TrimPlan) -> bool:
        """Apply a plan. Returns False if the user stopped it."""
        making = self._making[chat] = asyncio.ensure_future(self._context.trim(chat, plan))
        if plan.how is FullContext.SUMMARIZE:
            self._summarizing.add(chat)
        self._on_activity(chat)
        try:
            await asyncio.wait((making,))
            if making.cancelled():
                return False
            await self._trimmed(making.result())
            return True
        finally:
            making.cancel()
            self._making.pop(chat, None)
            self._summarizing.discard(chat)
            self._on_activity(chat)

    def is_trimming(self, chat: ChatId | None) -> bool:
        return chat in self._making

    def activity(self, chat: ChatId | None) -> str:
        """Return a description of the work on this chat; empty if there is none that takes time."""
        return "summarizing" if chat in self._summarizing else ""

    def stop(self, chat: ChatId | None) -> bool:
        """Stop trimming this chat, without a change to it. Returns whether a trim was in progress."""
        return chat is not None and chat in self._making and self._making[chat].cancel()


def _too_long(tokens: int, reserve: int) -> ClientError:
    return ClientError(
        f"This message is {tokens:,} tokens too long for this model, even without the messages before it. "
        f"{reserve:,} tokens are kept free for the reply.",
        "Shorten it, or remove an attachment.",
    )
