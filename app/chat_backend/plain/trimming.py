"""Context trimming in the plain chat: asks how to free up context, and runs the command /room."""

from collections.abc import Awaitable, Callable

from tui import figures
from tui.client import Client, ClientError, NotLoaded
from tui.trimming import ContextTrimmer
from tui.types import Chat, ChatId, ContextBudget, FullContext, MessageId, TrimPlan

Ask = Callable[[str], Awaitable[str]]

CHOICES = {"summarize": FullContext.SUMMARIZE, "drop": FullContext.DROP_OLDEST}
_QUESTION = "summarize: replace the oldest messages with a summary; drop: drop them; anything else: cancel."


class PlainTrimming:
    """Trims the context.

    `say` writes a line. `ask` writes a question and returns the answer, which is empty if stdin is a pipe.
    """

    def __init__(self, client: Client, say: Callable[[str], None], ask: Ask) -> None:
        self._context = client.context
        self._say = say
        self._ask = ask
        self._trimmer = ContextTrimmer(client.context, self._choose, self._tell_trimmed, self._tell)

    async def ensure_room(self, chat: Chat, leaf: MessageId | None, typed: str) -> bool:
        """Trim the context if necessary, and return whether `typed` and a reply fit after `leaf`.

        Raises ClientError if they do not fit even after trimming.
        """
        try:
            return await self._trimmer.ensure_room(chat.summary.id, leaf, typed, chat.settings.full_context)
        except NotLoaded:
            return True  # the request for the reply loads the model again, or reports the error

    async def trim(self, chat: Chat, how: str) -> None:
        """Run the command /room."""
        if how not in CHOICES:
            raise ClientError("choose how to free up context", "Use /room summarize or /room drop.")
        plan = await self._context.plan(chat.summary.id, chat.leaf, CHOICES[how], "")
        if plan.tokens <= 0:
            raise ClientError("this would free no tokens")
        await self._trimmer.trim(chat.summary.id, plan)

    async def _choose(self, chat: ChatId, leaf: MessageId | None, typed: str, budget: ContextBudget) -> TrimPlan | None:
        self._say(f"The context is full. {figures.budget(budget)}.")
        how = CHOICES.get((await self._ask(_QUESTION)).strip().lower())
        if how is None:
            raise ClientError("the context is full: nothing was sent", "Use /room drop, or /set full drop.")
        plan = await self._context.plan(chat, leaf, how, typed)
        if not plan.suffices(budget):
            raise ClientError(
                "this would not free enough tokens", "Choose the other option, or start a new chat with /new."
            )
        return plan

    async def _tell_trimmed(self, chat: Chat) -> None:
        self._say(f"Done: {len(chat.left_out)} messages of this chat are no longer in context.")

    def _tell(self, activity: str) -> None:
        if activity:
            self._say(f"{activity.capitalize()}.")
