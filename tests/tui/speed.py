"""Measures delays and CPU time that users notice in the chat: `python -m tests.tui.speed`, on an idle machine.

- start: from the start of the interpreter to a prompt that accepts keys, while the model loads;
- echo: from a key to its character on the screen, during a reply of 20,000 tokens at 300 per second;
- the fraction of a core that the chat uses during that reply;
- open: from choosing a chat of 2,000 messages until its end is on the screen.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping

from tests.tui.scripted_client import HERE, USAGE, ScriptedClient, ScriptedReplies
from tui.app import ChatApp
from tui.types import ChatId, Finish, MessageId, ReplyEnd, ReplyEvent, ReplyStarted, TextDelta
from tui.widgets.conversation import Conversation

RATE = 300  # tokens per second
PARAGRAPH = "The seat beside the fire was warm, and **nobody** wished to leave it for `anything` else. " * 4
BLOCKS = (
    f"## A heading\n\n{PARAGRAPH}",
    PARAGRAPH,
    "```python\n" + "def warm(seat: Seat) -> bool:\n    return seat.is_near(fire)\n\n" * 6 + "```",
    "\n".join(f"- an item, the {number}th of them" for number in range(8)),
    "| a | b | c |\n|---|---|---|\n" + "\n".join(f"| {row} | two | three |" for row in range(6)),
)
WORDS = "a word and **more** of it, as `said`"
# kind of reply -> its first lines, and the text that is repeated after them
KINDS: Mapping[str, tuple[str, str]] = {
    "blocks": ("", "".join(f"{block}\n\n" for block in BLOCKS)),
    "list": ("", f"- {WORDS}\n"),
    "code": ("```python\n", "    warmest = seat_of(fire, 12) + [seat for seat in seats]  # beside it\n"),
    "table": ("| a | b |\n|---|---|\n", f"| {WORDS} | two |\n"),
    "line": ("", f"{WORDS}, "),
    "prose": ("", "Once upon a time there was a cat that liked the fire, the storm, and the old house. " * 6 + "\n\n"),
}
START = """
import asyncio, time
from tests.tui.scripted_client import ScriptedClient
from tui.app import ChatApp
async def go():
    app = ChatApp(ScriptedClient())
    async with app.run_test(size=(120, 40)) as _:
        while app.focused is None:
            await asyncio.sleep(0.002)
        print(time.time(), time.process_time())
        app.exit()
asyncio.run(go())
"""


class FastReplies(ScriptedReplies):
    """Streams a long reply as an engine does, with some tokens every `interval` seconds."""

    tokens = 20_000
    kind = "blocks"
    rate = RATE
    interval = 0.01

    async def reply(self, chat: ChatId, to: MessageId) -> AsyncGenerator[ReplyEvent, None]:
        yield ReplyStarted(MessageId(f"message-{self.chats.name()}"), HERE.name)
        first, then = KINDS[self.kind]
        text = first + then * (5 * self.tokens // len(then) + 1)
        began, sent = time.monotonic(), 0
        while sent < self.tokens:
            due = min(self.tokens, int((time.monotonic() - began) * self.rate))
            yield TextDelta(text[5 * sent : 5 * due])
            sent = due
            await asyncio.sleep(self.interval)
        yield ReplyEnd(Finish.COMPLETE, USAGE)


async def echo(app: ChatApp) -> float:
    """Return the seconds from a key to the frame that shows its character."""
    area = app.screen.query_one(Conversation).composer.area
    before = len(area.text)
    began = time.perf_counter()
    app.simulate_key("x")
    while len(area.text) == before:
        await asyncio.sleep(0)
    await drawn(app)
    return time.perf_counter() - began


async def drawn(app: ChatApp) -> None:
    """Wait until the next frame is drawn."""
    done = asyncio.Event()
    app.screen.call_after_refresh(done.set)
    await done.wait()


async def stream(kind: str, tokens: int, rate: int, interval: float) -> None:
    client = ScriptedClient()
    client.replies = FastReplies(client.chats)
    client.replies.kind, client.replies.tokens = kind, tokens
    client.replies.rate, client.replies.interval = rate, interval
    client.engine.loads.set()
    app = ChatApp(client)
    async with app.run_test(size=(120, 40)) as _:
        conversation = app.screen.query_one(Conversation)
        conversation.composer.area.focus()
        conversation.composer.area.write("go")
        app.simulate_key("enter")
        while not (app._exit or (conversation.current_reply and conversation.current_reply.message)):
            await asyncio.sleep(0.01)
        cpu, began, echoes = time.process_time(), time.monotonic(), []
        while conversation.current_reply and not app._exit:
            await asyncio.sleep(0.25)
            echoes.append(1000 * await echo(app))
        spent, passed = time.process_time() - cpu, time.monotonic() - began
        print(f"stream: {tokens:,} tokens of {kind} in {passed:.1f} s, {spent / passed:.2f} of a core")
        print(f"echo: median {statistics.median(echoes):.1f} ms, p99 {percentile(echoes, 99):.1f} ms, n {len(echoes)}")


def percentile(values: list[float], share: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * share // 100)]


async def open_long(messages: int) -> None:
    client = ScriptedClient()
    name = client.keep("Long", *(BLOCKS[place % len(BLOCKS)] for place in range(messages)))
    other = client.keep("Short", "a question", "an answer")
    client.engine.loads.set()
    app = ChatApp(client)
    async with app.run_test(size=(120, 40)) as pilot:
        conversation = app.screen.query_one(Conversation)
        taken, worked = [], []
        for _ in range(5):
            await conversation.open(other)
            await pilot.pause(0.5)
            began, cpu = time.perf_counter(), time.process_time()
            await conversation.open(name)
            await drawn(app)
            taken.append(1000 * (time.perf_counter() - began))
            worked.append(1000 * (time.process_time() - cpu))
            await pilot.pause(0.5)
        words = f"median {statistics.median(taken):.0f} ms, worst {max(taken):.0f}, of CPU {min(worked):.0f}"
        print(f"open: {messages:,} messages, {words}")


def start() -> None:
    taken, worked = [], []
    for _ in range(5):
        began = time.time()
        done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=True)
        ready, cpu = done.stdout.split()
        taken.append(1000 * (float(ready) - began))
        worked.append(1000 * float(cpu))
    print(f"start: median {statistics.median(taken):.0f} ms, best {min(taken):.0f}, of CPU {min(worked):.0f}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tokens", type=int, default=20_000)
    options.add_argument("--messages", type=int, default=2000)
    options.add_argument("--of", nargs="*", choices=KINDS, default=["blocks"], help="what replies are made of")
    options.add_argument("--rate", type=int, default=RATE, help="tokens per second")
    options.add_argument("--interval", type=float, default=0.01, help="seconds between two chunks of a reply")
    chosen = options.parse_args()
    start()
    asyncio.run(open_long(chosen.messages))
    for kind in chosen.of:
        asyncio.run(stream(kind, chosen.tokens, chosen.rate, chosen.interval))


if __name__ == "__main__":
    main()
