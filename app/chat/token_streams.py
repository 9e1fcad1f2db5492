"""The engine's thread seen from an event loop: a request becomes an asynchronous stream of its token events.

All events of a step cross from the engine's thread to the loop in one call. Leaving a stream early aborts its request.
Knows ids and events. Refuses to know text.
"""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from engine.core import Engine
from engine.errors import EngineError
from engine.request import FinishReason, Request, SamplingParams, TokenEvent
from engine.thread import EngineThread


class TokenStreams:
    """Every stream of one engine. Made anywhere, used on the loop that `start` ran on."""

    def __init__(self, engine: Engine[Any]) -> None:
        self._engine = engine
        self._thread = EngineThread(engine, self._cross)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[int, TokenStream] = {}
        self._stopping = False

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End every stream with an event of its own, at once, then the engine's thread, after the step under way."""
        self._stopping = True
        for stream in self._open.values():
            stream.put(TokenEvent(stream.request.id, None, finish=FinishReason.ABORT))
        if self._loop is not None:
            await asyncio.to_thread(self._thread.stop)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def generate(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, end_ids: frozenset[int], cache_salt: str = ""
    ) -> "TokenStream":
        """Submit a request. Raises PromptTooLong, InvalidSampling, or EngineError when the engine does not run."""
        if self._loop is None or self._stopping:
            raise EngineError("The engine is being stopped" if self._stopping else "The engine is not started")
        request = self._thread.submit(prompt_ids, params, end_ids, cache_salt, before=self._register)
        return self._open[request.id]

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

    def _register(self, request: Request) -> None:
        self._open[request.id] = TokenStream(self, request)

    def _cross(self, events: Sequence[TokenEvent]) -> None:
        """On the engine's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._route, events)

    def _route(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            stream = self._open.get(event.request_id)
            if stream is not None:
                stream.put(event)

    def close(self, request_id: int) -> None:
        """Forget a stream, and abort its request if it still runs."""
        if self._open.pop(request_id, None) is not None:
            self._thread.abort(request_id)


class TokenStream:
    """The events of one request, as they come, up to the one with its finish reason."""

    def __init__(self, streams: TokenStreams, request: Request) -> None:
        self.request = request
        self._streams = streams
        self._events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._ended = False

    def put(self, event: TokenEvent) -> None:
        self._events.put_nowait(event)

    def close(self) -> None:
        """End the request, in any state and any number of times."""
        self._ended = True
        self._streams.close(self.request.id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._ended:
            raise StopAsyncIteration
        event = await self._events.get()
        if event.finish is not None:
            self.close()
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
