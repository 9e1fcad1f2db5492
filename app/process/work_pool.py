"""A thread pool for work on texts, separate from the default pool that all other work shares.

A limited number of jobs runs at once; the others wait in order. If the caller of a job is cancelled, the job does not
start, or ends at its next check.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar

from app.errors import AppError
from engine.errors import EngineError

STUCK_SECONDS = 30.0  # seconds in which no job starts, ends, or passes a check
_POLL_SECONDS = 0.01  # seconds between two checks of jobs that are ending

T = TypeVar("T")
Check: TypeAlias = Callable[[], None]


class Abandoned(AppError):
    """The caller of a job no longer waits for its result."""


class WorkPool:
    """Runs jobs in its own threads. Use it from one event loop; `problem` can be called from any thread."""

    def __init__(self, name: str, threads: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the threads. `name` describes the jobs in `problem`; `clock` returns monotonic seconds."""
        self._name = name
        self._clock = clock
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._jobs: set[_Job] = set()  # jobs that have not ended
        self._moved_at = clock()
        self._is_closed = False

    async def run(self, work: Callable[[Check], T]) -> T:
        """Return the result of `work`.

        `work` must often call its argument, which raises if the caller was cancelled. Raises the errors of `work`, and
        EngineError after `close`.
        """
        if self._is_closed:
            raise _closed()
        job = _Job(self._move)
        if not self._jobs:
            self._move()
        self._jobs.add(job)
        running = self._executor.submit(job.run, work)
        running.add_done_callback(lambda _: self._jobs.discard(job))
        try:
            return await asyncio.wrap_future(running)
        except Abandoned:
            raise _closed() from None
        except asyncio.CancelledError:
            job.is_abandoned = True
            if self._is_closed and running.cancelled():
                raise _closed() from None
            raise

    def problem(self) -> str:
        """Return why jobs make no progress, or an empty string if they do."""
        silence = self._clock() - self._moved_at
        return f"{self._name}: no progress for {silence:.0f} s" if self._jobs and silence >= STUCK_SECONDS else ""

    async def close(self) -> None:
        """End all jobs: waiting ones at once, running ones at their next check."""
        self._is_closed = True
        for job in tuple(self._jobs):
            job.is_abandoned = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        while self._jobs:
            await asyncio.sleep(_POLL_SECONDS)

    def _move(self) -> None:
        self._moved_at = self._clock()


class _Job:
    """One call of `WorkPool.run`."""

    def __init__(self, move: Callable[[], None]) -> None:
        self.is_abandoned = False
        self._move = move

    def run(self, work: Callable[[Check], T]) -> T:
        self.check()
        try:
            return work(self.check)
        finally:
            self._move()

    def check(self) -> None:
        """Raise Abandoned if the caller was cancelled."""
        self._move()
        if self.is_abandoned:
            raise Abandoned("The client has disconnected")


def _closed() -> EngineError:
    return EngineError("The server is being stopped", "Start it again.")
