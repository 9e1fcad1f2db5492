"""Rounds of a benchmark: each round runs every load once, and repeats a run that another program disturbed.

Threads that wait for each other all stop when one of them loses its core, so one disturbance distorts a whole run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from app.bench.competitor import Competitor
from app.bench.disturbance import Watch
from app.bench.sample import Sample
from app.bench.workload import Load, Rate

_ATTEMPTS = 3  # attempts to get an undisturbed run
_WARM_UP_TOKENS = 8  # tokens per reply of a warm-up: all later steps are the same


@dataclass(frozen=True, slots=True)
class Series:
    """The results of one competitor: one sample per round for each load."""

    competitor: Competitor
    samples: dict[Load, list[Sample]]  # samples of each load, in the order of the rounds
    # number of cores that uninvolved programs used, for each run that counts
    elsewhere: list[float] = field(default_factory=list)

    def rates(self, load: Load, rate: Rate) -> list[float | None]:
        """Return one figure for each round, or None if the competitor did not report it."""
        return [sample.rates.get(rate) for sample in self.samples[load]]


def watch_one(measured: Competitor) -> Watch:
    """Return a watch for a competitor that is measured alone."""
    return Watch([] if measured.pid is None else [measured.pid])


class Rounds:
    """Measures competitors in turn, so that a busy machine is equally busy for all."""

    def __init__(
        self, vocab_size: int, say: Callable[[str], None], watch: Callable[[Competitor], Watch] = watch_one
    ) -> None:
        """Prepare the rounds.

        `vocab_size`: number of token ids for random prompts. `say` receives progress lines. `watch` starts a watch
        before each run of a competitor.
        """
        self._vocab_size = vocab_size
        self._say = say
        self._watch = watch
        self._hopeful = True  # whether a disturbed run is worth repeating

    def run(self, competitors: Sequence[Competitor], loads: Sequence[Load], rounds: int) -> list[Series]:
        """Warm up all competitors, then measure `rounds` times. Raises what the competitors raise."""
        self._warm_up(competitors, loads)
        series = [Series(competitor, {load: [] for load in loads}) for competitor in competitors]
        for turn in range(1, rounds + 1):
            for load in loads:
                self._say(f"Round {turn} of {rounds}: {load}")
                # a distinct number for every attempt of every round
                turns = range(turn, turn + _ATTEMPTS * rounds, rounds)
                for one in series:
                    sample, cores = self._measure(one.competitor, load, turns)
                    one.samples[load].append(sample)
                    one.elsewhere.append(cores)
        return series

    def _warm_up(self, competitors: Sequence[Competitor], loads: Sequence[Load]) -> None:
        self._say("Warming up")
        for load in loads:
            short = replace(load, output_tokens=min(load.output_tokens, _WARM_UP_TOKENS))
            for competitor in competitors:
                competitor.warm_up(short, short.prompts(0, self._vocab_size))

    def _measure(self, competitor: Competitor, load: Load, turns: Sequence[int]) -> tuple[Sample, float]:
        """Return the first undisturbed run, or else the least disturbed one, and how many cores other programs used.

        Each attempt uses different prompts.
        """
        attempts = []
        for turn in turns if self._hopeful else turns[:1]:
            prompts = load.prompts(turn, self._vocab_size)
            watch = self._watch(competitor)
            sample = competitor.measure(load, prompts)
            disturbance = watch.end()
            attempts.append((sample, disturbance.cores))
            if not disturbance.serious:
                break
        if self._hopeful and disturbance.serious:
            self._say("Other programs keep this machine busy, so the figures are lower than on an idle machine.")
        self._hopeful = not disturbance.serious
        return min(attempts, key=lambda attempt: attempt[1])
