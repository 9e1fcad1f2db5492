"""Estimate from machine code how close the kernels get to the limits of cards, without a GPU.

    python -m tests.kernels.roofline [--card 3090] [--json FILE] [--check | --store]

Records the launches of steps of an 8B Llama, compiles them, and reads their main loops. The table has a line for each
operation of a step, and for each card the time of a decode step and of a prompt. --check compares the figures of a
quarter of the layers with `roofline.json`, and fails if one is worse. --store writes them there.

The estimates have no latency in them (see `time_model`), so they compare versions of a kernel better than they predict
its time. BENCHMARKS.md compares them with published measurements.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from engine.model_config import ModelConfig
from quant.kernels.card import Card
from tests.kernels.cards import CARDS
from tests.kernels.compilation import compile_launch, machine_code
from tests.kernels.launches import Launch
from tests.kernels.machine_loops import main_loop, straight_code
from tests.kernels.recorded_steps import RecordedModel, Step, Work
from tests.kernels.shapes import LLAMA_8B, mixer_of
from tests.kernels.time_model import RATES, Kernel, runs, seconds
from tests.support.weight_mixes import Q4_K_M

STORED = Path(__file__).with_suffix(".json")
PROMPT = 8192  # tokens
# has every kernel of the whole model, and is recorded in a quarter of the time
CHECKED_MODEL = replace(LLAMA_8B, layers=LLAMA_8B.layers[:8])
PROCESSES = 2
SLACK = 1.02  # these may be worse by this factor, because compilers differ slightly; counts may not
CHECKED_FIGURES = ("decode_ms", "decode_launches", "prompt_ms")
ESTIMATED = {"microseconds", "instructions", "decode_ms", "prompt_ms"}
# few instructions from a load to its use are a fault only if few warps can run meanwhile
MANY_WARPS = 24
DEFAULT_WARPS = 4  # of a launch that states none


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one operation on one card. A larger `warps` or `loads_ahead` is better, all others are worse."""

    microseconds: float  # of all launches of the operation in a step
    launches: int
    instructions: float  # of a warp in main loops, per 32 weights or per 32 bytes that it streams
    barriers: int  # in a main loop
    registers: int
    spills: int
    warps: int  # that a multiprocessor holds
    loads_ahead: int  # instructions from a load to its first use; 0 if there are no loads to registers

    @property
    def worse_if_larger(self) -> dict[str, float]:
        names = ("microseconds", "launches", "instructions", "barriers", "spills")
        return {name: getattr(self, name) for name in names}


def read_kernel(job: tuple[Launch, int]) -> Kernel:
    launch, architecture = job
    machine, code = compile_launch(launch, architecture), machine_code(launch, architecture)
    warps = int(launch.options.get("num_warps", DEFAULT_WARPS))
    return Kernel(main_loop(code), straight_code(code), machine.registers, machine.shared, machine.spills, warps)


def read_kernels(works: Iterable[Work], architecture: int) -> dict[str, Kernel]:
    """Compile the distinct launches, and return their machine code by the launch's text."""
    launches = {str(work.launch): work.launch for work in works if work.launch}
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("fork")) as pool:
        found = pool.map(read_kernel, [(launch, architecture) for launch in launches.values()])
        return dict(zip(launches, found, strict=True))


@dataclass(frozen=True)
class Estimate:
    """The launches of a step on a card, with their machine code."""

    card: Card
    works: Sequence[Work]
    kernels: dict[str, Kernel]

    @property
    def seconds(self) -> float:
        return sum(map(self._seconds, self.works))

    def operations(self) -> dict[str, Figures]:
        """Return the figures of each operation."""
        names = dict.fromkeys(work.operation for work in self.works)
        return {name: self._figures([it for it in self.works if it.operation == name]) for name in names}

    def _kernel(self, work: Work) -> Kernel | None:
        return self.kernels[str(work.launch)] if work.launch else None

    def _seconds(self, work: Work) -> float:
        return seconds(work, self._kernel(work), RATES[self.card.architecture], self.card.multiprocessors)

    def _figures(self, works: Sequence[Work]) -> Figures:
        pairs = [(work, kernel) for work in works if (kernel := self._kernel(work))]
        kernels, rates = [kernel for _, kernel in pairs], RATES[self.card.architecture]
        loops = [kernel.loop for kernel in kernels if kernel.loop]
        ahead = [it for loop in loops if (it := loop.loads_ahead) is not None]
        return Figures(
            microseconds=round(1e6 * sum(map(self._seconds, works)), 2),
            launches=len(works),
            instructions=max((_instructions(work, kernel) for work, kernel in pairs), default=0.0),
            barriers=max((loop.barriers for loop in loops), default=0),
            registers=max((kernel.registers for kernel in kernels), default=0),
            spills=max((kernel.spills for kernel in kernels), default=0),
            warps=min((kernel.occupancy(rates) for kernel in kernels), default=0),
            loads_ahead=min(ahead, default=0),
        )


def _instructions(work: Work, kernel: Kernel) -> float:
    """Return the instructions of a warp for 32 weights, or for 32 bytes of the largest tensor."""
    units = work.multiply_adds / work.rows if work.rows else work.streamed
    return round(32 * runs(work, kernel) * len(kernel.loop.body) / units, 2) if kernel.loop else 0.0


@dataclass(frozen=True)
class CardReport:
    """All figures of one card."""

    card: Card
    decode: Estimate
    floor: float  # seconds to read all weights, keys, and values once at the full bandwidth
    prompt: float  # seconds of a prompt of PROMPT tokens
    best: float  # seconds of that prompt at the peaks: products in integers, if the card prefers them, all else in bf16

    def json(self) -> dict[str, object]:
        return {
            "decode_ms": round(1e3 * self.decode.seconds, 3),
            "decode_share_of_floor": round(self.floor / self.decode.seconds, 3),
            "decode_launches": len(self.decode.works),
            "prompt_ms": round(1e3 * self.prompt, 1),
            "prompt_share_of_peak": round(self.best / self.prompt, 3),
            "operations": {name: asdict(it) for name, it in self.decode.operations().items()},
        }


def report(card: Card, shape: ModelConfig, context: int = 512) -> CardReport:
    """Return the figures of a Llama in Q4_K_M on a card."""
    model = RecordedModel(card, shape, Q4_K_M)
    decode = model.record(Step(1, 1, context))
    ends = range(model.step_tokens, PROMPT + 1, model.step_tokens)
    chunks = [model.record(Step(1, model.step_tokens, end)) for end in ends]
    kernels = read_kernels([*decode, *(work for chunk in chunks for work in chunk)], card.architecture)
    prompt = sum(Estimate(card, chunk, kernels).seconds for chunk in chunks)
    weights = 2 * PROMPT * (shape.matrix_elements - 2 * shape.vocab_size * shape.hidden)  # those of layers
    attention = 4 * len(shape.layers) * mixer_of(shape).width * Step(1, PROMPT, PROMPT).visible
    rates = RATES[card.architecture]
    peak = rates.integer_peak if card.prefers_integers else rates.peak
    best = weights / peak(card.multiprocessors) + attention / rates.peak(card.multiprocessors)
    cached = 4 * len(shape.layers) * mixer_of(shape).kv_heads * mixer_of(shape).head_dim * context  # bytes
    floor = (model.weight_bytes + cached) / RATES[card.architecture].bandwidth
    return CardReport(card, Estimate(card, decode, kernels), floor, prompt, best)


def faults(found: dict[str, object], stored: dict[str, object]) -> list[str]:
    """Return what is worse than stored, or has no stored figure."""
    operations: dict[str, dict[str, float]] = found["operations"]  # type: ignore[assignment]
    bounds: dict[str, dict[str, float]] = stored["operations"]  # type: ignore[assignment]
    worse = [_worse(name, float(str(found[name])), float(str(stored[name]))) for name in CHECKED_FIGURES]
    for name, figures in operations.items():
        if name not in bounds:
            worse.append(f"{name}: no figures are stored")
            continue
        known = Figures(**bounds[name])  # type: ignore[arg-type]
        for figure, bound in known.worse_if_larger.items():
            worse.append(_worse(figure, figures[figure], bound, f"{name}: "))
        if figures["warps"] < min(known.warps, MANY_WARPS):
            worse.append(f"{name}: {figures['warps']} warps, {known.warps} are stored")
        if figures["warps"] < MANY_WARPS and figures["loads_ahead"] < known.loads_ahead / SLACK:
            worse.append(f"{name}: loads {figures['loads_ahead']} instructions ahead, {known.loads_ahead} are stored")
    return [it for it in worse if it]


def _worse(figure: str, value: float, bound: float, operation: str = "") -> str:
    worse = value > (SLACK if figure in ESTIMATED else 1.0) * bound
    return f"{operation}{figure}: {value:g}, {bound:g} is stored" if worse else ""


def table(name: str, found: dict[str, object]) -> str:
    operations: dict[str, dict[str, float]] = found["operations"]  # type: ignore[assignment]
    lines = [
        f"{name}: decode {found['decode_ms']} ms, {found['decode_share_of_floor']:.0%} of the floor, "
        f"{found['decode_launches']} launches; prompt of {PROMPT} tokens {found['prompt_ms']} ms, "
        f"{found['prompt_share_of_peak']:.0%} of the peak",
        f"{'us':>9} {'launches':>8} {'ins/32':>6} {'BAR':>3} {'regs':>4} {'spills':>6} {'warps':>5} {'ahead':>5}",
    ]
    for operation, it in operations.items():
        lines.append(
            f"{it['microseconds']:9.1f} {it['launches']:8} {it['instructions']:6.2f} {it['barriers']:3} "
            f"{it['registers']:4} {it['spills']:6} {it['warps']:5} {it['loads_ahead']:5}  {operation}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Estimate times of kernels from machine code.")
    names = {card.name.split()[-1]: card for card in CARDS if card.architecture in RATES}
    parser.add_argument("--card", choices=names, action="append", help="default: all")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare with the stored figures")
    mode.add_argument("--store", action="store_true", help="store the figures")
    given = parser.parse_args()
    shape = CHECKED_MODEL if given.check or given.store else LLAMA_8B
    found = {name: report(names[name], shape).json() for name in given.card or names}
    for name, figures in found.items():
        print(table(name, figures))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    if given.store:
        checked = {card: {name: it[name] for name in (*CHECKED_FIGURES, "operations")} for card, it in found.items()}
        STORED.write_text(json.dumps(stored | checked, indent=1, sort_keys=True) + "\n")
    worse = [f"{name}: {it}" for name in found if given.check for it in faults(found[name], stored[name])]
    for line in worse:
        print(f"FAULT {line}")
    if worse:
        print("If this is meant: python -m tests.kernels.roofline --store")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
