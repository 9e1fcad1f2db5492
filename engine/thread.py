"""The engine's thread: the sole owner of the engine, fed through a queue, heard through one callback a step.

Any thread may submit and abort; the engine itself is touched here alone. A failing step fails its requests; a failing
engine fails all of them and stays dead, and says so to whoever asks for its health. Refuses to know event loops.
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
from engine.request import PROGRAM, FinishReason, Origin, Request, TokenEvent
from engine.sampling_params import SamplingParams

log = logging.getLogger(__name__)

UPKEEP_SECONDS = 0.01  # between two looks at copies that nobody waits for
WEDGED_SECONDS = 10.0  # from then on a turn of the loop counts as stuck, unless a longer one was to be expected
SLOW = 4.0  # times the expected seconds
UNKNOWN_SECONDS = 60.0  # for what nothing is expected of: the first step, copies, or all that comes before a step

Deliver = Callable[[Sequence[TokenEvent]], None]
_Command = Callable[[], "list[TokenEvent]"]


class EngineThread:
    """Runs an engine. `deliver` is called on this thread with all events of a step at once, and must not block."""

    def __init__(self, engine: Engine[Any], deliver: Deliver, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds that only grow."""
        self._engine = engine
        self._deliver = deliver
        self._clock = clock
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._stopping = False
        self._failure = ""
        # When the loop's turn under way began, and when the engine had last got on by then; None while it waits for
        # work. One field, so that another thread never joins the time of one turn with that of another.
        self._turn: tuple[float, float] | None = None
        self._progress = 0  # of the engine when it was last seen to get on
        self._moved_at = 0.0  # when that was, or there was nothing to do
        self._live: set[int] = set()  # requests that were not told their end
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End every request with an event of its own, then the thread; returns when it has ended."""
        self._commands.put(self._stop)
        self._thread.join()

    def submit(
        self,
        prompt_ids: tuple[int, ...],
        several: Sequence[SamplingParams],
        end_ids: frozenset[int],
        origin: Origin = PROGRAM,
        *,
        before: Callable[[Request], None],
    ) -> list[Request]:
        """Hand requests over that continue one prompt, which is read once for all of them; all, or none where it
        raises. A beam search is submitted alone, and its results are the requests. `before` is called for each just
        before it can have events.

        Raises what `Engine.request` raises, and EngineError when the engine does not run.
        """
        if problem := self._fatal_problem():
            raise EngineError(f"The engine does not run: {problem}", "Start it again.")
        first, *others = several
        if first.beams is None:
            requests = [self._engine.request(prompt_ids, params, end_ids, origin) for params in several]
        elif not others:
            requests = self._engine.search(prompt_ids, first, end_ids, origin)
        else:
            raise ValueError("a search is submitted alone")
        for request in requests:
            before(request)
        self._commands.put(lambda: self._add(requests))
        return requests

    def abort(self, request_id: int) -> None:
        """End a request, in any state and any number of times."""
        self._commands.put(lambda: self._abort(request_id))

    def forget(self, token_ids: Sequence[int], origin: Origin = PROGRAM, *, kept: int = 0) -> None:
        """Have the engine forget what it computed of some tokens, but for the first `kept`: see `Engine.forget`."""
        self._commands.put(lambda: self._forget(token_ids, origin, kept))

    def problem(self) -> str:
        """Why the engine cannot serve, or empty while it can. From the step loop's own heartbeat."""
        if death := self._fatal_problem():
            return death
        turn, now = self._turn, self._clock()
        if turn is None:
            return ""
        began, moved_at = turn
        if now - began >= self._turn_limit():
            return f"a step has been running for {now - began:.0f} s"
        waiting = began - moved_at  # by turns that planned nothing
        return f"requests wait, and no step has run for {waiting:.0f} s" if waiting >= UNKNOWN_SECONDS else ""

    def _turn_limit(self) -> float:
        """Seconds of one turn of the loop. Long steps of a large model on a slow machine are no problem."""
        expected = self._engine.expected_seconds
        return UNKNOWN_SECONDS if math.isinf(expected) else max(WEDGED_SECONDS, SLOW * expected)

    def _fatal_problem(self) -> str:
        """Why it will never serve again; a step that only takes long is no reason."""
        return self._failure or ("" if self._thread.is_alive() else "it is stopped")

    # -- on the engine thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                events = self._run_commands()
                events += self._engine.step()
                self._note_progress()
                self._deliver_events(events)
            self._deliver_events(self._engine.abort_all())  # what came in while it stopped
        except BaseException as error:  # whatever ends this thread, nobody may be left waiting for it
            log.exception("the engine failed")
            self._failure = f"{type(error).__name__}: {error}"
            self._fail_all_requests()

    def _deliver_events(self, events: list[TokenEvent]) -> None:
        self._live -= {event.request_id for event in events if event.finish is not None}
        if events:
            self._deliver(events)

    def _fail_all_requests(self) -> None:
        """The life of a dead engine: whoever waits, or was on the way when it died, is told. It is not asked again."""
        while True:
            self._deliver_events(
                [TokenEvent(i, None, finish=FinishReason.ERROR, error=self._failure) for i in self._live]
            )
            if self._stopping:
                return
            with contextlib.suppress(Exception):
                self._commands.get()()

    def _run_commands(self) -> list[TokenEvent]:
        """A turn's beginning: carry out every command there is; wait for one while nobody waits for anything else."""
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

    def _abort(self, request_id: int) -> list[TokenEvent]:
        return self._engine.abort(request_id)

    def _forget(self, token_ids: Sequence[int], origin: Origin, kept: int) -> list[TokenEvent]:
        self._engine.forget(token_ids, origin, kept=kept)
        return []

    def _stop(self) -> list[TokenEvent]:
        self._stopping = True
        return self._engine.abort_all()
