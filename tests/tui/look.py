"""Runs the chat with a scripted client, to look at the screens: `python -m tests.tui.look [dark|light|ansi]`."""

import asyncio
import random
import sys
from collections.abc import AsyncGenerator

from tests.tui.scripted_client import HERE, USAGE, ScriptedClient, ScriptedReplies
from tui.app import ChatApp
from tui.types import (
    ChatId,
    Finish,
    MessageId,
    PromptProgress,
    ReasoningDelta,
    ReplyEnd,
    ReplyEvent,
    ReplyStarted,
    TextDelta,
)

THEMES = {"dark": "hearth-dark", "light": "hearth-light", "ansi": "ansi-dark"}
THOUGHTS = "The person asks for Markdown. A bit of everything, then."
REPLY = """\
# A heading

A paragraph with **bold**, *italic*, `code` and a [link](https://example.org/a?b=c). It is long enough to be wrapped in
a narrow terminal, and in a wide one too.

| Tier | Tokens | Time |
|------|-------:|-----:|
| device | 1,188 | 0 ms |
| disk | 16 | 3 ms |

```python
def greet(name: str) -> str:
    return f"Hello, {name}"
```

1. One
2. Two
   - nested

> A quotation.
"""


class SlowReplies(ScriptedReplies):
    """Streams replies at 50 tokens per second."""

    async def reply(self, chat: ChatId, to: MessageId) -> AsyncGenerator[ReplyEvent, None]:
        name = MessageId(f"message-{self.chats.name()}")
        for done in range(0, 5001, 1000):
            yield PromptProgress(done, 5000, 512)
            await asyncio.sleep(0.1)
        yield ReplyStarted(name, HERE.name)
        for word in THOUGHTS.split(" "):
            yield ReasoningDelta(f"{word} ")
            await asyncio.sleep(0.05)
        for word in REPLY.split(" "):
            if name in self.stopped:
                yield ReplyEnd(Finish.STOPPED, USAGE)
                return
            yield TextDelta(f"{word} ")
            await asyncio.sleep(0.02)
        yield ReplyEnd(Finish.COMPLETE, USAGE)


def main() -> None:
    client = ScriptedClient()
    client.replies = SlowReplies(client.chats)
    client.keep("A talk about hearths", "What is an inglenook?", REPLY * 2, pinned=True)
    many = [f"Message {number} " + "word " * random.randrange(100) for number in range(2000)]
    client.keep("Two thousand messages", *many)
    client.engine.loads.set()
    ChatApp(client, theme=THEMES[sys.argv[1] if len(sys.argv) > 1 else "dark"]).run()


if __name__ == "__main__":
    main()
