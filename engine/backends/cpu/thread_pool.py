"""Runs one recorded program on a thread pool, and chooses the number of threads by measurement.

A thread that shares its core with another program delays its share of a step by a whole time slice, and all other
threads wait for it. Fewer threads are faster in that case. Results do not depend on the number of threads.
"""

import statistics
from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from engine.cpu_threads import ThreadPool
from quant.cpu.native import Entry


class ProgramRunner:
    """Runs one program with one header on a thread pool. Only one thread may use it at a time."""

    def __init__(
        self,
        enter: Entry,
        program: NDArray[np.void],
        header: NDArray[np.void],
        threads: int,
        pool: ThreadPool | None = None,
    ) -> None:
        """Use up to `threads` threads of `pool`; None: threads for this program alone."""
        self.threads = threads
        self._pool = ThreadPool() if pool is None else pool
        self._tuners: dict[int, ThreadTuner] = {}
        self._keep = (program, header)
        self._tickets = np.zeros(len(program) * threads, np.int64)
        self._words = program.ctypes.data, len(program), header.ctypes.data, self._tickets.ctypes.data
        self._pool.join(self, enter)

    def run(self, tokens: int, threads: int | None = None) -> None:
        """Compute the step that the header describes, with `threads` threads.

        The default is the fastest number for steps of `tokens` tokens. Raises ValueError if the program has fewer
        threads.
        """
        if threads is not None:
            if not 1 <= threads <= self.threads:
                raise ValueError(f"{threads} threads were requested from a pool of {self.threads}")
            self._pool.run(self._words, threads)
            return
        tuner = self._tuner(tokens)
        used = tuner.next()
        tuner.record(used, self._pool.run(self._words, used))

    def close(self) -> None:
        """Leave the pool. No thread uses the program any more when this returns. Later calls have no effect."""
        self._pool.leave(self)

    def _tuner(self, tokens: int) -> "ThreadTuner":
        size = tokens.bit_length()
        if size not in self._tuners:
            self._tuners[size] = ThreadTuner(self.threads, probing=tokens <= LARGEST_PROBED)
        return self._tuners[size]


LARGEST_PROBED = 32  # tokens; longer steps suffer little from busy cores, and probing them is expensive
WINDOW = 12  # number of recent steps whose median is the measured time of a thread count
PROBE_STEPS = 6  # steps per probe
PROBE_CHECK_STEPS = 2  # a probe ends after this many steps if each took ABORT_RATIO times the current median
ABORT_RATIO = 1.3
SWITCH_RATIO = 0.9  # a thread count replaces the current one if its steps take less than this share of the current time
# Steps between probes. The pause grows by a factor each time that a probe changes nothing. While all threads compute,
# probes are rare: fewer threads can only be faster if steps become slower, which is noticed without a probe.
SHORTEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE_OF_ALL = 32, 256, 1024
GROWTH, GROWTH_OF_ALL = 2, 8


class ThreadTuner:
    """Chooses the thread count for steps of one size: mostly the current one, and now and then a neighboring one.

    If another program keeps a core busy, a step with one thread too many is slow half of the time, which raises the
    median. A single slow step does not. A probe of more threads is judged by the mean instead, because the other
    program's time slices leave some steps undisturbed.
    """

    def __init__(self, threads: int, *, probing: bool = True) -> None:
        self._ladder = sorted({1, threads // 4, threads // 2, threads - 1, threads} - {0})
        self.current = threads
        self._times: dict[int, deque[float]] = {number: deque(maxlen=WINDOW) for number in self._ladder}
        self._pause = SHORTEST_PAUSE
        self._upcoming = self._schedule() if probing and threads > 1 else None

    def next(self) -> int:
        """Return the number of threads for the next step."""
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
        """Whether the last probe of a neighboring thread count was clearly faster, so that it must be probed again."""
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
            self.current, self._pause = other, SHORTEST_PAUSE
            tried.clear()
        else:
            every = self.current == self._ladder[-1]
            growth, longest = (GROWTH_OF_ALL, LONGEST_PAUSE_OF_ALL) if every else (GROWTH, LONGEST_PAUSE)
            self._pause = min(growth * self._pause, longest)
