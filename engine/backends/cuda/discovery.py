"""Find a usable GPU: one that is new enough, and on which a kernel runs."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from engine.backends.cuda.compiler import prepare_compiler
from engine.backends.cuda.driver import driver_version, free_memories, too_old_for
from engine.backends.cuda.gpu import Gpu, read_card
from engine.backends.device_errors import first_line
from engine.errors import NoCompiler

log = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)  # bfloat16 matrix instructions require this compute capability
REPORT = "Update the driver and torch, or use --device cpu."


@dataclass(frozen=True, slots=True)
class Unusable:
    """The reason why no GPU can be used."""

    reason: str
    remedy: str = ""
    is_present: bool = True  # whether the machine seems to have a GPU


@cache
def find_gpu(index: int | None = None) -> Gpu | Unusable:
    """Return the GPU with this index, or the usable one with the most free memory. Returns Unusable if there is none.

    The GPU has run a kernel.
    """
    try:
        return _missing_driver() or _found(index)
    except NoCompiler as problem:
        return Unusable(problem.message, problem.remedy)
    except Exception as error:  # noqa: BLE001 # CUDA and Triton raise errors of any type
        return Unusable(f"CUDA cannot be used: {first_line(error)}", REPORT)


def _missing_driver() -> Unusable | None:
    """Return why torch finds no GPU, or None if it finds any."""
    version, cuda = driver_version(), torch.version.cuda
    if cuda is None:
        remedy = "Install torch for CUDA: https://pytorch.org/get-started/locally/"
        return Unusable(f"torch {torch.__version__} is not built for CUDA", remedy, version is not None)
    if torch.cuda.is_available():
        return None
    if least := too_old_for(cuda, version):
        remedy = f"Update the driver to {least} or newer, or install torch for an older CUDA."
        return Unusable(f"the driver {version} is too old for CUDA {cuda}, which torch is built for", remedy)
    if version is None:
        return Unusable("there is no GPU, or no driver is loaded", "Install NVIDIA's driver.", is_present=False)
    return Unusable(f"the driver {version} reports no GPU", REPORT)


def _found(index: int | None) -> Gpu | Unusable:
    from engine.backends.cuda.trial_kernel import why_kernels_fail

    count = torch.cuda.device_count()
    if index is not None and index >= count:
        return Unusable(f"there is no GPU {index}: this machine has GPUs 0 to {count - 1}")
    gpus = [Gpu(read_card(number), number) for number in (range(count) if index is None else [index])]
    fitting = [gpu for gpu in gpus if gpu.card.capability >= MIN_CAPABILITY]
    if not fitting:
        capability = ".".join(map(str, MIN_CAPABILITY))
        return Unusable(f"{gpus[-1].card.name} is too old: the kernels need compute capability {capability} or higher")
    prepare_compiler()
    failures: list[str] = []
    for gpu in _by_free_memory(fitting):
        if not (failure := why_kernels_fail(gpu)):
            return _with_trial_of_early_start(gpu)
        failures.append(f"{gpu.card.name}: {failure}")
    return Unusable("; ".join(failures), REPORT)


def _with_trial_of_early_start(gpu: Gpu) -> Gpu:
    """Return the GPU, without early start if a trial of it fails. Steps are then only slower."""
    from engine.backends.cuda.trial_kernel import why_early_start_fails

    if not gpu.card.starts_early or not (failure := why_early_start_fails(gpu)):
        return gpu
    log.warning("kernels on %s do not start early: %s", gpu.card.name, failure)
    return replace(gpu, card=replace(gpu.card, early_start_fails=True))


def _by_free_memory(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs, those with the most free memory first."""
    if len(gpus) == 1:
        return list(gpus)
    free = free_memories()

    def memory(gpu: Gpu) -> int:
        found: Any = torch.cuda.get_device_properties(gpu.index)  # torch's type hints lack some attributes
        return free.get(str(getattr(found, "uuid", "")), 0) if free else gpu.card.memory_bytes

    return sorted(gpus, key=memory, reverse=True)
