"""The thread pool for work on texts: the order of jobs, cancelled jobs, and detection of stuck jobs."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from app.process.work_pool import STUCK_SECONDS, Abandoned, Check, WorkPool
from engine.errors import EngineError
from tests.app.server.live_server import Clock
from tests.support.processes import HANGING_SECONDS, until


class Held:
    """A job that calls its check once per step that the test releases, and ends on request."""

    def __init__(self) -> None:
        self.has_started = threading.Event()
        self.steps = threading.Semaphore(0)
        self.checks = 0
        self.ends = False
        self.raised: BaseException | None = None

    def __call__(self, check: Check) -> str:
        self.has_started.set()
        while not self.ends:
            assert self.steps.acquire(timeout=HANGING_SECONDS)
            try:
                check()
            except BaseException as error:
                self.raised = error
                raise
            self.checks += 1
        return "done"

    def end(self) -> None:
        self.ends = True
        self.steps.release()


def test_job_runs_on_a_thread_of_the_pool() -> None:
    async def main() -> str:
        return await WorkPool("texts", 1).run(lambda _: threading.current_thread().name)

    assert asyncio.run(main()).startswith("texts")


def test_error_of_a_job_is_raised() -> None:
    def fail(check: Check) -> None:
        raise LookupError("inside")

    with pytest.raises(LookupError, match="inside"):
        asyncio.run(WorkPool("texts", 1).run(fail))


def test_running_job_of_a_cancelled_caller_ends_at_its_next_check() -> None:
    async def main() -> None:
        pool, held = WorkPool("texts", 1), Held()
        running = asyncio.create_task(pool.run(held))
        await asyncio.to_thread(held.has_started.wait, HANGING_SECONDS)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        held.steps.release()
        assert await pool.run(lambda _: "next") == "next"  # runs only if the pool's single thread is free again
        assert isinstance(held.raised, Abandoned)

    asyncio.run(main())


def test_waiting_job_of_a_cancelled_caller_never_starts() -> None:
    async def main() -> None:
        pool, held, other = WorkPool("texts", 1), Held(), Held()
        running, waiting = asyncio.create_task(pool.run(held)), asyncio.create_task(pool.run(other))
        await asyncio.to_thread(held.has_started.wait, HANGING_SECONDS)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        held.end()
        assert await running == "done"
        assert await pool.run(lambda _: "next") == "next"
        assert not other.has_started.is_set()

    asyncio.run(main())


def test_stuck_jobs_are_a_problem_until_they_make_progress() -> None:
    async def main() -> list[str]:
        clock = Clock()
        pool, held = WorkPool("encoding texts", 1, clock), Held()
        problems = [pool.problem()]
        clock.seconds += 10 * STUCK_SECONDS  # time in which the pool is idle does not count as stuck
        running, waiting = asyncio.create_task(pool.run(held)), asyncio.create_task(pool.run(lambda _: "next"))
        await asyncio.to_thread(held.has_started.wait, HANGING_SECONDS)
        problems.append(pool.problem())
        clock.seconds += STUCK_SECONDS
        problems.append(pool.problem())
        held.steps.release()
        await asyncio.to_thread(until, lambda: held.checks == 1)
        problems.append(pool.problem())
        clock.seconds += STUCK_SECONDS - 1
        problems.append(pool.problem())
        held.end()
        await asyncio.gather(running, waiting)
        clock.seconds += STUCK_SECONDS
        problems.append(pool.problem())
        return problems

    assert asyncio.run(main()) == ["", "", "encoding texts: no progress for 30 s", "", "", ""]


def test_closing_ends_running_and_waiting_jobs_with_an_error() -> None:
    async def main() -> None:
        pool, held = WorkPool("texts", 1), Held()
        never: Callable[[Check], str] = lambda _: "never"  # noqa: E731
        jobs = [asyncio.create_task(pool.run(work)) for work in (held, never)]
        await asyncio.to_thread(held.has_started.wait, HANGING_SECONDS)
        closing = asyncio.create_task(pool.close())
        await asyncio.sleep(0)
        held.steps.release()
        await closing
        for job in jobs:
            with pytest.raises(EngineError, match="stopped"):
                await job
        with pytest.raises(EngineError, match="stopped"):
            await pool.run(never)

    asyncio.run(main())
