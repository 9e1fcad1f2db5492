"""Detect competitors that are busy while another one is measured."""

from collections.abc import Callable, Sequence

from app.bench.competitor import Competitor
from app.bench.disturbance import Disturbance, Watch, tolerated


class BystanderWatch(Watch):
    """A watch that also reports the competitors that were busy while `measured` ran."""

    def __init__(self, competitors: Sequence[Competitor], measured: Competitor, say: Callable[[str], None]) -> None:
        self._measured = measured.name
        self._names = {competitor.pid: competitor.name for competitor in competitors if competitor.pid is not None}
        self._say = say
        super().__init__(self._names.keys())

    def end(self) -> Disturbance:
        before, after = self._before, self._account()
        seconds = after.clock - before.clock
        for pid, name in self._names.items():
            spent = after.by_pid[pid] - before.by_pid[pid]
            if name != self._measured and spent > tolerated(seconds):
                self._say(f"{name} was busy while {self._measured} was measured: {spent / seconds:.0%} of a core")
        return self._disturbance(after)
