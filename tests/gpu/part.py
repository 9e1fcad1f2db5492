"""One part of the benchmark: run in a process of its own, which may crash or hang, or, where nothing is measured, here.

    python -m tests.gpu.part PLACE PEAKS FIGURES [PATH ...]

is that process: what it finds goes to the file FIGURES, line by line, so that what was found before it ended is known.
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

LAST_WORDS = 400  # characters of what a process said that failed


@dataclass(frozen=True, slots=True)
class Part:
    """A function that yields figures."""

    name: str
    seconds: float  # that it may take
    place: str  # module:function
    cold: bool = False  # with a cache of compiled kernels of its own, which is empty
    paths: tuple[Path, ...] = ()


def function(place: str) -> Callable[..., Iterator[Figure]]:
    module, name = place.split(":")
    found: Callable[..., Iterator[Figure]] = getattr(import_module(f"tests.gpu.{module}"), name)
    return found


def run_apart(part: Part, peaks: Peaks, seconds: float) -> Iterator[Figure]:
    """Yields what it found, then raises TimeoutError or RuntimeError where it did not end well."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        said, found = folder / "said", folder / "figures"
        found.touch()
        cold = {"TRITON_CACHE_DIR": str(folder / "triton")} if part.cold else {}
        paths = map(str, (found, *part.paths))
        command = [sys.executable, "-m", "tests.gpu.part", part.place, json.dumps(asdict(peaks)), *paths]
        output = stack.enter_context(said.open("wb"))
        child = subprocess.Popen(
            command, env={**os.environ, **cold}, stdout=output, stderr=output, start_new_session=True
        )
        status = _status_within(child, seconds)
        for line in found.read_text().splitlines():
            yield Figure(**json.loads(line))
        if status is None:
            raise TimeoutError(f"it was not done after {seconds:.0f} s")
        if status:
            raise RuntimeError(f"status {status}: {said.read_text(errors='replace').strip()[-LAST_WORDS:]}")


def _status_within(child: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """None: it had to be killed, with all that it had started."""
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return None


def run_dry(part: Part, peaks: Peaks, seconds: float) -> Iterator[Figure]:
    """Here, at toy size. Triton must interpret kernels in this process."""
    from tests.gpu.machine import DRY_CARD, Machine
    from tests.support.triton_interpreter import install

    install()
    return function(part.place)(Machine(DRY_CARD, peaks), *part.paths)


def main() -> None:
    place, peaks, found, *paths = sys.argv[1:]
    figures = function(place)

    import torch

    from engine.backends.cuda.gpu import read_card
    from tests.gpu.machine import Machine

    machine = Machine(read_card(torch.cuda.current_device()), Peaks(**json.loads(peaks)))
    with Path(found).open("a") as file, torch.inference_mode():
        for figure in figures(machine, *map(Path, paths)):
            file.write(json.dumps(asdict(figure)) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
