"""Which GPU of this machine can be used, and why one cannot.

Looks, and has a C compiler tried. Refuses to know who asks, and what happens where there is no GPU.
"""

from dataclasses import dataclass
from functools import cache

import torch

from engine.cuda.compiler import prepare_compiler
from engine.cuda.driver import driver_version
from engine.cuda.gpu import Gpu, read_card
from engine.errors import NoCompiler

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
