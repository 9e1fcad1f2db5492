"""The gate of kernels where there is no GPU: whatever can be launched is compiled, for every card.

    python -m tests.kernels.ahead_of_time [--full [--part 3/40]]

Wrappers are called on tensors without memory, for real models; what they launch is compiled for the cards that they
launch it on. It fails where machine code spills registers in loops, takes more shared memory than the card has, or does
not compile, and where there is a kernel that nobody launches. With --full that is every kernel in every configuration
(`configurations`); otherwise some stand for others (`sampled`).

A process of its own: Triton's interpreter, under which other tests run kernels, leaves nothing that could be compiled.
"""

import argparse
import itertools
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules

import triton
from triton.runtime.jit import JITFunction

import engine.kernels
import quant.kernels
from quant.kernels.card import Card
from tests.kernels.calls import CALLS, Setting
from tests.kernels.cards import CARDS, CLASSES
from tests.kernels.compilation import Machine, compiled
from tests.kernels.launches import Launch, recorded
from tests.kernels.shapes import SHAPES

TOKENS = (1, 4, 16, 64, 512)
PROCESSES = 2
WORST = 12  # lines of the table
ALIKE = (
    "_sample_kernel",
    "_logprobs_kernel",
)  # take long to compile, and have no instructions that only some cards have
MOST_HOT = (
    0.02  # of an inner loop's instructions that spill: a compiler sometimes trades one for more programs at a time
)
MOST_SPILLS = 40  # instructions outside of inner loops: what is saved before one and taken back behind it costs nothing


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one launch on one card."""

    launch: str
    card: Card
    machine: Machine | None
    fault: str  # empty: none
    seconds: float = 0.0  # that it took to compile; little, where it had been before


def judged(job: tuple[Launch, Card]) -> Verdict:
    launch, card = job
    start = time.monotonic()
    try:
        machine = compiled(launch, card.architecture)
    except Exception as error:  # noqa: BLE001  # whatever a compiler raises is to be told
        return Verdict(str(launch), card, None, f"does not compile: {' '.join(str(error).split())}")
    faults = []
    if machine.hot_share > MOST_HOT or machine.spills > MOST_SPILLS:
        faults.append(f"spills registers: {machine.spills} instructions, {machine.hot_share:.1%} of an inner loop's")
    if machine.shared > card.shared_memory:
        faults.append(f"takes {machine.shared} bytes of shared memory of {card.shared_memory}")
    return Verdict(str(launch), card, machine, ", ".join(faults), time.monotonic() - start)


def launched(cards: Iterable[Card], *, thorough: bool) -> list[tuple[Launch, list[Card]]]:
    """Every different launch, and the cards that it is launched on."""
    found: dict[str, tuple[Launch, list[Card]]] = {}
    for card in cards:
        with recorded() as launches:
            for model, tokens, deterministic in itertools.product(SHAPES, TOKENS, (False, True)):
                for call in CALLS:
                    call(Setting(card, model, tokens, deterministic, thorough))
        for key, launch in launches.items():
            found.setdefault(key, (launch, []))[1].append(card)
    return list(found.values())


def configurations(launches: Sequence[tuple[Launch, list[Card]]]) -> list[tuple[Launch, Card]]:
    """Each kernel in each tile, with all that its tensors hold, for each class of cards: what differs in sizes alone is
    the same code. The cards of a class take turns."""
    jobs: dict[tuple[object, ...], tuple[Launch, Card]] = {}
    turns: Counter[Card] = Counter()
    for launch, cards in launches:
        for number, group in enumerate(CLASSES):
            there = [card for card in cards if card.architecture in group]
            key = (launch.tile, frozenset(launch.details), number)
            if there and key not in jobs:
                card = min(there, key=turns.__getitem__)
                turns[card] += 1
                jobs[key] = (launch, card)
    return list(jobs.values())


def sampled(launches: Sequence[tuple[Launch, list[Card]]]) -> list[tuple[Launch, Card]]:
    """As few as show every tile, every detail, and every kernel on each class of cards."""
    found = [(launch, card, _shown(launch, card)) for launch, cards in launches for card in cards]
    missing = {it for *_, shown in found for it in shown}
    jobs: list[tuple[Launch, Card]] = []
    turns: Counter[Card] = Counter()  # so that no card is left out
    while missing:
        launch, card, shown = max(found, key=lambda it: (len(it[2] & missing), -turns[it[1]]))
        jobs.append((launch, card))
        missing -= shown
        turns[card] += 1
    return jobs


def _shown(launch: Launch, card: Card) -> set[str]:
    group = next(number for number, it in enumerate(CLASSES) if card.architecture in it)
    return launch.details | {launch.tile, f"{launch.name} on class {0 if launch.name in ALIKE else group}"}


def kernels() -> set[str]:
    """The names of all kernels that are launched: those that end so; other functions are parts of them."""
    names = set()
    for package in (engine.kernels, quant.kernels):
        for module in iter_modules(package.__path__, package.__name__ + "."):
            members = vars(import_module(module.name)).values()
            names |= {it.fn.__name__ for it in members if isinstance(it, JITFunction)}
    return {name for name in names if name.endswith("_kernel")}


def judge(jobs: Sequence[tuple[Launch, Card]]) -> list[Verdict]:
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(judged, jobs))


def table(verdicts: Iterable[Verdict]) -> str:
    """Those that come nearest to a limit."""

    def pressure(verdict: Verdict) -> float:
        machine = verdict.machine
        assert machine
        return max(machine.registers / 255, machine.shared / verdict.card.shared_memory)

    done = sorted((it for it in verdicts if it.machine), key=pressure, reverse=True)[:WORST]
    lines = [f"{'registers':>9} {'spills':>6} {'shared':>7}  card, launch"]
    for it in done:
        assert it.machine
        numbers = f"{it.machine.registers:9} {it.machine.spills:6} {it.machine.shared:7}"
        lines.append(f"{numbers}  sm_{it.card.architecture} {it.launch}")
    return "\n".join(lines)


def report(verdicts: Sequence[Verdict]) -> bool:
    """Print the table and all faults. Whether there are none."""
    print(table(verdicts))
    slow = max(verdicts, key=lambda it: it.seconds)
    print(f"longest: {slow.seconds:.1f} s for sm_{slow.card.architecture}, {slow.launch}")
    faults = [it for it in verdicts if it.fault]
    for it in faults:
        print(f"FAULT on sm_{it.card.architecture}: {it.launch}: {it.fault}")
    return not faults


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile whatever kernels can be launched, for every card.")
    parser.add_argument("--full", action="store_true", help="every kernel in every configuration")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="one of so many parts of that")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    start = time.monotonic()
    launches = launched(CARDS, thorough=given.full)
    recorded_at = time.monotonic()
    jobs = configurations(launches)[part - 1 :: parts] if given.full else sampled(launches)
    good = report(judge(jobs))
    idle = kernels() - {launch.name for launch, _ in launches}
    if idle:
        print(f"FAULT: nobody launches {', '.join(sorted(idle))}")
    seconds = f"{recorded_at - start:.1f} s to call, {time.monotonic() - recorded_at:.1f} s to compile"
    print(f"Triton {triton.__version__}: {len(launches)} launches, {len(jobs)} times compiled; {seconds}")
    return 0 if good and not idle else 1


if __name__ == "__main__":
    sys.exit(main())
