"""Find a usable GPU, and the version of the NVIDIA driver."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from engine.backends.cuda.compiler import prepare_compiler
from engine.backends.cuda.gpu import Gpu, read_card
from engine.errors import NoCompiler

DRIVER = Path("/proc/driver/nvidia/version")
_VERSION = re.compile(r"\b(\d{3}\.\d+(?:\.\d+)?)\b")


def driver_version() -> str | None:
    """Return the driver version, such as 550.54.14; "" if it is unknown; None if no driver is loaded."""
    try:
        found = _VERSION.search(DRIVER.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[1] if found else ""


MIN_CAPABILITY = (8, 0)  # bfloat16 matrix instructions require this compute capability


@dataclass(frozen=True, slots=True)
class Unusable:
    """The reason why no GPU can be used."""

    reason: str
    remedy: str = ""
    is_present: bool = True  # whether the machine seems to have a GPU


@cache
def find_gpu(index: int | None = None) -> Gpu | Unusable:
    """Return the GPU with this index, or the first usable one. Returns Unusable if there is none."""
    if torch.version.cuda is None:
        remedy = "Install torch for CUDA: https://pytorch.org/get-started/locally/"
        return Unusable(f"torch {torch.__version__} is not built for CUDA", remedy, driver_version() is not None)
    if not torch.cuda.is_available():
        return Unusable("there is no GPU, or its driver is too old", "Update the driver.", driver_version() is not None)
    count = torch.cuda.device_count()
    if index is not None and index >= count:
        return Unusable(f"there is no GPU {index}: this machine has GPUs 0 to {count - 1}")
    problem: Unusable | None = _toolchain_problem()
    for number in range(count) if index is None else [index]:
        if problem is not None:
            return problem
        card = read_card(number)
        if card.capability >= MIN_CAPABILITY:
            return Gpu(card, number)
    capability = ".".join(map(str, MIN_CAPABILITY))
    return Unusable(f"{card.name} is too old: the kernels need compute capability {capability} or higher")


def _toolchain_problem() -> Unusable | None:
    """Return why kernels cannot be compiled and launched, or None."""
    try:
        prepare_compiler()
    except NoCompiler as problem:
        return Unusable(problem.message, problem.remedy)
    return None
