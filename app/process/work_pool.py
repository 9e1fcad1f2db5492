"""A pool of threads for work on texts, apart from the default pool that everything else shares.

Few jobs run at once; the others wait in order. A job whose caller is gone never begins, or ends at its next check.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar

from app.errors import AppError
from engine.errors import EngineError

STUCK_SECONDS = 30.0  # without a job that begins, ends, or passes a check
_POLL_SECONDS = 0.01  # seconds between two looks at jobs that are about to end

T = TypeVar("T")
Check: TypeAlias = Callable[[], None]


class Abandoned(AppError):
    """Nobody waits for the result of a job any more."""


class WorkPool:
    """Runs jobs on threads of its own. Used on one event loop; `problem` may be called from any thread."""

    def __init__(self, name: str, threads: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`name` says in `problem` what the jobs do; `clock` tells seconds that only grow."""
        self._name = name
        self._clock = clock
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._jobs: set[_Job] = set()  # that have not ended
        self._moved_at = clock()
        self._is_closed = False

    async def run(self, work: Callable[[Check], T]) -> T:
        """Return the result of `work`, which calls its argument often: that raises when the caller has been cancelled.

        Raises what `work` raises, and EngineError after `close`.
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
        """Why jobs wait in vain, or an empty string while the pool works."""
        silence = self._clock() - self._moved_at
        return f"{self._name}: no progress for {silence:.0f} s" if self._jobs and silence >= STUCK_SECONDS else ""

    async def close(self) -> None:
        """End every job: those that wait at once, the others at their next check."""
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
        """Raise Abandoned if nobody waits for the result."""
        self._move()
        if self.is_abandoned:
            raise Abandoned("The client is gone")


def _closed() -> EngineError:
    return EngineError("The server is being stopped", "Start it again.")
