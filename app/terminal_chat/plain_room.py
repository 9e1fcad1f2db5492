"""Room in a full context, for the plain chat: as the chat's settings say, or as a person answers in a line."""

from collections.abc import Awaitable, Callable

from tui import figures
from tui.client import Client, ClientError, NotLoaded
from tui.making_room import MakingRoom
from tui.nouns import Chat, ChatId, ContextBudget, FullContext, MessageId, Room

Ask = Callable[[str], Awaitable[str]]

_CHOICES = {"summarize": FullContext.SUMMARIZE, "drop": FullContext.DROP_OLDEST}
_QUESTION = "summarize: send a summary of the oldest messages; drop: send them no more; anything else: send nothing."


class PlainRoom:
    """`say` writes a line; `ask` does, too, and gives the answer, which is empty where nobody is there to give one."""

    def __init__(self, client: Client, say: Callable[[str], None], ask: Ask) -> None:
        self._context = client.context
        self._say = say
        self._ask = ask
        self._making = MakingRoom(client.context, self._choose, self._made, self._tell)

    async def has_room(self, chat: Chat, leaf: MessageId | None, typed: str) -> bool:
        """Whether what is typed and a reply fit behind `leaf`, once room was made. Raises ClientError where it cannot
        be."""
        try:
            return await self._making.has_room(chat.summary.id, leaf, typed, chat.settings.full_context)
        except NotLoaded:
            return True  # the reply tries once more, or tells why

    async def make(self, chat: Chat, how: str) -> None:
        """What /room asks for."""
        if how not in _CHOICES:
            raise ClientError("it is to be said how room is made", "/room summarize, or /room drop.")
        room = await self._context.plan(chat.summary.id, chat.leaf, _CHOICES[how], "")
        if room.tokens <= 0:
            raise ClientError("this would make no room")
        await self._making.make(chat.summary.id, room)

    async def _choose(self, chat: ChatId, leaf: MessageId | None, typed: str, budget: ContextBudget) -> Room | None:
        self._say(f"The context is full. {figures.budget(budget)}.")
        how = _CHOICES.get((await self._ask(_QUESTION)).strip().lower())
        if how is None:
            raise ClientError("the context is full: nothing was sent", "/room drop makes room; so does /set full drop.")
        room = await self._context.plan(chat, leaf, how, typed)
        if not room.suffices(budget):
            raise ClientError("this would not make room enough", "Try the other way, or begin a new chat with /new.")
        return room

    async def _made(self, chat: Chat) -> None:
        self._say(f"There is room now: {len(chat.left_out)} messages of this chat are not sent any more.")

    def _tell(self, activity: str) -> None:
        if activity:
            self._say(f"{activity.capitalize()}.")
