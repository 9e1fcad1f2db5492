"""Stops replies: gently at first, so that the engine still reports the usage, and at once if that takes too long."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial

from tui.client import ClientError, Replies
from tui.reply_progress import ReplyProgress
from tui.running_replies import RunningReplies
from tui.types import MessageId

_PATIENCE = 1.0  # seconds that a stopped reply has to end by itself


class ReplyStopper:
    """Stops running replies.

    `run` runs a coroutine function in the background. `ended` is called with a reply that was ended at once, and
    `failed` with the error of an engine that could not stop one.
    """

    def __init__(
        self,
        replies: Replies,
        running: RunningReplies,
        run: Callable[[Callable[[], Coroutine[None, None, None]]], object],
        ended: Callable[[ReplyProgress], Awaitable[None]],
        failed: Callable[[ClientError], None],
    ) -> None:
        self._replies = replies
        self._running = running
        self._run = run
        self._ended = ended
        self._failed = failed

    async def stop(self, reply: ReplyProgress) -> None:
        """Stop a reply: gently at first, at once if it has not started or is already stopping."""
        message = reply.message
        if message is None or reply.stopping:
            await self._end_now(reply)
        else:
            reply.stopping = True
            self._run(partial(self._stop_gently, reply, message.id))

    async def stop_all(self) -> None:
        """Stop the replies of all chats."""
        for chat in list(self._running.chats):
            if (reply := self._running.in_chat(chat)) is not None:
                await self.stop(reply)

    async def _stop_gently(self, reply: ReplyProgress, message: MessageId) -> None:
        try:
            await self._replies.stop(message)
        except ClientError as error:
            self._failed(error)
        await asyncio.sleep(_PATIENCE)
        await self._end_now(reply)

    async def _end_now(self, reply: ReplyProgress) -> None:
        if self._running.is_running(reply):
            self._running.stop(reply)
            await self._ended(reply)
