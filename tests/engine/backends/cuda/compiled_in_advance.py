"""Compile the kernels of a model in advance for a GPU that is not there, and check that nothing is left to compile.

Recording must not launch the kernels that a model loaded before has launched: without a GPU, that raises.

    python -m tests.engine.backends.cuda.compiled_in_advance

A process without Triton's interpreter, which replaces the compiler. Prints the numbers of kernels.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine import models
from engine.backends.cuda.batch_tensors import BatchLimits
from engine.backends.cuda.device import CudaDevice, CudaOptions
from engine.backends.cuda.gpu import Gpu
from engine.backends.cuda.kernel_compilation import FirstLaunches, compile_kernels, recording_kernels
from engine.backends.cuda.kernel_launches import launch_every_kernel
from engine.backends.cuda.step import CudaStep
from engine.loading import open_checkpoint
from engine.model_config import ModelConfig
from tests.engine.backends.cuda.two_devices import INTERPRETED, load
from tests.engine.models.tiny_llama import make

LIMITS = BatchLimits(tokens=32, requests=4, table_blocks=4, groups=1)


class AbsentGpu:
    """Triton's driver of an H100, as far as compiling takes it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def tiny_step(folder: Path) -> tuple[CudaStep, ModelConfig]:
    path = make(folder, heads=2, kv_heads=1, layers=1).path
    with open_checkpoint(path) as checkpoint:
        model = models.read_config(checkpoint.metadata)
    step = load(path, CudaDevice(Gpu(INTERPRETED), CudaOptions())).model.compute
    assert isinstance(step, CudaStep)
    return step, model


def launches_from_cache(step: CudaStep, model: ModelConfig) -> list[bool]:
    """Launch all kernels up to the call of the driver. Return for each whether it was in the cache on disk.

    Afterwards, this process knows the kernels.
    """
    hits: list[bool] = []
    known: list[tuple[dict[Any, Any], Any, Any]] = []
    compile_and_run = JITFunction._do_compile

    def compile_only(self: Any, key: Any, signature: Any, device: Any, *others: Any) -> None:
        compile_and_run(self, key, signature, device, *others)
        kernels = self.device_caches[device][0]
        known.append((kernels, key, kernels.pop(key)))

    with knobs.compilation.scope(), mock.patch.object(JITFunction, "_do_compile", compile_only):
        knobs.compilation.listener = lambda **compiled: hits.append(compiled["cache_hit"])
        launch_every_kernel(step, LIMITS, model)
    for kernels, key, kernel in known:
        kernels[key] = kernel
    return hits


def main() -> int:
    driver.set_active(AbsentGpu())
    reported: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        step, model = tiny_step(Path(folder))
        first = FirstLaunches()
        first.watch()
        with recording_kernels() as variants:
            launch_every_kernel(step, LIMITS, model)
        assert first.count == 0
        compile_kernels(variants, lambda done, total: reported.append((done, total)))
        assert all(variant.is_cached() for variant in variants)
        again = len(reported)
        compile_kernels(variants, lambda done, total: reported.append((done, total)))
        assert len(reported) == again
        hits = launches_from_cache(step, model)
        with recording_kernels() as unknown:
            launch_every_kernel(step, LIMITS, model)
        assert not unknown
    print(f"{len(variants)} recorded, {reported[0][1]} compiled, {len(hits)} launched, {first.count} first launches")
    assert hits
    assert all(hits), f"{hits.count(False)} kernels were not compiled in advance"
    assert first.count == len(hits)
    assert reported == [(done, len(variants)) for done in range(len(variants) + 1)]
    return 0


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
