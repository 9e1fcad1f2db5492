"""The order of measuring: round by round, each contender in turn, so that a busy machine is equally busy for all.

One is measured while the others stand by, and it is watched that they do. A run that an uninvolved program disturbed is
repeated: threads that wait for each other stand still when one of them loses its core, and some much more than others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from app.bench.contender import Contender
from app.bench.sample import Sample
from app.bench.watch import Watch
from app.bench.workload import Load, Rate

_ATTEMPTS = 3  # at an undisturbed run
_WARM_UP_TOKENS = 8  # of the reply: its later steps are no different


@dataclass(frozen=True, slots=True)
class Series:
    """What one contender gave, a sample a round for each load."""

    contender: Contender
    samples: dict[Load, list[Sample]]  # in the order of the rounds
    elsewhere: list[float] = field(default_factory=list)  # cores that uninvolved programs used, of each run that counts

    def rates(self, load: Load, rate: Rate) -> list[float | None]:
        """A figure of each round; None where the contender did not tell it."""
        return [sample.rates.get(rate) for sample in self.samples[load]]


class Alternation:
    """Measures contenders in turn, by prompts of a vocabulary, and tells how it goes."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        vocab_size: int,
        say: Callable[[str], None],
        watch: Callable[[Sequence[Contender], Contender], Watch] = Watch,
    ) -> None:
        self._contenders = contenders
        self._vocab_size = vocab_size
        self._say = say
        self._watch = watch
        self._hopeful = True  # that a disturbed run is worth repeating

    def run(self, loads: Sequence[Load], rounds: int) -> list[Series]:
        """Warm everyone up, then measure `rounds` times. Raises what the contenders raise."""
        self._warm_up(loads)
        series = [Series(contender, {load: [] for load in loads}) for contender in self._contenders]
        for turn in range(1, rounds + 1):
            for load in loads:
                self._say(f"Round {turn} of {rounds}: {load}")
                turns = range(turn, turn + _ATTEMPTS * rounds, rounds)  # no other round has any of them
                for one in series:
                    sample, cores = self._measure(one.contender, load, turns)
                    one.samples[load].append(sample)
                    one.elsewhere.append(cores)
        return series

    def _warm_up(self, loads: Sequence[Load]) -> None:
        self._say("Warming up")
        for load in loads:
            short = replace(load, output_tokens=min(load.output_tokens, _WARM_UP_TOKENS))
            for contender in self._contenders:
                contender.warm_up(short, short.prompts(0, self._vocab_size))

    def _measure(self, contender: Contender, load: Load, turns: Sequence[int]) -> tuple[Sample, float]:
        """The first run that nothing disturbed, else the one that was disturbed least; and the cores that were used
        elsewhere meanwhile. Each attempt has prompts of its own."""
        attempts = []
        for turn in turns if self._hopeful else turns[:1]:
            prompts = load.prompts(turn, self._vocab_size)
            watch = self._watch(self._contenders, contender)
            sample = contender.measure(load, prompts)
            disturbance = watch.end(self._say)
            attempts.append((sample, disturbance.cores))
            if not disturbance.serious:
                break
        if self._hopeful and disturbance.serious:
            self._say("Other programs keep this machine busy: the figures are not what it can do.")
        self._hopeful = not disturbance.serious
        return min(attempts, key=lambda attempt: attempt[1])
