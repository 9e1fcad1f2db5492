"""Measures how long a key waits next to a text of a megabyte: `python -m tests.tui.megabyte`, on an idle machine.

Opens a chat with one message of that size, and then streams a reply of that size in pieces of 20 kB, faster than any
model. Meanwhile a key is due every 50 ms, and its wait is measured from then on, even if the event loop is busy. For
each kind of text, prints the longest time in milliseconds from a key to its frame: while a reply is opened, while a
user's message is opened, while a reply is streamed in pieces, and while it is streamed in tokens.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncGenerator, Mapping

from tests.tui.scripted_client import HERE, USAGE, ScriptedClient, ScriptedReplies
from tests.tui.speed import drawn
from tui.app import ChatApp
from tui.types import ChatId, Finish, MessageId, ReplyEnd, ReplyEvent, ReplyStarted, Role, TextDelta
from tui.widgets.conversation import Conversation
from tui.widgets.reply_text import ReplyText

SIZE = 1_000_000  # characters
PIECE = 20_000
TOKEN = 8
PAUSE = 0.01  # seconds between two pieces
PERIOD = 0.05  # seconds between keys
QUIET = 40  # the measurement ends after this many consecutive waits of at most AS_QUICK
AS_QUICK = 0.05  # seconds

# kind of text -> its first lines, and the text that is repeated after them
KINDS: Mapping[str, tuple[str, str]] = {
    "one line": ("", "a word and **more** of it, "),
    "one word": ("", "abcdefgh"),
    "paragraphs": ("", "The seat beside the fire was warm, and **nobody** wished to leave it.\n\n"),
    "list": ("", "- an item, `said` so\n"),
    "table": ("", "| one | two | three |\n|---|---|---|\n"),
    "line of code": ("```python\n", "warm(seat) "),
    "brackets": ("", "[a](b["),
    "stars": ("", "**a_b*"),
    "quotes": ("", "> " * 40 + "said\n"),
    "links": ("", "https://hearth.example/a?b=c "),
    "fences": ("", "```\nx\n```\n"),
    "emoji": ("", "👨\u200d👩\u200d👧ภาษาไทย\ufdfd🇩🇪"),
}


def text_of(kind: str) -> str:
    first, then = KINDS[kind]
    return (first + then * (SIZE // len(then) + 1))[:SIZE]


class HugeReplies(ScriptedReplies):
    """Streams one huge reply in pieces, with a pause after each."""

    text = ""
    piece, pause = PIECE, PAUSE

    async def reply(self, chat: ChatId, to: MessageId) -> AsyncGenerator[ReplyEvent, None]:
        yield ReplyStarted(MessageId(f"message-{self.chats.name()}"), HERE.name)
        for start in range(0, len(self.text), self.piece):
            yield TextDelta(self.text[start : start + self.piece])
            await asyncio.sleep(self.pause)
        yield ReplyEnd(Finish.COMPLETE, USAGE)


async def waits(app: ChatApp, working: asyncio.Task[None]) -> list[float]:
    """Press keys until the work is done and the screen is at rest. Returns how long each key waited, in seconds."""
    area = app.screen.query_one(Conversation).composer.area
    found: list[float] = []
    due = time.perf_counter()
    while not working.done() or len(found) < QUIET or max(found[-QUIET:]) > AS_QUICK:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        before = len(area.text)
        app.simulate_key("x")
        while len(area.text) == before:
            await asyncio.sleep(0)
        await drawn(app)
        found.append(time.perf_counter() - due)
        due = max(due + PERIOD, time.perf_counter())
    await working
    return found


async def opened(kind: str, role: Role) -> float:
    client = ScriptedClient()
    huge = client.keep("Huge", "a question", text_of(kind))
    if role is Role.USER:
        huge = client.keep("Huge", text_of(kind))
    small = client.keep("Small", "a question", "an answer")
    client.engine.loads.set()
    app = ChatApp(client)
    async with app.run_test(size=(120, 40)) as pilot:
        conversation = app.screen.query_one(Conversation)
        await conversation.open(small)
        await pilot.pause(0.5)
        conversation.composer.area.focus()
        return max(await waits(app, asyncio.create_task(conversation.open(huge))))


async def streamed(kind: str, piece: int, pause: float) -> float:
    client = ScriptedClient()
    client.replies = HugeReplies(client.chats)
    client.replies.text, client.replies.piece, client.replies.pause = text_of(kind), piece, pause
    client.engine.loads.set()
    app = ChatApp(client)

    async def reply() -> None:
        while not conversation.query(ReplyText):
            await asyncio.sleep(0.01)
        while conversation.current_reply is not None or conversation.query_one(ReplyText).has_pending:
            await asyncio.sleep(0.1)

    async with app.run_test(size=(120, 40)) as _:
        conversation = app.screen.query_one(Conversation)
        conversation.composer.area.focus()
        conversation.composer.area.write("go")
        app.simulate_key("enter")
        return max(await waits(app, asyncio.create_task(reply())))


async def measure(kind: str) -> None:
    figures = [await opened(kind, Role.ASSISTANT), await opened(kind, Role.USER), await streamed(kind, PIECE, PAUSE)]
    figures.append(await streamed(kind, TOKEN, 0.0))
    reply, typed, coming, burst = (f"{1000 * seconds:5.0f}" for seconds in figures)
    print(f"{kind:<14} a reply opened {reply}   a typed text opened {typed}", end="")
    print(f"   a reply that comes {coming}   in tokens {burst}", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--of", nargs="*", choices=KINDS, default=list(KINDS), help="kinds of text")
    for kind in options.parse_args().of:
        asyncio.run(measure(kind))


if __name__ == "__main__":
    main()
