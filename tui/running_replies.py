"""The replies that are being written, in whichever chats. Their streams run here. Knows no widget."""

from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from functools import partial
from typing import Protocol

from tui.client import ClientError, Replies
from tui.coalescing import coalesced
from tui.reply_progress import ReplyProgress
from tui.types import ChatId, Finish, MessageId, ReplyEvent

INTERVAL = 1 / 15  # seconds between updates of a reply


class Running(Protocol):
    """Work that can be ended."""

    def cancel(self) -> object: ...


class RunningReplies:
    """At most one of each chat. `came` is called with each event, or the error that ended it."""

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

    def in_chat(self, chat: ChatId | None) -> ReplyProgress | None:
        """The reply that is written in this chat."""
        found = None if chat is None else self._running.get(chat)
        return found and found[0]

    def start(self, chat: ChatId, to: MessageId) -> None:
        """Ask for a reply to the message `to`."""
        self._unanswered[chat].pop(to, None)
        reply = ReplyProgress(chat, to)
        self._running[chat] = reply, self._run(partial(self._stream, reply))

    def fail(self, reply: ReplyProgress, error: ClientError) -> None:
        """It ends; where it has not begun, that is known until it is asked for again."""
        reply.finish(Finish.FAILED, error=error.sentences)
        if reply.message is None:
            self._unanswered[reply.chat][reply.to] = error.sentences

    def unanswered(self, chat: ChatId) -> Mapping[MessageId, str]:
        """The messages to which no reply began when it was asked for last, and why."""
        return self._unanswered[chat]

    def is_running(self, reply: ReplyProgress) -> bool:
        return self.in_chat(reply.chat) is reply

    def remove(self, reply: ReplyProgress) -> None:
        """Nothing more of it is wanted: what is still running of its stream is closed."""
        _, stream = self._running.pop(reply.chat)
        stream.cancel()

    async def _stream(self, reply: ReplyProgress) -> None:
        try:
            async with aclosing(coalesced(self._replies.reply(reply.chat, reply.to), INTERVAL)) as events:
                async for event in events:
                    self._on_event(reply, event)
        except ClientError as error:
            self._on_event(reply, error)
