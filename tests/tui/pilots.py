"""Runs a chat in a test, with functions that wait for the contents of its screens."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import Label

from tests.tui.scripted_client import ScriptedClient
from tui.app import ChatApp
from tui.screens.chat import ChatScreen
from tui.types import ChatId
from tui.widgets.composer import Composer
from tui.widgets.conversation import Conversation
from tui.widgets.message_view import MessageView

Flow = Callable[["Chatting"], Awaitable[None]]
Seen = TypeVar("Seen")
_FRAMES = 5  # number of equal consecutive values after which the screen is at rest


async def at_rest(pilot: Pilot[None], look: Callable[[], Seen]) -> Seen:
    """Return the value of `look` when it has been the same for several frames."""
    seen: list[Seen] = []
    while len(seen) < _FRAMES or any(one != seen[-1] for one in seen[-_FRAMES:]):
        await pilot.pause(0.01)
        seen.append(look())
    return seen[-1]


class Chatting:
    """A running chat, with queries and actions that tests use."""

    def __init__(self, app: ChatApp, pilot: Pilot[None], client: ScriptedClient) -> None:
        self.app = app
        self.pilot = pilot
        self.client = client

    @property
    def screen(self) -> ChatScreen:
        """The chat screen, which may be below other screens."""
        (found,) = (screen for screen in self.app.screen_stack if isinstance(screen, ChatScreen))
        return found

    @property
    def conversation(self) -> Conversation:
        return self.screen.query_one(Conversation)

    @property
    def composer(self) -> Composer:
        return self.conversation.composer

    def views(self) -> list[MessageView]:
        """Return the views of the mounted messages."""
        return list(self.conversation.transcript.query(MessageView))

    def texts(self) -> list[str]:
        return [view.message.text for view in self.views()]

    def label(self, selector: str) -> str:
        """Return the text of a label; empty if it does not exist."""
        return "".join(str(label.render()) for label in self.app.screen.query(selector).results(Label))

    def lines(self) -> list[str]:
        """Return all visible lines."""
        return [strip.text for strip in self.app.screen._compositor.render_strips()]

    def notices(self) -> list[str]:
        return [f"{notice.title} {notice.message}".strip() for notice in self.app._notifications]

    async def until(self, holds: Callable[[], Any]) -> None:
        """Wait until the condition is true. If it never is, the time limit of the test ends the wait."""
        while not holds():
            await asyncio.sleep(0.002)

    async def type(self, text: str, *, enter: bool = True) -> None:
        """Type text into the prompt."""
        self.composer.area.focus()
        self.composer.area.insert(text)
        if enter:
            await self.pilot.press("enter")

    def at_once(self, *keys: str) -> None:
        """Press keys without a pause, like a terminal that sends all of them in one piece."""
        for key in keys:
            self.app.post_message(Key(key, key if len(key) == 1 else None))

    async def say(self, text: str) -> None:
        """Send a message, and wait until its reply has ended."""
        replies = len(self.client.replies.asked)
        await self.type(text)
        await self.until(lambda: len(self.client.replies.asked) > replies and self.conversation.current_reply is None)


def run(
    client: ScriptedClient,
    flow: Flow,
    *,
    size: tuple[int, int] = (80, 24),
    loaded: bool = True,
    chat: ChatId | None = None,
    theme: str = "",
    private: bool = False,
    question: str = "",
) -> None:
    """Run a chat with this client, and call `flow` with it."""
    if loaded:
        client.engine.loads.set()

    async def go() -> None:
        app = ChatApp(client, chat=chat, theme=theme, private=private, question=question)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await asyncio.wait_for(flow(Chatting(app, pilot, client)), timeout=240)

    asyncio.run(go())
