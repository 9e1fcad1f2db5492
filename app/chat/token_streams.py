"""The engine's thread seen from an event loop: requests become one asynchronous stream of their token events.

All events of a step cross from the engine's thread to the loop in one call, and a reader takes all that have come for
it at once. Leaving a stream early aborts its requests. Knows ids and events. Refuses to know text.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from engine.core import Engine
from engine.errors import EngineError
from engine.request import PROGRAM, FinishReason, Origin, Request, SamplingParams, TokenEvent
from engine.thread import EngineThread

MOST_AT_ONCE = 32  # events that a reader takes before it is another's turn, where it has fallen behind


class TokenStreams:
    """Every stream of one engine. Made anywhere, used on the loop that `start` ran on."""

    def __init__(self, engine: Engine[Any]) -> None:
        self._engine = engine
        self._thread = EngineThread(engine, self._cross)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[int, TokenStream] = {}  # by request, until its last event is here
        self._stopping = False

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End every request with an event of its own, at once, then the engine's thread, after the step under way."""
        self._stopping = True
        self._route([TokenEvent(request_id, None, finish=FinishReason.ABORT) for request_id in self._running])
        if self._loop is not None:
            await asyncio.to_thread(self._thread.stop)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def open(self) -> "TokenStream":
        """A stream to submit requests to."""
        return TokenStream(self)

    def submit(
        self,
        stream: "TokenStream",
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        end_ids: frozenset[int],
        origin: Origin,
    ) -> Request:
        """Have the engine work on a request whose events `stream` is given."""
        if self._loop is None or self._stopping:
            raise EngineError("The engine is being stopped" if self._stopping else "The engine is not started")

        def register(request: Request) -> None:
            self._running[request.id] = stream

        return self._thread.submit(prompt_ids, params, end_ids, origin, before=register)

    def abort(self, request_id: int) -> None:
        """End a request and forget it, if it still runs."""
        if self._running.pop(request_id, None) is not None:
            self._thread.abort(request_id)

    def problem(self) -> str:
        """Why the engine cannot serve, or empty while it can."""
        return self._thread.problem()

    @property
    def context_length(self) -> int:
        return self._engine.config.context_length

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    @property
    def num_waiting(self) -> int:
        return self._engine.num_waiting

    def _cross(self, events: Sequence[TokenEvent]) -> None:
        """On the engine's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._route, events)

    def _route(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            stream = self._running.get(event.request_id)
            if stream is not None:
                if event.finish is not None:
                    del self._running[event.request_id]
                stream.put(event)


class TokenStream:
    """The events of the requests submitted to it, as they come, up to the last one's with its finish reason.

    The engine does not wait for a slow reader. What that has not taken yet waits here, and is at most one event for
    each token of its requests.
    """

    def __init__(self, streams: TokenStreams) -> None:
        self._streams = streams
        self._running: set[int] = set()  # requests whose last event is not here
        self._arrived: deque[TokenEvent] = deque()
        self._reader: asyncio.Future[None] | None = None

    def submit(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, end_ids: frozenset[int], origin: Origin = PROGRAM
    ) -> Request:
        """Raises PromptTooLong, InvalidSampling, or EngineError when the engine does not run."""
        request = self._streams.submit(self, prompt_ids, params, end_ids, origin)
        self._running.add(request.id)
        return request

    def put(self, event: TokenEvent) -> None:
        self._arrived.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if event.finish is not None:
            self._running.discard(event.request_id)

    def abort(self, request_id: int) -> None:
        """End one of the requests, in any state and any number of times. Events that are here may still be read."""
        self._running.discard(request_id)
        self._streams.abort(request_id)

    def close(self) -> None:
        """End all of them."""
        for request_id in tuple(self._running):
            self.abort(request_id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        """What has come since the last time, in its order; waits while that is nothing."""
        if self._arrived:
            await asyncio.sleep(0)  # whoever has fallen behind takes turns with the others
        elif not self._running:
            raise StopAsyncIteration
        else:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return [self._arrived.popleft() for _ in range(min(MOST_AT_ONCE, len(self._arrived)))]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
