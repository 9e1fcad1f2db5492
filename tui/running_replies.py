"""The replies that are being generated in all chats, each with the task that reads its stream."""

from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import aclosing
from functools import partial
from typing import Protocol

from tui.client import ClientError, Replies
from tui.coalescing import coalesced
from tui.figures import FINISHES
from tui.reply_progress import ReplyProgress
from tui.types import ChatId, Finish, MessageId, ReplyEvent

INTERVAL = 1 / 15  # seconds between two updates of a reply


class Running(Protocol):
    """A task that can be cancelled."""

    def cancel(self) -> object: ...


class RunningReplies:
    """At most one reply for each chat. `on_event` receives each event, or the error that ended the reply."""

    def __init__(
        self,
        replies: Replies,
        run: Callable[[Callable[[], Coroutine[None, None, None]]], Running],
        on_event: Callable[[ReplyProgress, ReplyEvent | ClientError], object],
    ) -> None:
        self._replies = replies
        self._run = run
        self._on_event = on_event
        self._running: dict[ChatId, tuple[ReplyProgress, Running]] = {}
        self._unanswered: defaultdict[ChatId, dict[MessageId, str]] = defaultdict(dict)

    @property
    def chats(self) -> Collection[ChatId]:
        """The chats in which a reply is being generated."""
        return self._running.keys()

    def in_chat(self, chat: ChatId | None) -> ReplyProgress | None:
        """Return the reply that is being generated in this chat, or None."""
        found = None if chat is None else self._running.get(chat)
        return found and found[0]

    def start(self, chat: ChatId, to: MessageId) -> None:
        """Request a reply to the message `to`."""
        self._unanswered[chat].pop(to, None)
        reply = ReplyProgress(chat, to)
        self._running[chat] = reply, self._run(partial(self._stream, reply))

    def fail(self, reply: ReplyProgress, error: ClientError) -> None:
        """End a reply with an error. If the reply has not started, keep the error until it is requested again."""
        reply.finish(Finish.FAILED, error=error.report)
        if reply.message is None:
            self._unanswered[reply.chat][reply.to] = error.report

    def stop(self, reply: ReplyProgress) -> None:
        """End a reply as stopped. If it has not started, the message has no reply, as other windows show it."""
        reply.finish(Finish.STOPPED)
        if reply.message is None:
            self._unanswered[reply.chat][reply.to] = FINISHES[Finish.UNANSWERED]

    def unanswered(self, chat: ChatId) -> Mapping[MessageId, str]:
        """Return the messages whose last requested reply did not start, each with the reason."""
        return self._unanswered[chat]

    def is_running(self, reply: ReplyProgress) -> bool:
        return self.in_chat(reply.chat) is reply

    def remove(self, reply: ReplyProgress) -> None:
        """Remove a reply, and cancel the task that reads its stream."""
        _, stream = self._running.pop(reply.chat)
        stream.cancel()

    async def _stream(self, reply: ReplyProgress) -> None:
        try:
            async with aclosing(coalesced(self._replies.reply(reply.chat, reply.to), INTERVAL)) as events:
                async for event in events:
                    self._on_event(reply, event)
        except ClientError as error:
            self._on_event(reply, error)
