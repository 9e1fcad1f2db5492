"""Which GPUs and drivers this machine has."""

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
    """Such as 550.54.14; empty where it does not say; None where no driver is loaded."""
    try:
        found = _VERSION.search(DRIVER.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[1] if found else ""


LEAST_CAPABILITY = (8, 0)  # kernels multiply bfloat16


@dataclass(frozen=True, slots=True)
class Unusable:
    """There is none, or what there is cannot be used."""

    reason: str
    remedy: str = ""
    is_there: bool = True  # a GPU, of which this is said


@cache
def find_gpu(index: int | None = None) -> Gpu | Unusable:
    """The GPU of a number, or the first that can be used."""
    if torch.version.cuda is None:
        remedy = "Install torch for CUDA: https://pytorch.org/get-started/locally/"
        return Unusable(f"torch {torch.__version__} is not built for CUDA", remedy, driver_version() is not None)
    if not torch.cuda.is_available():
        return Unusable("no GPU is there, or its driver is too old", "Update the driver.", driver_version() is not None)
    count = torch.cuda.device_count()
    if index is not None and index >= count:
        return Unusable(f"there is no GPU {index}: there are {count}, from 0 on")
    problem: Unusable | None = _toolchain_problem()
    for number in range(count) if index is None else [index]:
        if problem is not None:
            return problem
        card = read_card(number)
        if card.capability >= LEAST_CAPABILITY:
            return Gpu(card, number)
    capability = ".".join(map(str, LEAST_CAPABILITY))
    return Unusable(f"{card.name} is too old: kernels need compute capability {capability}")


def _toolchain_problem() -> Unusable | None:
    """What kernels are compiled and launched with."""
    try:
        prepare_compiler()
    except NoCompiler as problem:
        return Unusable(problem.message, problem.remedy)
    return None
