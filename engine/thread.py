"""EngineThread: the thread that owns the engine, with a queue of commands and one callback per step.

Any thread may submit and abort requests, but only this thread uses the engine. A failing step ends its requests. If the
engine itself fails, all requests end, no new ones are accepted, and `problem` returns the reason.
"""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.core import Engine
from engine.errors import EngineError
from engine.kv.parked_cache import ParkedCache
from engine.request import PROGRAM, FinishReason, Origin, Request, TokenEvent
from engine.sampling_params import SamplingParams

log = logging.getLogger(__name__)

UPKEEP_SECONDS = 0.01  # seconds between two checks of background copies, while there are no requests
WEDGED_SECONDS = 10.0  # seconds after which an iteration counts as stuck, unless it was expected to take longer
SLOW = 4.0  # multiple of the expected seconds after which an iteration counts as stuck
# limit in seconds if there is no estimate: for the first step, for copies, and until a step starts
UNKNOWN_SECONDS = 60.0

Deliver = Callable[[Sequence[TokenEvent]], None]
_Command = Callable[[], "list[TokenEvent]"]


class EngineThread:
    """Runs an engine. The thread calls `deliver` with all events of a step at once; the callback must not block."""

    def __init__(self, engine: Engine[Any], deliver: Deliver, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the thread without starting it. `clock` returns monotonic seconds."""
        self._engine = engine
        self._deliver = deliver
        self._clock = clock
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._stopping = False
        self._failure = ""
        self._parks = False
        self._parked: ParkedCache | None = None
        # Start of the current iteration, and time of the last progress before it; None while the thread waits for work.
        # A single attribute, so that another thread never combines the times of two iterations.
        self._turn: tuple[float, float] | None = None
        self._progress = 0  # progress of the engine at the last check
        self._moved_at = 0.0  # time of the last progress, or of the last idle moment
        self._live: set[int] = set()  # ids of requests whose end has not been delivered yet
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, parks: bool = False) -> ParkedCache | None:
        """End every request with an event, stop the thread, and close the engine. If it `parks`, return its cache."""
        if self._thread.is_alive():
            return self._end(self._stop, parks=parks)
        self._engine.close()
        return None

    def suspend(self) -> ParkedCache | None:
        """Stop the thread, close the engine, and return its cache. The requests end without an event, so that another
        thread can `resume` them.

        All of them must be able to be suspended. If the engine fails meanwhile, they end with an event.
        """
        return self._end(self._suspend, parks=True)

    def _end(self, last: _Command, *, parks: bool) -> ParkedCache | None:
        """Run the last command, and wait for the end of the thread."""
        self._parks = parks
        self._commands.put(last)
        self._thread.join()
        parked, self._parked = self._parked, None
        return parked

    def resume(self, requests: Sequence[Request], earlier: "EngineThread") -> None:
        """Continue requests that an earlier thread suspended. Call this before any other request is submitted."""
        self._engine.continue_ids(earlier._engine)
        self._commands.put(lambda: self._resume(requests))

    def submit(
        self,
        prompt_ids: tuple[int, ...],
        several: Sequence[SamplingParams],
        end_ids: frozenset[int],
        origin: Origin = PROGRAM,
        marks: tuple[int, ...] = (),
        *,
        before: Callable[[Request], None],
    ) -> list[Request]:
        """Submit requests with the same prompt, which is prefilled once. If any of them is invalid, none is submitted.

        A beam search is submitted alone, and the returned requests are its results. `before` is called for each request
        before its first event. Raises the errors of `Engine.request`, and EngineError if the engine has stopped or
        failed.
        """
        if problem := self._fatal_problem():
            raise EngineError(f"The engine is not running: {problem}", "Start it again.")
        first, *others = several
        if first.beams is None:
            requests = [self._engine.request(prompt_ids, params, end_ids, origin, marks) for params in several]
        elif not others:
            requests = self._engine.search(prompt_ids, first, end_ids, origin, marks)
        else:
            raise ValueError("a beam search must be submitted alone")
        for request in requests:
            before(request)
        self._commands.put(lambda: self._add(requests))
        return requests

    def abort(self, request_id: int) -> None:
        """End a request in any state. Repeated calls have no effect."""
        self._commands.put(lambda: self._abort(request_id))

    def forget(self, token_ids: Sequence[int], origin: Origin = PROGRAM, *, kept: int = 0) -> None:
        """Make the cached blocks of these tokens unfindable, except for the first `kept` tokens: see
        `Engine.forget`.
        """
        self._commands.put(lambda: self._forget(token_ids, origin, kept))

    def problem(self) -> str:
        """Return why the engine cannot serve, or an empty string. The answer follows from the step loop's last
        activity.
        """
        if death := self._fatal_problem():
            return death
        turn, now = self._turn, self._clock()
        if turn is None:
            return ""
        began, moved_at = turn
        if now - began >= self._turn_limit():
            return f"a step has been running for {now - began:.0f} s"
        waiting = began - moved_at  # includes iterations that planned no step
        return f"requests are waiting, but no step has run for {waiting:.0f} s" if waiting >= UNKNOWN_SECONDS else ""

    @property
    def failure(self) -> str:
        """The error that ended the engine for good; empty if there was none. The process must start again."""
        return self._failure

    def _turn_limit(self) -> float:
        """Return the maximum seconds of one iteration. The limit is higher for steps that are expected to take long."""
        expected = self._engine.expected_seconds
        return UNKNOWN_SECONDS if math.isinf(expected) else max(WEDGED_SECONDS, SLOW * expected)

    def _fatal_problem(self) -> str:
        """Return why the engine can never serve again; empty if it can. A slow step is not such a reason."""
        return self._failure or ("" if self._thread.is_alive() else "it is stopped")

    # -- on the engine thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                events = self._run_commands()
                events += self._engine.step()
                self._note_progress()
                self._deliver_events(events)
            self._deliver_events(self._engine.abort_all())  # ends requests submitted while the thread was stopping
        except BaseException as error:  # catches everything, because no error may leave a caller waiting
            log.exception("the engine failed")
            self._failure = error.message if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            self._fail_all_requests()
        try:
            self._parked = self._engine.park() if self._parks and not self._failure else None
        except (MemoryError, RuntimeError) as error:
            log.warning("the KV cache is dropped, because it could not be kept: %s", error)
        self._engine.close()
        self._deliver = _ignore  # the callback usually belongs to the owner of this object: a reference cycle

    def _deliver_events(self, events: list[TokenEvent]) -> None:
        self._live -= {event.request_id for event in events if event.finish is not None}
        if events:
            self._deliver(events)

    def _fail_all_requests(self) -> None:
        """Replace the step loop after a failure: end all known requests, and every request that is submitted later."""
        while True:
            self._deliver_events(
                [TokenEvent(i, None, finish=FinishReason.ERROR, error=self._failure) for i in self._live]
            )
            if self._stopping:
                return
            with contextlib.suppress(Exception):
                self._commands.get()()

    def _run_commands(self) -> list[TokenEvent]:
        """Run all queued commands, and return their events. If no request is active, wait for a command."""
        events: list[TokenEvent] = []
        if self._engine.has_requests:
            self._turn = (self._clock(), self._moved_at)
        else:
            self._turn = None
            patience = UPKEEP_SECONDS if self._engine.has_work else None
            try:
                command = self._commands.get(timeout=patience)
            except queue.Empty:
                return events
            self._moved_at = self._clock()
            self._turn = (self._moved_at, self._moved_at)
            events += command()
        while not self._commands.empty():
            events += self._commands.get()()
        return events

    def _note_progress(self) -> None:
        if self._engine.progress != self._progress:
            self._progress, self._moved_at = self._engine.progress, self._clock()

    def _add(self, requests: Sequence[Request]) -> list[TokenEvent]:
        self._live.update(request.id for request in requests)
        self._engine.add(*requests)
        return []

    def _resume(self, requests: Sequence[Request]) -> list[TokenEvent]:
        self._live.update(request.id for request in requests)
        return self._engine.resume(requests)

    def _abort(self, request_id: int) -> list[TokenEvent]:
        return self._engine.abort(request_id)

    def _forget(self, token_ids: Sequence[int], origin: Origin, kept: int) -> list[TokenEvent]:
        self._engine.forget(token_ids, origin, kept=kept)
        return []

    def _suspend(self) -> list[TokenEvent]:
        self._stopping = True
        events, requests = self._engine.suspend()
        self._live -= {request.id for request in requests}
        return events

    def _stop(self) -> list[TokenEvent]:
        self._stopping = True
        return self._engine.abort_all()


def _ignore(events: Sequence[TokenEvent]) -> None:
    """Drop events: every request has had its last one."""
