"""Run one part of the benchmark in its own process, because it may crash or hang. A dry run uses this process.

    python -m tests.gpu.part ENTRY_POINT PEAKS FIGURES [PATH ...]

The command above runs in that process. It appends each figure to the file FIGURES, so that figures measured before a
crash are kept.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

from tests.gpu.figures import Figure, Peaks

MAX_ERROR_LENGTH = 4000  # characters of a failed process's output that are reported


@dataclass(frozen=True, slots=True)
class Part:
    """A function that yields figures."""

    name: str
    seconds: float  # time limit
    entry_point: str  # module:function
    cold: bool = False  # start with an empty cache of compiled kernels
    paths: tuple[Path, ...] = ()


def function(entry_point: str) -> Callable[..., Iterator[Figure]]:
    module, name = entry_point.split(":")
    found: Callable[..., Iterator[Figure]] = getattr(import_module(f"tests.gpu.{module}"), name)
    return found


def run_in_process(part: Part, peaks: Peaks, seconds: float) -> Iterator[Figure]:
    """Run a part in a process and yield its figures. Then raises TimeoutError or RuntimeError if the part failed."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        output_file, figures_file = folder / "output", folder / "figures"
        figures_file.touch()
        cold = {"TRITON_CACHE_DIR": str(folder / "triton")} if part.cold else {}
        paths = map(str, (figures_file, *part.paths))
        command = [sys.executable, "-m", "tests.gpu.part", part.entry_point, json.dumps(asdict(peaks)), *paths]
        output = stack.enter_context(output_file.open("wb"))
        child = subprocess.Popen(
            command, env={**os.environ, **cold}, stdout=output, stderr=output, start_new_session=True
        )
        status = _status_within(child, seconds)
        for line in figures_file.read_text().splitlines():
            yield Figure(**json.loads(line))
        if status is None:
            raise TimeoutError(f"not done after {seconds:.0f} s")
        if status:
            raise RuntimeError(
                f"status {status}: {output_file.read_text(errors='replace').strip()[-MAX_ERROR_LENGTH:]}"
            )


def _status_within(child: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """Return the exit status, or None if the process and its children had to be killed."""
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return None


def run_dry(part: Part, peaks: Peaks, seconds: float) -> Iterator[Figure]:
    """Run a part in this process with toy sizes and Triton's interpreter."""
    from tests.gpu.machine import DRY_CARD, Machine
    from tests.support.triton_interpreter import install

    install()
    return function(part.entry_point)(Machine(DRY_CARD, peaks), *part.paths)


def main() -> None:
    entry_point, peaks, figures_file, *paths = sys.argv[1:]
    figures = function(entry_point)

    import torch

    from engine.backends.cuda.gpu import read_card
    from tests.gpu.machine import Machine

    machine = Machine(read_card(torch.cuda.current_device()), Peaks(**json.loads(peaks)))
    with Path(figures_file).open("a") as file, torch.inference_mode():
        for figure in figures(machine, *map(Path, paths)):
            file.write(json.dumps(asdict(figure)) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
