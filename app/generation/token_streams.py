"""The engine's thread seen from an event loop: requests become one asynchronous stream of their token events.

All events of a step cross from the engine's thread to the loop in one call, and a reader takes all that have come for
it at once. Leaving a stream early aborts its requests. Knows ids, events and when they came. Refuses to know text.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from app.generation.latencies import Latencies, ReplyTimer
from engine.core import Engine
from engine.counters import EngineState
from engine.errors import EngineError
from engine.request import PROGRAM, FinishReason, Origin, Request, ServiceClass, TokenEvent
from engine.sampling_params import SamplingParams
from engine.thread import EngineThread

MAX_BATCH = 32  # events that a reader takes before it is another's turn, where it has fallen behind


@dataclass(frozen=True, slots=True)
class _LiveRequest:
    """A request whose last event is not here."""

    request: Request
    stream: "TokenStream"
    timer: ReplyTimer


class TokenStreams:
    """Every stream of one engine. Made anywhere, used on the loop that `start` ran on."""

    def __init__(self, engine: Engine[Any], clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds that only grow."""
        self.latencies = Latencies()
        self._engine = engine
        self._clock = clock
        self._thread = EngineThread(engine, self._post_events, clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[int, _LiveRequest] = {}  # by request
        self._stopping = False

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End every request with an event of its own, at once, then the engine's thread, after the step under way."""
        self._stopping = True
        self._route([TokenEvent(request_id, None, finish=FinishReason.ABORT) for request_id in self._live])
        if self._loop is not None:
            await asyncio.to_thread(self._thread.stop)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def open(self, pause: float = 0.0) -> "TokenStream":
        """A stream to submit requests to, whose reader wants to be woken once in `pause` seconds at most."""
        return TokenStream(self, pause)

    def submit(
        self,
        stream: "TokenStream",
        prompt_ids: tuple[int, ...],
        several: Sequence[SamplingParams],
        end_ids: frozenset[int],
        origin: Origin,
    ) -> list[Request]:
        """Have the engine work on requests whose events `stream` is given; on all of them, or none where it raises."""
        if self._loop is None or self._stopping:
            raise EngineError("The engine is being stopped" if self._stopping else "The engine is not started")

        def register(request: Request) -> None:
            timer = self.latencies.timer(origin.service, self._clock())
            self._live[request.id] = _LiveRequest(request, stream, timer)

        return self._thread.submit(prompt_ids, several, end_ids, origin, before=register)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request and forget it, if it still runs."""
        live = self._live.pop(request_id, None)
        if live is not None:
            live.timer.record_end(reason, self._clock())
            self._thread.abort(request_id)

    def end(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request with an event of its own, if it still runs: whoever waits for it is told."""
        if request_id in self._live:
            self._route([TokenEvent(request_id, None, finish=reason)])
            self._thread.abort(request_id)

    def requests(self) -> list[Request]:
        """Those that have not ended, the oldest first. The engine goes on writing them."""
        return [live.request for live in self._live.values()]

    def now(self) -> float:
        """The moment, by the clock that tells when requests arrived."""
        return self._clock()

    def forget(self, token_ids: Sequence[int], origin: Origin, *, kept: int) -> None:
        """Have the engine forget what it computed of some tokens, but for the first `kept` of them."""
        self._thread.forget(token_ids, origin, kept=kept)

    def problem(self) -> str:
        """Why the engine cannot serve, or empty while it can."""
        return self._thread.problem()

    @property
    def context_length(self) -> int:
        return self._engine.config.context_length

    @property
    def longest_context(self) -> int:
        """The most that the context length could be with this model and this memory; 0: not known."""
        return self._engine.config.longest_context

    @property
    def max_running(self) -> int:
        """Requests that run at the same time at most; others wait."""
        return self._engine.config.max_running

    @property
    def block_bytes(self) -> int:
        """That one block of keys and values takes; 0: nobody knows."""
        return self._engine.config.block_bytes

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
        """What the engine has done and holds. Does not wait for it."""
        return self._engine.state()

    def running_by_class(self) -> Mapping[ServiceClass, int]:
        """The requests of each class that run. Does not wait for the engine."""
        requests = [live.request for live in self._live.values()]
        running = Counter(one.origin.service for one in requests if one.has_slot)
        return {service: running[service] for service in ServiceClass}

    def _post_events(self, events: Sequence[TokenEvent]) -> None:
        """On the engine's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._route, events)

    def _route(self, events: Sequence[TokenEvent]) -> None:
        now = self._clock()
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:
                continue
            # All tokens of a search come at once, at its end: they say nothing of the time between tokens.
            if event.token_id is not None and (live.request.params.beams is None or event.finish is not None):
                live.timer.record_token(now)
            if event.finish is not None:
                del self._live[event.request_id]
                live.timer.record_end(event.finish, now)
            live.stream.put(event)


class TokenStream:
    """The events of the requests submitted to it, as they come, up to the last one's with its finish reason.

    The engine does not wait for a slow reader. What that has not taken yet waits here, and is at most one event for
    each token of its requests.
    """

    def __init__(self, streams: TokenStreams, pause: float = 0.0) -> None:
        self._streams = streams
        self._pause = pause
        self._taken_at = -math.inf  # by the loop's clock
        self._running: set[int] = set()  # requests whose last event is not here
        self._arrived: deque[TokenEvent] = deque()
        self._reader: asyncio.Future[None] | None = None

    def submit(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, end_ids: frozenset[int], origin: Origin = PROGRAM
    ) -> Request:
        """Raises PromptTooLong, InvalidSampling, or EngineError when the engine does not run. A beam search has one
        result here."""
        [request] = self.submit_several(prompt_ids, [params], end_ids, origin)
        return request

    def submit_several(
        self,
        prompt_ids: tuple[int, ...],
        several: Sequence[SamplingParams],
        end_ids: frozenset[int],
        origin: Origin = PROGRAM,
    ) -> list[Request]:
        """Requests that continue one prompt, which is read once for all of them; or the results of one beam search,
        which end together where one is aborted. Raises what `submit` raises, and then there is none of them."""
        requests = self._streams.submit(self, prompt_ids, several, end_ids, origin)
        self._running.update(request.id for request in requests)
        return requests

    def put(self, event: TokenEvent) -> None:
        self._arrived.append(event)
        if event.finish is not None:
            self._running.discard(event.request_id)
        if self._reader is None:
            return
        loop, due = self._reader.get_loop(), self._taken_at + self._pause
        if due <= loop.time() or not self._running:  # the end does not wait
            _wake(self._reader)
        elif len(self._arrived) == 1:
            loop.call_at(due, _wake, self._reader)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End one of the requests, in any state and any number of times. Events that are here may still be read.

        `reason` is what its end counts as, if it has none yet.
        """
        self._running.discard(request_id)
        self._streams.abort(request_id, reason)

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
            self._taken_at = self._reader.get_loop().time()
        return [self._arrived.popleft() for _ in range(min(MAX_BATCH, len(self._arrived)))]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _wake(reader: asyncio.Future[None]) -> None:
    if not reader.done():
        reader.set_result(None)
