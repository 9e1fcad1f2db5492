"""The order of measurements, and runs that other programs disturb."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from app.bench.competitor import Competitor
from app.bench.disturbance import Disturbance, Watch
from app.bench.rounds import Rounds
from app.bench.sample import Sample
from app.bench.workload import Load, Prompts, Rate
from tests.support.processes import running_statement

SINGLE, CROWD = Load(16, 20), Load(16, 20, 3)


@dataclass
class Recorder:
    """Records its calls in a list that all recorders share."""

    name: str
    calls: list[tuple[str, Load, Prompts]] = field(default_factory=list)
    seconds: float = 0.0
    pid: int | None = None
    build: str = "none"

    def warm_up(self, load: Load, prompts: Prompts) -> None:
        self.calls.append((f"{self.name} warms up", load, prompts))

    def measure(self, load: Load, prompts: Prompts) -> Sample:
        time.sleep(self.seconds)
        self.calls.append((self.name, load, prompts))
        return Sample({Rate.DECODE: float(len(self.calls))}, load.streams)


@dataclass
class Disturbed(Recorder):
    """A competitor whose disturbing program ends at the third run."""

    disturber: int = 0

    def measure(self, load: Load, prompts: Prompts) -> Sample:
        if len(self.calls) == 3:
            os.kill(self.disturber, signal.SIGKILL)
        return super().measure(load, prompts)


class Quiet(Watch):
    """A watch that detects no disturbance."""

    def end(self) -> Disturbance:
        return Disturbance(0.0, serious=False)


def quiet(measured: Competitor) -> Watch:
    return Quiet([])


def silent(line: str) -> None:
    pass


def test_rounds_interleave_loads_and_competitors() -> None:
    calls: list[tuple[str, Load, Prompts]] = []
    ours, peer = Recorder("ours", calls), Recorder("peer", calls)
    series = Rounds(1000, silent, quiet).run([ours, peer], [SINGLE, CROWD], 2)
    order = [(name, load.streams) for name, load, _ in calls]
    once = [("ours", 1), ("peer", 1), ("ours", 3), ("peer", 3)]
    assert order == [(f"{name} warms up", streams) for name, streams in once] + once + once
    assert [one.competitor for one in series] == [ours, peer]
    assert series[1].rates(CROWD, Rate.DECODE) == [8.0, 12.0]
    assert series[1].rates(CROWD, Rate.PREFILL) == [None, None]


def test_competitors_get_the_same_prompts_and_rounds_get_different_ones() -> None:
    calls: list[tuple[str, Load, Prompts]] = []
    Rounds(1000, silent, quiet).run([Recorder("ours", calls), Recorder("peer", calls)], [CROWD], 3)
    assert all(len(prompts) == load.streams for _, load, prompts in calls)
    assert [prompts for name, _, prompts in calls if "ours" in name] == [p for name, _, p in calls if "peer" in name]
    assert len({prompts for _, _, prompts in calls}) == 4


def test_warm_up_has_full_prompt_and_short_reply() -> None:
    recorder = Recorder("ours")
    Rounds(1000, silent, quiet).run([recorder], [Load(300, 200, 2)], 1)
    _, load, prompts = recorder.calls[0]
    assert (load.output_tokens, load.streams) == (8, 2)
    assert [len(prompt) for prompt in prompts] == [300, 300]


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[int]:
    with running_statement(request.param) as pid:
        yield pid


@pytest.mark.parametrize("process", ["while True: pass"], indirect=True)
def test_disturbed_run_is_repeated_with_other_prompts(process: int) -> None:
    """The least disturbed run counts: in this test the last one, after the disturbing program has ended."""
    assert process
    recorder = Disturbed("ours", seconds=0.4, disturber=process)
    said: list[str] = []
    [series] = Rounds(1000, said.append).run([recorder], [SINGLE], 1)
    runs = [prompts for name, _, prompts in recorder.calls if name == "ours"]
    assert len(runs) == len(set(runs)) == 3
    assert len(series.samples[SINGLE]) == len(series.elsewhere) == 1


@pytest.mark.parametrize("process", ["while True: pass"], indirect=True)
def test_busy_machine_is_reported_once(process: int) -> None:
    """A disturbed first round is measured three times. Each later round is measured once."""
    assert process
    recorder = Recorder("ours", seconds=0.3)
    said: list[str] = []
    [series] = Rounds(1000, said.append).run([recorder], [SINGLE], 3)
    assert [name for name, _, _ in recorder.calls].count("ours") == 5
    assert len([line for line in said if "keep this machine busy" in line]) == 1
    assert min(series.elsewhere) > 0.1
