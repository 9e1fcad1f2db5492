"""The team: threads that run a program together, step after step.

Workers are plain threads that live inside one compiled call without the GIL: they spin shortly for the next step, then
sleep until they are woken. Thread 0 is whoever calls `run`. A thread that shares its core with another program holds
its part of a step for a whole time slice, and everyone waits; fewer threads are faster then, so that the number is
chosen by measurement. The bits do not depend on it. Refuses to know what is computed.
"""

import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from engine.backends.cpu.interpreter import Command, Shared
from quant.cpu.native import Entry

ANNOUNCE, RUN, SERVE = (int(command) for command in Command)  # numba takes plain integers much faster
MAX_POOL_THREADS = 62  # the bits of a mask of sleeping workers


class WorkerPool:
    """Runs one program over one header. Used from one thread at a time."""

    def __init__(self, enter: Entry, program: NDArray[np.void], header: NDArray[np.void], threads: int) -> None:
        self.threads = threads
        self._enter = enter
        self._tuners: dict[int, ThreadTuner] = {}
        self._keep = (program, header)
        self._shared = np.zeros(Shared.PARKED // 8 + 8 * threads + 8, np.int64)
        self._tickets = np.zeros(len(program) * threads, np.int64)
        shared = -(-self._shared.ctypes.data // 64) * 64
        self._words = (
            program.ctypes.data, len(program), header.ctypes.data, self._tickets.ctypes.data, shared
        )  # fmt: skip
        self._job = 0
        self._wake = [threading.Semaphore(0) for _ in range(threads)]
        kept = (self._keep, self._shared, self._tickets)  # a worker may outlive the team for a moment
        for number in range(1, threads):
            worker = threading.Thread(
                target=_work, args=(enter, self._words, number, threads, self._wake[number], kept), daemon=True
            )
            worker.start()
        stop_at = (shared - self._shared.ctypes.data + Shared.STOP) // 8
        self.close = weakref.finalize(self, _stop, enter, self._words, threads, self._wake, self._shared, stop_at)

    def run(self, tokens: int, threads: int | None = None) -> None:
        """Compute the step that the header describes, with `threads` or as many as are fastest for `tokens` tokens.

        Raises ValueError for more than there are: the others would never come.
        """
        if threads is not None:
            if not 1 <= threads <= self.threads:
                raise ValueError(f"{threads} threads were asked of a pool of {self.threads}")
            self._run(threads)
            return
        tuner = self._tuner(tokens)
        used = tuner.next()
        started = time.perf_counter()
        self._run(used)
        tuner.record(used, time.perf_counter() - started)

    def _run(self, threads: int) -> None:
        if threads > 1:
            self._job += 1
            _announce(self._enter, self._words, threads, self._job, self._wake)
        self._enter(RUN, *self._words, 0, threads, 0)

    def _tuner(self, tokens: int) -> "ThreadTuner":
        size = tokens.bit_length()
        if size not in self._tuners:
            self._tuners[size] = ThreadTuner(self.threads, probing=tokens <= LARGEST_PROBED)
        return self._tuners[size]


Words = tuple[int, int, int, int, int]  # program, its length, header, tickets, shared: what every call is given


def _announce(enter: Entry, words: Words, threads: int, job: int, wake: list[threading.Semaphore]) -> None:
    sleeping = enter(ANNOUNCE, *words, 0, threads, job)
    for number in range(1, threads):
        if sleeping >> number & 1:
            wake[number].release()


def _work(enter: Entry, words: Words, number: int, threads: int, wake: threading.Semaphore, kept: object) -> None:
    seen = 0
    while (seen := enter(SERVE, *words, number, threads, seen)) >= 0:
        wake.acquire()


def _stop(
    enter: Entry, words: Words, threads: int, wake: list[threading.Semaphore], shared: NDArray[np.int64], stop_at: int
) -> None:
    shared[stop_at] = 1
    _announce(enter, words, threads, (1 << 40), wake)


LARGEST_PROBED = 32  # tokens: longer steps lose little to a busy neighbour, and a probe of them costs much
WINDOW = 12  # steps whose median stands for the number of threads in use
PROBE_STEPS = 6  # steps of one probe
PROBE_CHECK_STEPS = 2  # steps of it after which it ends where all took ABORT_RATIO times as long
ABORT_RATIO = 1.3
SWITCH_RATIO = 0.9  # of the time: what another number of threads must reach to be taken
SHORTEST_PAUSE, LONGEST_PAUSE = 32, 256  # steps between probes; doubled whenever a probe changes nothing


class ThreadTuner:
    """How many threads to use for steps of one size: the number in use, and from time to time a neighbour of it.

    A busy neighbour makes every other step of too many threads long, so that the median shows it, and a single long
    step does not. More threads have to convince by the mean: a neighbour's time slices let a few steps pass unharmed.
    """

    def __init__(self, threads: int, *, probing: bool = True) -> None:
        self._ladder = sorted({1, threads // 4, threads // 2, threads - 1, threads} - {0})
        self.current = threads
        self._times: dict[int, deque[float]] = {number: deque(maxlen=WINDOW) for number in self._ladder}
        self._pause = SHORTEST_PAUSE
        self._upcoming = self._schedule() if probing and threads > 1 else None

    def next(self) -> int:
        """The number of threads for the next step."""
        return self.current if self._upcoming is None else next(self._upcoming)

    def record(self, threads: int, seconds: float) -> None:
        self._times[threads].append(seconds)

    def _schedule(self) -> Iterator[int]:
        above = False
        while True:
            for _ in range(self._pause):
                yield self.current
                if self._much_slower():
                    self._pause = SHORTEST_PAUSE
                    break
            above = not above
            other = self._neighbor(self.current, above)
            self._times[other].clear()
            for step in range(PROBE_STEPS):
                yield other
                if step + 1 == PROBE_CHECK_STEPS and min(self._times[other]) > ABORT_RATIO * statistics.median(
                    self._times[self.current]
                ):
                    break
            self._decide(other)

    def _much_slower(self) -> bool:
        """Whether a neighbour was clearly faster when it was tried last: then it is tried again."""
        now = self._times[self.current]
        beside = {self._neighbor(self.current, above) for above in (False, True)}
        others = [statistics.median(self._times[number]) for number in beside if self._times[number]]
        return len(now) == WINDOW and bool(others) and min(others) < SWITCH_RATIO * statistics.median(now)

    def _neighbor(self, number: int, above: bool) -> int:
        index = self._ladder.index(number) + (1 if above else -1)
        if not 0 <= index < len(self._ladder):
            index = self._ladder.index(number) + (-1 if above else 1)
        return self._ladder[index]

    def _decide(self, other: int) -> None:
        tried = self._times[other]
        cost = statistics.median(tried) if other < self.current else statistics.fmean(tried)
        if cost < SWITCH_RATIO * statistics.median(self._times[self.current]):
            self.current = other
            tried.clear()
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
