"""Run the GPU benchmark within a time limit. Every part runs in its own process, so a failure does not stop the others.

    python -m tests.gpu.bench [--seconds 330] [--json FILE] [--gguf FILE --llama-bench FILE] [--part NAME ...]
                              [--dry-run]

The table is printed at the end, with a line for each part that failed or had no time left. With --dry-run all parts run
in this process, with toy sizes and without a GPU; the figures are meaningless then.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.gpu.figures import Figure, Peaks
from tests.gpu.part import Part, run_dry, run_in_process
from tests.gpu.table import table

PEAKS = Part("peaks", 40, "peaks:figures")
PARTS = (  # the most valuable first, because a failure may leave no time for the last
    Part("smoke", 30, "smoke:figures"),
    PEAKS,
    Part("numbers", 120, "numbers:figures"),
    Part("early start", 60, "early_start:figures"),
    Part("drafted steps", 60, "drafted_steps:figures"),
    Part("engine, INT4", 100, "engine:int4"),
    Part("products", 90, "products:figures"),
    Part("experts", 80, "experts:figures"),
    Part("attention", 40, "attention:figures"),
    Part("delta rules", 30, "delta_rules:figures"),
    Part("accuracy", 40, "accuracy:figures"),
    Part("swap", 30, "swap:figures"),
    Part("engine, BF16", 60, "engine:bf16"),
    Part("engine, INT4 experts", 100, "engine:experts"),
    Part("engine, FP8", 60, "engine:fp8"),
    Part("deterministic", 60, "engine:deterministic"),
    Part("libraries", 60, "libraries:figures"),
    Part("small kernels", 40, "small_kernels:figures"),
    Part("engine, INT4, cold", 100, "engine:cold", cold=True),
)
# (part, peaks, time limit in seconds) -> figures; raises if the part fails
Run = Callable[[Part, Peaks, float], Iterator[Figure]]


@dataclass
class Results:
    """Figures and error messages, by part."""

    figures: dict[str, list[Figure]] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def peaks(self) -> Peaks:
        return Peaks.of({figure.name: figure.value for figure in self.figures.get(PEAKS.name, [])})

    def json(self) -> dict[str, object]:
        figures = {part: [asdict(it) | {"met": it.met} for it in found] for part, found in self.figures.items()}
        return {"figures": figures, "faults": self.faults}


def measure(parts: Sequence[Part], run: Run, seconds: float) -> Results:
    """Run all parts in order until the time limit."""
    results, deadline = Results(), time.monotonic() + seconds
    for part in parts:
        found = results.figures.setdefault(part.name, [])
        left = min(part.seconds, deadline - time.monotonic())
        try:
            if left < 1:
                raise TimeoutError("no time left")
            for figure in run(part, results.peaks, left):
                found.append(figure)
        except Exception as problem:  # noqa: BLE001 # continue with the next part
            results.faults[part.name] = " ".join(str(problem).split()) or type(problem).__name__
        status = results.faults.get(part.name, "done")
        print(f"{part.name}: {len(found)} figures, {status}", file=sys.stderr, flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure kernels and the engine on a GPU.")
    parser.add_argument("--seconds", type=float, default=330, help="time limit")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--gguf", type=Path, help="a model to compare with llama.cpp")
    parser.add_argument("--llama-bench", type=Path, help="llama-bench of a CUDA build")
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--part", action="append", choices=names, metavar="NAME", help="run only the peaks and this part"
    )
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, without a GPU")
    given = parser.parse_args(arguments)
    parts = [part for part in PARTS if not given.part or part is PEAKS or part.name in given.part]
    if given.gguf and given.llama_bench:
        parts.insert(5, Part("llama.cpp", 60, "llama_cpp:figures", paths=(given.gguf, given.llama_bench)))
    results = measure(parts, run_dry if given.dry_run else run_in_process, given.seconds)
    if given.json:
        given.json.write_text(json.dumps(results.json(), indent=1))
    print(table(results.figures, results.faults), flush=True)
    return 1 if results.faults else 0


if __name__ == "__main__":
    sys.exit(main())
