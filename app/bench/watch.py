"""Whether a measurement was fair: did the others stand by, and was anything else running.

By the system's own account of processor time, where it gives one; Linux does.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from app.bench.contender import Contender
from app.bench.processes import cpu_seconds, machine_cpu_seconds

_SHARE = 0.1  # of a core: less is what any machine does beside
_LEAST_SECONDS = 0.05  # of processor time, which is told in steps of 0.01


@dataclass(frozen=True, slots=True)
class _Account:
    """Seconds: of the clock, and of processor time that was used up to then."""

    clock: float
    machine: float
    benchmark: float  # this process, the programs it ran, and the contenders
    by_pid: Mapping[int, float]  # of the contenders


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What programs did beside a measurement that take no part in it."""

    cores: float
    serious: bool


class Watch:
    """Looks at the contenders' processes and at the machine, from its making to its end, while one is measured."""

    def __init__(self, contenders: Sequence[Contender], measured: Contender) -> None:
        self._measured = measured.name
        self._names = {contender.pid: contender.name for contender in contenders if contender.pid is not None}
        self._before = self._account()

    def end(self, say: Callable[[str], None]) -> Disturbance:
        """Say who did not stand by. Returns what programs did which take no part."""
        before, after = self._before, self._account()
        seconds = after.clock - before.clock
        elsewhere = (after.machine - before.machine) - (after.benchmark - before.benchmark)
        much = max(_LEAST_SECONDS, _SHARE * seconds)
        for pid, name in self._names.items():
            spent = after.by_pid[pid] - before.by_pid[pid]
            if name != self._measured and spent > much:
                say(f"{name} was busy while {self._measured} was measured: {spent / seconds:.0%} of a core")
        return Disturbance(max(0.0, elsewhere / seconds), elsewhere > much)

    def _account(self) -> _Account:
        own = os.times()
        by_pid = {pid: cpu_seconds(pid) for pid in self._names}
        children = own.children_user + own.children_system  # those that have ended
        others = sum(spent for pid, spent in by_pid.items() if pid != os.getpid())
        benchmark = own.user + own.system + children + others
        return _Account(time.perf_counter(), machine_cpu_seconds(), benchmark, by_pid)
