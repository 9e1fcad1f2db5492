"""The benchmark of a GPU, within a time: every part in a process of its own, whatever becomes of the others.

    python -m tests.gpu.bench [--seconds 330] [--json FILE] [--gguf FILE --llama-bench FILE] [--dry-run]

The table comes last. A part that fails, or has no time left, is a line of it. With --dry-run all parts run here, at toy
size and without a GPU; the figures then mean nothing.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.gpu.figures import Figure, Peaks
from tests.gpu.part import Part, run_apart, run_dry
from tests.gpu.table import table

PEAKS = Part("peaks", 40, "peaks:figures")
PARTS = (
    PEAKS,
    Part("engine, INT4", 100, "engine:int4", cold=True),
    Part("products", 90, "products:figures"),
    Part("attention", 40, "attention:figures"),
    Part("likeness", 40, "likeness:figures"),
    Part("engine, FP8", 60, "engine:fp8"),
    Part("swap", 30, "swap:figures"),
    Part("engine, BF16", 60, "engine:bf16"),
    Part("deterministic", 60, "engine:deterministic"),
    Part("small kernels", 40, "small_kernels:figures"),
)
Run = Callable[[Part, Peaks, float], Iterator[Figure]]  # a part, within so many seconds; raises what is wrong with it


@dataclass
class Results:
    """What was found, and what went wrong, part by part."""

    figures: dict[str, list[Figure]] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def peaks(self) -> Peaks:
        return Peaks.of({figure.name: figure.value for figure in self.figures.get(PEAKS.name, [])})

    def json(self) -> dict[str, object]:
        figures = {part: [asdict(it) | {"met": it.met} for it in found] for part, found in self.figures.items()}
        return {"figures": figures, "faults": self.faults}


def measure(parts: Sequence[Part], run: Run, seconds: float) -> Results:
    """All parts, one after another, for as long as there is time."""
    results, deadline = Results(), time.monotonic() + seconds
    for part in parts:
        found = results.figures.setdefault(part.name, [])
        left = min(part.seconds, deadline - time.monotonic())
        try:
            if left < 1:
                raise TimeoutError("there was no time left for it")
            for figure in run(part, results.peaks, left):
                found.append(figure)
        except Exception as problem:  # noqa: BLE001  # the rest goes on
            results.faults[part.name] = " ".join(str(problem).split()) or type(problem).__name__
        status = results.faults.get(part.name, "done")
        print(f"{part.name}: {len(found)} figures, {status}", file=sys.stderr, flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure kernels and the engine on a GPU.")
    parser.add_argument("--seconds", type=float, default=330, help="that it may take in all")
    parser.add_argument("--json", type=Path, help="where the figures are written to")
    parser.add_argument("--gguf", type=Path, help="a model that llama.cpp is measured with too")
    parser.add_argument("--llama-bench", type=Path, help="that program, of a build for CUDA")
    parser.add_argument("--dry-run", action="store_true", help="at toy size, without a GPU")
    given = parser.parse_args(arguments)
    parts = list(PARTS)
    if given.gguf and given.llama_bench:
        parts.insert(2, Part("llama.cpp", 60, "llama_cpp:figures", paths=(given.gguf, given.llama_bench)))
    results = measure(parts, run_dry if given.dry_run else run_apart, given.seconds)
    if given.json:
        given.json.write_text(json.dumps(results.json(), indent=1))
    print(table(results.figures, results.faults), flush=True)
    return 1 if results.faults else 0


if __name__ == "__main__":
    sys.exit(main())
