"""Competitors that are busy while another one is measured are reported."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from app.bench.competitor import Competitor
from app.bench.processes import cpu_seconds
from app.bench.rounds import Rounds, Series
from app.bench.sample import Sample
from app.bench.workload import Load, Prompts
from tests.app.bench.test_rounds import Recorder
from tests.bench.peers.bystanders import BystanderWatch
from tests.support.processes import running_statement


@dataclass
class PatientRecorder(Recorder):
    """A recorder whose measurement lasts until another process has used a core for a while."""

    other_pid: int = 0

    def measure(self, load: Load, prompts: Prompts) -> Sample:
        began, spent = time.monotonic(), cpu_seconds(self.other_pid)
        while cpu_seconds(self.other_pid) - spent < max(0.5, 0.2 * (time.monotonic() - began)):
            time.sleep(0.01)
        return super().measure(load, prompts)


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[int]:
    with running_statement(request.param) as pid:
        yield pid


def run_watched(competitors: Sequence[Competitor], say: Callable[[str], None]) -> list[Series]:
    rounds = Rounds(1000, say, lambda measured: BystanderWatch(competitors, measured, say))
    return rounds.run(competitors, [Load(16, 20)], 1)


@pytest.mark.parametrize("process", ["while True: pass"], indirect=True)
def test_busy_bystander_is_reported(process: int) -> None:
    lines: list[str] = []
    competitors = [PatientRecorder("ours", other_pid=process), Recorder("peer", pid=process)]
    series = run_watched(competitors, lines.append)
    assert any(line.startswith("peer was busy while ours was measured") for line in lines), lines
    assert all(cores >= 0 for one in series for cores in one.elsewhere)


@pytest.mark.parametrize("process", ["import time; time.sleep(600)"], indirect=True)
def test_idle_bystander_is_not_reported(process: int) -> None:
    lines: list[str] = []
    competitors = [Recorder("ours", seconds=0.2), Recorder("peer", pid=process)]
    run_watched(competitors, lines.append)
    assert not any(line.startswith("peer was busy") for line in lines), lines
