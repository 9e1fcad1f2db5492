"""Compile all GPU kernels for every supported card, without a GPU.

    python -m tests.kernels.ahead_of_time [--combinations 2/4] [--full [--part 3/40]]

The check calls the kernels' wrappers on tensors without memory, with the sizes of real models. It compiles every launch
for the cards on which the launch occurs. The check fails if machine code spills registers in loops, needs more shared
memory than the card has, accesses memory before it waits for the kernel before it, or does not compile. It also fails
if no wrapper launches a kernel, or if a kernel's key in Triton's cache depends on other kernels (see
`tests.kernels.cache_keys`). --full compiles every kernel in every configuration (see `all_configurations`); otherwise a
selection is compiled (see `representative_jobs`). --combinations compiles a part of the tiles with all formats or for
all classes of cards (see `_combinations`).

The check is a separate process, because Triton's interpreter, which other tests use, replaces the compiler.
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

import triton

import engine.kernels
import quant.kernels
from quant.kernels.card import Card
from tests.kernels.cache_keys import functions_of, order_dependent
from tests.kernels.calls import CALLS_OF_A_CARD, CALLS_OF_ALL_CARDS, Setting
from tests.kernels.cards import CARDS, CLASSES
from tests.kernels.compilation import Machine, compile_launch, faults_before_wait, machine_code
from tests.kernels.launches import Launch, record_launches
from tests.kernels.shapes import SHAPES

TOKENS = (1, 4, 16, 64, 128, 512)
PROCESSES = 2
WORST = 12  # lines of the printed table: the launches that use the most resources
# kernels that compile slowly, and to the same instructions for all cards
SAME_ON_ALL_CARDS = ("_sample_kernel", "_logprobs_kernel")
# tiles whose shared memory is close to that of some cards, and depends on the format of weights as well
LARGEST = ("_batch_kernel", "('TOKENS', 128)")
# limit for the share of spilling instructions in an inner loop; compilers sometimes accept spills to run more programs
# at a time
MAX_LOOP_SPILL_SHARE = 0.02
# limit for spilling instructions outside of inner loops; saving a register before a loop and restoring it after is
# cheap
MAX_SPILLS = 40
# kernel and architecture -> both limits, where the fastest of about ten tiles, measured on a card (an H200), spills
MEASURED_LIMITS = {("_attention_kernel", 90): (0.05, 250)}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of compiling one launch for one card."""

    launch: str
    card: Card
    machine: Machine | None
    fault: str  # empty if there is none
    seconds: float = 0.0  # compilation time; short if it is cached


def check_launch(job: tuple[Launch, Card]) -> Verdict:
    launch, card = job
    start = time.monotonic()
    try:
        machine = compile_launch(launch, card.architecture)
    except Exception as error:  # noqa: BLE001 # report any error of the compiler
        return Verdict(str(launch), card, None, f"does not compile: {' '.join(str(error).split())}")
    faults = []
    share, spills = MEASURED_LIMITS.get((launch.name, card.architecture), (MAX_LOOP_SPILL_SHARE, MAX_SPILLS))
    if machine.loop_spill_share > share or machine.spills > spills:
        faults.append(
            f"spills registers: {machine.spills} instructions, {machine.loop_spill_share:.1%} of an inner loop's"
        )
    if launch.options.get("launch_pdl") and (early := faults_before_wait(machine_code(launch, card.architecture))):
        faults.append(f"starts early, and does not wait before: {early[0]}")
    if machine.shared > card.shared_memory:
        faults.append(f"takes {machine.shared} bytes of shared memory of {card.shared_memory}")
    return Verdict(str(launch), card, machine, ", ".join(faults), time.monotonic() - start)


def collect_launches(cards: Sequence[Card], *, thorough: bool) -> list[tuple[Launch, list[Card]]]:
    """Return every distinct launch with the cards it occurs on."""
    with record_launches() as launches:
        for model, tokens in itertools.product(SHAPES, TOKENS):
            for call in CALLS_OF_ALL_CARDS:
                call(Setting(cards[0], model, tokens, deterministic=False, thorough=thorough))
    found = {key: (launch, list(cards)) for key, launch in launches.items()}
    for card in cards:
        with record_launches() as launches:
            for model, tokens, deterministic in itertools.product(SHAPES, TOKENS, (False, True)):
                for call in CALLS_OF_A_CARD:
                    call(Setting(card, model, tokens, deterministic, thorough))
        for key, launch in launches.items():
            found.setdefault(key, (launch, []))[1].append(card)
    return list(found.values())


def all_configurations(launches: Sequence[tuple[Launch, list[Card]]]) -> list[tuple[Launch, Card]]:
    """Return each kernel with each tile and each combination of dtypes, for one card of each class.

    Launches that differ only in tensor sizes have the same code. The cards of a class take turns.
    """
    jobs: dict[tuple[object, ...], tuple[Launch, Card]] = {}
    uses: Counter[Card] = Counter()
    for launch, cards in launches:
        for number, group in enumerate(CLASSES):
            matching = [card for card in cards if card.architecture in group]
            key = (launch.tile, frozenset(launch.details), number)
            if matching and key not in jobs:
                card = min(matching, key=uses.__getitem__)
                uses[card] += 1
                jobs[key] = (launch, card)
    return list(jobs.values())


def representative_jobs(
    launches: Sequence[tuple[Launch, list[Card]]], part: int = 1, parts: int = 1
) -> list[tuple[Launch, Card]]:
    """Return a selection of jobs that covers every tile, every detail, every kernel on each class of cards, and part
    `part` of `parts` of the combinations.
    """
    pairs = [(launch, card) for launch, cards in launches for card in cards]
    combinations = sorted({it for pair in pairs for it in _combinations(*pair)})
    chosen = {*combinations[part - 1 :: parts]}
    found = [(*pair, _features(*pair) | (_combinations(*pair) & chosen)) for pair in pairs]
    missing = {it for *_, shown in found for it in shown}
    jobs: list[tuple[Launch, Card]] = []
    uses: Counter[Card] = Counter()  # number of jobs per card, so that every card gets some
    while missing:
        launch, card, shown = max(found, key=lambda it: (len(it[2] & missing), -uses[it[1]]))
        jobs.append((launch, card))
        missing -= shown
        uses[card] += 1
    return jobs


def _features(launch: Launch, card: Card) -> set[str]:
    group = next(number for number, it in enumerate(CLASSES) if card.architecture in it)
    return launch.details | {launch.tile, f"{launch.name} on class {0 if launch.name in SAME_ON_ALL_CARDS else group}"}


def _combinations(launch: Launch, card: Card) -> set[str]:
    """Return the tile of attention with its class of cards, and the largest tile of products with its format too."""
    group = next(number for number, it in enumerate(CLASSES) if card.architecture in it)
    if all(part in launch.tile for part in LARGEST):
        return {f"{launch.tile} {launch.form} on class {group}"}
    return {f"{launch.tile} on class {group}"} if launch.name == "_attention_kernel" else set()


def kernels() -> set[str]:
    """Return the names of all launchable kernels, which end in _kernel. Other functions are parts of kernels."""
    names = {it.fn.__name__ for it in functions_of(engine.kernels, quant.kernels).values()}
    return {name for name in names if name.endswith("_kernel")}


def check_launches(jobs: Sequence[tuple[Launch, Card]]) -> list[Verdict]:
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(check_launch, jobs))


def table(verdicts: Iterable[Verdict]) -> str:
    """Return a table of the launches that are closest to a limit."""

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
    """Print the table and all faults. Returns whether there are none."""
    print(table(verdicts))
    slow = max(verdicts, key=lambda it: it.seconds)
    print(f"longest: {slow.seconds:.1f} s for sm_{slow.card.architecture}, {slow.launch}")
    faults = [it for it in verdicts if it.fault]
    for it in faults:
        print(f"FAULT on sm_{it.card.architecture}: {it.launch}: {it.fault}")
    return not faults


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile all kernels for every supported card.")
    parser.add_argument("--full", action="store_true", help="every kernel in every configuration")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="part I of N of the configurations")
    parser.add_argument("--combinations", default="1/1", metavar="I/N", help="part I of N of the combinations")
    given = parser.parse_args()
    part, parts = map(int, (given.part if given.full else given.combinations).split("/"))
    start = time.monotonic()
    launches = collect_launches(CARDS, thorough=given.full)
    recorded_at = time.monotonic()
    full = given.full
    jobs = all_configurations(launches)[part - 1 :: parts] if full else representative_jobs(launches, part, parts)
    good = report(check_launches(jobs))
    unlaunched = kernels() - {launch.name for launch, _ in launches}
    if unlaunched:
        print(f"FAULT: no wrapper launches {', '.join(sorted(unlaunched))}")
    moved = order_dependent(list(functions_of(engine.kernels, quant.kernels).values()))
    if moved:
        print(f"FAULT: the keys of {', '.join(moved)} depend on the kernels before")
    seconds = f"{recorded_at - start:.1f} s to call, {time.monotonic() - recorded_at:.1f} s to compile"
    print(f"Triton {triton.__version__}: {len(launches)} launches, {len(jobs)} compilations; {seconds}")
    return 0 if good and not unlaunched and not moved else 1


if __name__ == "__main__":
    sys.exit(main())
