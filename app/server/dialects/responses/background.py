"""Background responses: generated even without a connected client, then retrieved, streamed, or canceled."""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence

from app.server.dialects.responses.events import Event
from app.server.dialects.responses.input_items import InputItem
from app.server.dialects.responses.replies import ResponseReply
from app.server.dialects.responses.response import Response
from app.server.http.errors import InvalidRequest

MAX_RUNNING = 64
MAX_FOLLOWED = 16  # ended responses whose events are kept
FROM_START = -1  # sequence number that starts a stream at the first event


class EventLog:
    """The events of one response. Any number of clients can follow it, each from any event."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._ended = False
        self._changed = asyncio.Event()

    def add(self, events: Sequence[Event]) -> None:
        self._events += events
        self._notify()

    def end(self) -> None:
        self._ended = True
        self._notify()

    async def follow(self, number: int) -> AsyncGenerator[list[Event]]:
        """Yield the events after a sequence number in batches, until the response ends."""
        num_sent = number + 1
        while True:
            changed = self._changed
            if fresh := self._events[num_sent:]:
                num_sent += len(fresh)
                yield fresh
            elif self._ended:
                return
            else:
                await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class BackgroundReplies:
    """Running background responses, by owner and id. Each is stored when it ends."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], tuple[ResponseReply, asyncio.Task[None]]] = {}
        self._logs: OrderedDict[tuple[str, str], EventLog] = OrderedDict()

    def start(self, owner: str, reply: ResponseReply, earlier: Sequence[InputItem]) -> EventLog:
        """Start a response. It is queued. Raises InvalidRequest if too many are running."""
        if len(self._running) >= MAX_RUNNING:
            problem = f"{MAX_RUNNING} background responses are running"
            raise InvalidRequest(problem, "Wait until one of them ends.", parameter="background", status=429)
        key = (owner, reply.writer.response.id)
        log = self._logs[key] = EventLog()
        log.add([*reply.writer.queue()])
        task = asyncio.create_task(reply.run(earlier, log.add))
        self._running[key] = (reply, task)
        task.add_done_callback(lambda _: self._on_end(key))
        return log

    def find(self, owner: str, response_id: str) -> Response | None:
        """Return the current state of a running response, or None."""
        found = self._running.get((owner, response_id))
        return None if found is None else found[0].writer.response

    def log(self, owner: str, response_id: str) -> EventLog | None:
        """Return the events of a running or recently ended response, or None."""
        return self._logs.get((owner, response_id))

    async def cancel(self, owner: str, response_id: str) -> Response | None:
        """Cancel a running response and return it, or return None."""
        found = self._running.get((owner, response_id))
        if found is None:
            return None
        reply, task = found
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return reply.writer.response

    def forget(self, owner: str, response_id: str) -> None:
        self._logs.pop((owner, response_id), None)

    def _on_end(self, key: tuple[str, str]) -> None:
        del self._running[key]
        if log := self._logs.get(key):
            log.end()
        ended = [one for one in self._logs if one not in self._running]
        for one in ended[: max(0, len(ended) - MAX_FOLLOWED)]:
            del self._logs[one]
