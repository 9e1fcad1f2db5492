"""The thread pool that computes the recorded programs of all models of a process, step after step.

Workers are Python threads that stay inside one compiled call without the GIL: they spin briefly for the next step, then
sleep until they are woken. The caller of `run` computes as thread 0. A worker is bound to no program: each step
announces its program. The last instruction of a program has a barrier, so a worker reads nothing of the program once
the step has ended.
"""

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol


class Command(IntEnum):
    """The commands that the compiled `engine.backends.cpu.interpreter.enter` accepts."""

    ANNOUNCE = 0  # publish a step; returns a bit mask of the sleeping workers to wake
    RUN = 1  # compute a step as thread 0
    SERVE = 2  # run a worker; returns the number of the last job if the worker should sleep, -1 if it should exit


class Shared(IntEnum):
    """Byte offsets of the variables that threads share, one cache line each. Mostly compiled code accesses them."""

    ARRIVED = 0
    GENERATION = 64
    JOB = 128  # step number times MAX_THREADS, plus the number of threads that take part
    STOP = 192
    PROGRAM = 256  # four words: addresses of the program, its length, its header, and its tickets
    PARKED = 320  # one word per thread, 64 bytes apart: 1 while the thread sleeps


ANNOUNCE, RUN, SERVE = (int(command) for command in Command)  # plain integers, because numba converts them much faster
LINE = 64  # bytes of a cache line
MAX_THREADS = 1024
MAX_POOL_THREADS = 62  # limit set by the bit mask of sleeping workers
NO_PROGRAM = 0, 0, 0, 0

Entry = Callable[..., int]  # the compiled `enter`
# the program's address and length, and the addresses of its header and its tickets
Words = tuple[int, int, int, int]


class PoolProgram(Protocol):
    """A program whose steps a thread pool computes."""

    threads: int  # largest number of threads of its steps


class ThreadPool:
    """The threads of all programs of a process. Thread-safe: steps of different programs are computed one by one.

    There are as many threads as the largest program asks for. They end when the last program leaves.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held during a step, and while threads start or end
        self._programs: weakref.WeakSet[PoolProgram] = weakref.WeakSet()
        self._workers: list[threading.Thread] = []
        self._wake: list[threading.Semaphore] = []
        self._memory = ctypes.create_string_buffer(Shared.PARKED + LINE * (MAX_POOL_THREADS + 1))
        self._shared = -(-ctypes.addressof(self._memory) // LINE) * LINE
        self._job = 0
        self._enter: Entry | None = None
        self._stop: weakref.finalize[..., ThreadPool] | None = None

    @property
    def num_threads(self) -> int:
        """The largest number of threads with which a step can be computed now."""
        return len(self._workers) + 1

    def join(self, program: PoolProgram, enter: Entry) -> None:
        """Add a program, and start the threads that it needs in addition. `enter` must be the same for all programs.

        Raises RuntimeError if a thread cannot start. The program is not added then.
        """
        with self._lock:
            if self._enter not in (None, enter):
                raise ValueError("all programs of a thread pool must be compiled for the same processor")
            self._enter = enter
            self._programs.add(program)
            if self._stop is None:
                self._stop = weakref.finalize(self, _stop, enter, self._shared, self._wake, self._memory)
            try:
                while self.num_threads < program.threads:
                    self._start_worker(enter)
            except BaseException:
                self._remove(program)
                raise

    def leave(self, program: PoolProgram) -> None:
        """Remove a program. After the last one, end the threads and wait for them. Later calls have no effect."""
        with self._lock:
            self._remove(program)

    def _remove(self, program: PoolProgram) -> None:
        self._programs.discard(program)
        if self._programs or self._stop is None:
            return
        self._stop()
        for worker in self._workers:
            worker.join()
        self._workers.clear()
        self._wake.clear()
        ctypes.memset(self._memory, 0, ctypes.sizeof(self._memory))
        self._job, self._enter, self._stop = 0, None, None

    def run(self, words: Words, threads: int) -> float:
        """Compute a step of a program that has joined, with `threads` threads. Returns its seconds.

        The time in which other programs compute is not counted. Raises ValueError if there are fewer threads, because a
        barrier would then wait forever.
        """
        with self._lock:
            if self._enter is None or not 1 <= threads <= self.num_threads:
                raise ValueError(f"{threads} threads were requested from a pool of {self.num_threads}")
            began = time.perf_counter()
            if threads > 1:
                self._job += 1
                _announce(self._enter, words, self._shared, threads, self._job, self._wake)
            self._enter(RUN, *words, self._shared, 0, threads, 0)
            return time.perf_counter() - began

    def _start_worker(self, enter: Entry) -> None:
        wake, number = threading.Semaphore(0), self.num_threads
        # the memory is kept alive for a worker that may briefly outlive the pool
        worker = threading.Thread(target=_work, args=(enter, self._shared, number, wake, self._memory), daemon=True)
        worker.start()
        self._wake.append(wake)
        self._workers.append(worker)


def _announce(enter: Entry, words: Words, shared: int, threads: int, job: int, wake: list[threading.Semaphore]) -> None:
    sleeping = enter(ANNOUNCE, *words, shared, 0, threads, job)
    for number in range(1, threads):
        if sleeping >> number & 1:
            wake[number - 1].release()


def _work(enter: Entry, shared: int, number: int, wake: threading.Semaphore, memory: object) -> None:
    seen = 0
    while (seen := enter(SERVE, *NO_PROGRAM, shared, number, 0, seen)) >= 0:
        wake.acquire()


def _stop(enter: Entry, shared: int, wake: list[threading.Semaphore], memory: object) -> None:
    ctypes.c_int64.from_address(shared + Shared.STOP).value = 1
    _announce(enter, NO_PROGRAM, shared, len(wake) + 1, 1 << 40, wake)
