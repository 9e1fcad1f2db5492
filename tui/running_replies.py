"""The replies that are being written, in whichever chats. Their streams run here. Knows no widget."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from tui.client import ClientError, Replies
from tui.coalescing import coalesced
from tui.nouns import ChatId, MessageId, ReplyEvent
from tui.replying import Replying

INTERVAL = 1 / 15  # seconds between updates of a reply


class RunningReplies:
    """At most one of each chat. `came` is called with each event, or with the error that ended a stream."""

    def __init__(self, replies: Replies, came: Callable[[Replying, ReplyEvent | ClientError], object]) -> None:
        self._replies = replies
        self._came = came
        self._running: dict[ChatId, tuple[Replying, asyncio.Task[None]]] = {}

    def of(self, chat: ChatId | None) -> Replying | None:
        """The reply that is written in this chat."""
        found = None if chat is None else self._running.get(chat)
        return found and found[0]

    def start(self, chat: ChatId, to: MessageId, model: str) -> None:
        """Ask for a reply to the message `to`."""
        replying = Replying(chat, to, model)
        self._running[chat] = replying, asyncio.create_task(self._stream(replying))

    def runs(self, replying: Replying) -> bool:
        return self.of(replying.chat) is replying

    def end(self, replying: Replying) -> None:
        """Nothing more of it is wanted: what is still running of its stream is closed."""
        _, task = self._running.pop(replying.chat)
        task.cancel()

    async def close(self) -> None:
        """Close all streams."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, replying: Replying) -> None:
        try:
            async with aclosing(coalesced(self._replies.reply(replying.chat, replying.to), INTERVAL)) as events:
                async for event in events:
                    self._came(replying, event)
        except ClientError as error:
            self._came(replying, error)
