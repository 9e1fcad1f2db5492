"""Token streams: connects the engine's thread to an event loop.

Each request has one asynchronous stream of token events. All events of a step are passed to the loop in one call, and a
reader gets all events that are waiting at once. Leaving a stream early aborts its requests.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

from app.generation.latencies import Latencies, ReplyTimer
from engine.core import Engine
from engine.counters import EngineState
from engine.errors import EngineError
from engine.kv.parked_cache import ParkedCache
from engine.request import PROGRAM, FinishReason, Origin, Request, ServiceClass, TokenEvent
from engine.sampling_params import SamplingParams
from engine.thread import EngineThread

MAX_BATCH = 32  # maximum number of events that a slow reader gets before other readers have a turn


@dataclass(frozen=True, slots=True)
class _LiveRequest:
    """A running or waiting request, and the stream that gets its events."""

    request: Request
    stream: "TokenStream"
    timer: ReplyTimer


class TokenStreams:
    """The streams of one engine. Created on any thread, and used on the event loop on which `start` ran."""

    def __init__(self, engine: Engine[Any], clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds that never decrease."""
        self.latencies = Latencies()
        self._engine = engine
        self._clock = clock
        self._thread = EngineThread(engine, self._post_events, clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[int, _LiveRequest] = {}  # requests that have not ended, by request id
        self._stopping = False

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, *, parks: bool = False) -> ParkedCache | None:
        """End every request with an event at once. After the current step, stop the engine's thread, and close the
        engine. If it `parks`, return its KV cache.
        """
        self._stopping = True
        self.end_all()
        return await asyncio.to_thread(partial(self._thread.stop, parks=parks))

    def can_suspend(self, streams: int) -> bool:
        """Whether `streams` streams have requests, all of these run in the background, and a later engine could
        continue them.
        """
        running = self._live.values()
        return len({live.stream for live in running}) == streams and all(
            live.request.origin.service is ServiceClass.BACKGROUND and live.request.can_be_suspended for live in running
        )

    async def suspend(self) -> ParkedCache | None:
        """Stop the engine's thread after the steps under way, close the engine, and return its KV cache.

        The requests stay here, until the streams of a later engine `resume` them, or until `end_all`.
        """
        self._stopping = True
        return await asyncio.to_thread(self._thread.suspend)

    def resume(self, suspended: "TokenStreams") -> None:
        """Continue the requests that other streams suspended. Call this after `start`, before any request exists."""
        self._live, suspended._live = suspended._live, {}
        for live in self._live.values():
            live.stream.move_to(self)
        self._thread.resume(self.requests(), suspended._thread)

    def end_all(self, reason: FinishReason = FinishReason.ABORT, error: str = "") -> None:
        """End all requests with an event for each reader. A running engine continues to compute them."""
        self._route([TokenEvent(request_id, None, finish=reason, error=error) for request_id in self._live])

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def open(self, pause: float = 0.0) -> "TokenStream":
        """Create a stream to submit requests to. Its reader is woken at most once in `pause` seconds."""
        return TokenStream(self, pause)

    def submit(
        self,
        stream: "TokenStream",
        prompt_ids: tuple[int, ...],
        several: Sequence[SamplingParams],
        end_ids: frozenset[int],
        origin: Origin,
        marks: tuple[int, ...] = (),
    ) -> list[Request]:
        """Submit requests whose events go to `stream`: all of them, or none if this raises."""
        if self._loop is None or self._stopping:
            raise EngineError("The engine is shutting down" if self._stopping else "The engine is not started")

        def register(request: Request) -> None:
            timer = self.latencies.timer(origin.service, self._clock())
            self._live[request.id] = _LiveRequest(request, stream, timer)

        return self._thread.submit(prompt_ids, several, end_ids, origin, marks, before=register)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """Abort a request, if it has not ended, without an event."""
        live = self._live.pop(request_id, None)
        if live is not None:
            live.timer.record_end(reason, self._clock())
            self._thread.abort(request_id)

    def end(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request, if it has not ended, with an event for its reader."""
        if request_id in self._live:
            self._route([TokenEvent(request_id, None, finish=reason)])
            self._thread.abort(request_id)

    def requests(self) -> list[Request]:
        """Return the requests that have not ended, oldest first. The engine may still modify the returned objects."""
        return [live.request for live in self._live.values()]

    def now(self) -> float:
        """Return the time in seconds by the clock that also measures arrival times."""
        return self._clock()

    def forget(self, token_ids: Sequence[int], origin: Origin, *, kept: int) -> None:
        """Remove the blocks of these tokens from the KV cache, except those of the first `kept` tokens."""
        self._thread.forget(token_ids, origin, kept=kept)

    def problem(self) -> str:
        """Return the reason why the engine cannot serve, or an empty string if it can."""
        return self._thread.problem()

    @property
    def failure(self) -> str:
        """The error that ended the engine for good; empty if there was none."""
        return self._thread.failure

    @property
    def context_length(self) -> int:
        return self._engine.config.context_length

    @property
    def longest_context(self) -> int:
        """The longest context that the memory would allow for this model, in tokens; 0: unknown."""
        return self._engine.config.longest_context

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent layers, so that marks in a prompt matter (see `Request.marks`)."""
        return self._engine.config.has_states

    @property
    def max_running(self) -> int:
        """Maximum number of requests that run at the same time. Other requests wait."""
        return self._engine.config.max_running

    @property
    def block_bytes(self) -> int:
        """Size of one KV block in bytes; 0: unknown."""
        return sum(group.block_bytes for group in self._engine.config.groups)

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    @property
    def num_waiting(self) -> int:
        return self._engine.num_waiting

    def state(self) -> EngineState:
        """Return the engine's counters and state, without waiting for the engine."""
        return self._engine.state()

    def running_by_class(self) -> Mapping[ServiceClass, int]:
        """Return the number of running requests per service class, without waiting for the engine."""
        requests = [live.request for live in self._live.values()]
        running = Counter(one.origin.service for one in requests if one.has_slot)
        return {service: running[service] for service in ServiceClass}

    def _post_events(self, events: Sequence[TokenEvent]) -> None:
        """Post the events of a step to the event loop. Runs on the engine's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._route, events)

    def _route(self, events: Sequence[TokenEvent]) -> None:
        now = self._clock()
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:
                continue
            # All tokens of a beam search arrive together at its end, so they give no time between tokens.
            if event.token_id is not None and (live.request.params.beams is None or event.finish is not None):
                live.timer.record_token(now)
            if event.finish is not None:
                del self._live[event.request_id]
                live.timer.record_end(event.finish, now)
            live.stream.put(event)


class TokenStream:
    """The events of the requests submitted to it, in order, until the last request has its finish reason.

    The engine does not wait for a slow reader. Unread events are kept here: at most one per token of the requests.
    """

    def __init__(self, streams: TokenStreams, pause: float = 0.0) -> None:
        self._streams = streams
        self._pause = pause
        self._taken_at = -math.inf  # time of the last read, by the loop's clock
        self._running: set[int] = set()  # ids of requests that have not ended
        self._arrived: deque[TokenEvent] = deque()
        self._reader: asyncio.Future[None] | None = None

    def submit(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, end_ids: frozenset[int], origin: Origin = PROGRAM
    ) -> Request:
        """Submit one request. Raises PromptTooLong, InvalidSampling, or EngineError if the engine is not running.

        A beam search returns one result.
        """
        [request] = self.submit_several(prompt_ids, [params], end_ids, origin)
        return request

    def submit_several(
        self,
        prompt_ids: tuple[int, ...],
        several: Sequence[SamplingParams],
        end_ids: frozenset[int],
        origin: Origin = PROGRAM,
        marks: tuple[int, ...] = (),
    ) -> list[Request]:
        """Submit requests that continue one prompt, which is prefilled once, or the results of one beam search.

        Aborting one result ends the whole beam search. Raises what `submit` raises, and then submits nothing.
        """
        requests = self._streams.submit(self, prompt_ids, several, end_ids, origin, marks)
        self._running.update(request.id for request in requests)
        return requests

    def move_to(self, streams: TokenStreams) -> None:
        """Continue with the streams of another engine, which sends further events."""
        self._streams = streams

    def put(self, event: TokenEvent) -> None:
        self._arrived.append(event)
        if event.finish is not None:
            self._running.discard(event.request_id)
        if self._reader is None:
            return
        loop, due = self._reader.get_loop(), self._taken_at + self._pause
        if due <= loop.time() or not self._running:  # the pause does not delay the last event
            _wake(self._reader)
        elif len(self._arrived) == 1:
            loop.call_at(due, _wake, self._reader)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """Abort one of the requests, in any state and any number of times. Its pending events may still be read.

        `reason` is recorded as its finish reason, if it has none yet.
        """
        self._running.discard(request_id)
        self._streams.abort(request_id, reason)

    def close(self) -> None:
        """Abort all requests that have not ended."""
        for request_id in tuple(self._running):
            self.abort(request_id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        """Return the events since the last call, in order. Waits for at least one."""
        if self._arrived:
            await asyncio.sleep(0)  # lets other readers have a turn
        elif not self._running:
            raise StopAsyncIteration
        else:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
            self._taken_at = self._reader.get_loop().time()
        return [self._arrived.popleft() for _ in range(min(MAX_BATCH, len(self._arrived)))]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class SuspendedReplies:
    """See `app.models.residency.resident.Suspended`."""

    streams: TokenStreams

    @property
    def is_empty(self) -> bool:
        return not self.streams.requests()

    def end(self, problem: str) -> None:
        self.streams.end_all(FinishReason.ERROR, problem)


def _wake(reader: asyncio.Future[None]) -> None:
    if not reader.done():
        reader.set_result(None)
