"""Processor time that other programs use while a competitor is measured.

The figures come from the system's account of processor time. Only Linux has one; elsewhere all figures are 0.
"""

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from app.bench.processes import cpu_seconds, machine_cpu_seconds

_SHARE = 0.1  # fraction of a core, above the background load of an idle machine
_LEAST_SECONDS = 0.05  # seconds of processor time, which the system reports in steps of 0.01


@dataclass(frozen=True, slots=True)
class Account:
    """A point in time, and the processor time used up to then. All times are in seconds."""

    clock: float
    machine: float
    benchmark: float  # processor time of this process, its child programs, and the competitors
    by_pid: Mapping[int, float]  # processor time of each competitor


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Processor time that other programs used during a measurement."""

    cores: float
    serious: bool


class Watch:
    """Compares the processor time of the machine with that of the benchmark, from construction until `end`."""

    def __init__(self, pids: Collection[int]) -> None:
        """`pids`: the processes of all competitors."""
        self._pids = pids
        self._before = self._account()

    def end(self) -> Disturbance:
        return self._disturbance(self._account())

    def _disturbance(self, after: Account) -> Disturbance:
        before = self._before
        seconds = after.clock - before.clock
        elsewhere = (after.machine - before.machine) - (after.benchmark - before.benchmark)
        return Disturbance(max(0.0, elsewhere / seconds), elsewhere > tolerated(seconds))

    def _account(self) -> Account:
        own = os.times()
        by_pid = {pid: cpu_seconds(pid) for pid in self._pids}
        children = own.children_user + own.children_system  # processor time of children that have ended
        others = sum(spent for pid, spent in by_pid.items() if pid != os.getpid())
        benchmark = own.user + own.system + children + others
        return Account(time.perf_counter(), machine_cpu_seconds(), benchmark, by_pid)


def tolerated(seconds: float) -> float:
    """Return how many seconds of processor time other programs may use in an interval of `seconds`."""
    return max(_LEAST_SECONDS, _SHARE * seconds)
