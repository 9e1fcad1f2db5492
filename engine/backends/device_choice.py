"""Choose the device and kernels for a model, from the options, the hardware, and the limits of the kernels."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine import models
from engine.backends.reference import ReferenceDevice
from engine.checkpoints.checkpoint import Checkpoint, StoredWeight
from engine.checkpoints.weights import MAX_LOADING_THREADS, matrix_samples
from engine.config import default_activation_bits
from engine.device import Device
from engine.errors import UnsupportedModel
from engine.kv.budget import HostMemory
from engine.load_options import ANY_DEVICE, LoadOptions
from engine.model_config import ModelConfig
from quant.cpu import tiers
from quant.cpu.layouts import Layout, layouts_of

if TYPE_CHECKING:
    from engine.backends.cuda.device import CudaDevice
    from engine.backends.cuda.gpu import Gpu

log = logging.getLogger(__name__)

BACKENDS = ("auto", "cuda", "cpu", "reference")
KV_TYPES = {"auto": torch.float16, "f16": torch.float16, "int8": torch.int8}  # types of the KV cache on a CPU
AUTO_KV_TYPE = "Set kv_type to auto: INGLE_KV_TYPE=auto."
DEVICE_NAME = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


def gpu_for(options: LoadOptions) -> "Gpu | None":
    """Return the GPU to use, or None if there is none or its kernels do not support the model.

    Raises UnsupportedModel if the options require a GPU and none is usable.
    """
    check_backend(options)
    if options.backend not in ("auto", "cuda") or options.device == "cpu":
        return None
    from engine.backends.cuda.discovery import Unusable, find_gpu
    from engine.backends.cuda.gpu import Gpu

    if options.card is not None:
        return Gpu(options.card)
    _, _, number = options.device.partition(":")
    found = find_gpu(int(number) if number else None)
    if not isinstance(found, Unusable):
        return found
    if options.asks_for_gpu:
        raise UnsupportedModel(f"No GPU can be used: {found.reason}", found.remedy or "Use --device auto.")
    if found.is_present:
        log.warning("the GPU is not used: %s. %s", found.reason, found.remedy)
    return None


def cuda_device(gpu: "Gpu", options: LoadOptions, model: ModelConfig) -> "CudaDevice":
    from engine.backends.cuda.device import KV_TYPES as GPU_KV_TYPES
    from engine.backends.cuda.device import CudaDevice, CudaOptions, why_unsupported
    from engine.backends.cuda.tile_file import read_tiles

    if options.kv_type not in GPU_KV_TYPES:
        raise UnsupportedModel(f"The GPU kernels do not support the KV cache type {options.kv_type}", AUTO_KV_TYPE)
    if problem := why_unsupported(model):
        raise UnsupportedModel(f"The GPU kernels cannot run this model: {problem}", "Use --device cpu.")
    tiles = read_tiles(options.code_cache, gpu.card)
    kv_type = GPU_KV_TYPES[options.kv_type]
    memory = options.gpu_memory, _host_memory(options), options.draft_memory
    chosen = CudaOptions(
        kv_type, options.deterministic, *memory, tiles, options.activation_bits, control=options.control
    )
    if options.report_kernels is not None:
        chosen = replace(chosen, report_kernels=options.report_kernels)
    return CudaDevice(gpu, chosen)


def layouts_are_compiled(layouts: frozenset[Layout] | None, options: LoadOptions) -> bool:
    """Whether the code cache holds all kernels that loading needs; None if the model uses no CPU kernels.

    Raises UnsupportedTier.
    """
    if layouts is None or options.code_cache is None:
        return layouts is None
    from engine.backends.cpu import code_cache

    return code_cache.is_compiled(options.code_cache, tiers.choose(options.cpu_tier), layouts)


def why_code_is_not_cached(options: LoadOptions) -> str:
    """Return the code cache folder, and the reason why it cannot be written.

    The reason is an empty string if the folder can be written, or if no cache folder is configured.
    """
    if options.code_cache is None:
        return ""
    from engine.backends.cpu import code_cache

    problem = code_cache.why_not_cached(options.code_cache, tiers.choose(options.cpu_tier))
    return f"{options.code_cache} ({problem})" if problem else ""


def compile_layouts(layouts: frozenset[Layout] | None, options: LoadOptions) -> None:
    """Compile the kernels that loading will need, so that the caller can report progress. Raises UnsupportedTier."""
    if layouts is not None:
        from engine.backends.cpu.code_cache import load_code

        load_code(options.code_cache, tiers.choose(options.cpu_tier), layouts)


def layouts_to_compile(checkpoint: Checkpoint, options: LoadOptions) -> frozenset[Layout] | None:
    """Return the layouts of the checkpoint's matrices, or None if the CPU kernels will not be used.

    Raises UnsupportedModel, UnsupportedQuantization, or ModelFileError.
    """
    if not wants_cpu_kernels(options):
        return None
    from engine.backends.cpu.device import why_unsupported

    samples = matrix_samples(models.stored_weights(checkpoint))
    if options.backend == "auto" and why_unsupported(models.read_config(checkpoint.metadata), samples):
        return None
    return layouts_of(samples)


def wants_cpu_kernels(options: LoadOptions) -> bool:
    return options.backend == "cpu" or (options.backend == "auto" and _has_compiler() and gpu_for(options) is None)


@cache
def _has_compiler() -> bool:
    try:
        import numba  # noqa: F401 # numba is not available on all platforms
    except ImportError:
        return False
    return True


def check_backend(options: LoadOptions) -> None:
    """Raise UnsupportedModel if the options name an unknown or unavailable backend or device."""
    if options.backend not in BACKENDS:
        raise UnsupportedModel(f"There is no kernel backend {options.backend!r}", "Use --kernels auto.")
    if options.backend == "cpu" and not _has_compiler():
        raise UnsupportedModel("The fast CPU kernels need numba, which is not installed", "Use --kernels auto.")
    if not DEVICE_NAME.fullmatch(options.device):
        raise UnsupportedModel(f"There is no device {options.device!r}", "Use --device auto, cpu, cuda, or cuda:N.")
    if options.device != ANY_DEVICE and options.backend not in ("auto", options.device.partition(":")[0]):
        raise UnsupportedModel(
            f"The {options.backend} kernels do not run on the device {options.device}", "Use --kernels auto."
        )


def host_device(options: LoadOptions, model: ModelConfig, path: Path, stored: Mapping[str, StoredWeight]) -> Device:
    check_backend(options)
    if options.kv_type not in KV_TYPES:
        raise UnsupportedModel(f"There is no KV cache type {options.kv_type!r}", AUTO_KV_TYPE)
    memory = replace(_host_memory(options), reserved=options.draft_memory)
    if wants_cpu_kernels(options):
        from engine.backends.cpu.device import CpuDevice, why_unsupported

        problem = why_unsupported(model, matrix_samples(stored))
        if problem is None:
            from engine.backends.cpu.memory import loading_bytes

            threads = options.threads or physical_cores()
            loading = loading_bytes(stored, min(threads, MAX_LOADING_THREADS))
            return CpuDevice(
                threads,
                options.activation_bits or default_activation_bits(model.matrix_elements),
                tiers.choose(options.cpu_tier),
                options.code_cache,
                KV_TYPES[options.kv_type],
                replace(memory, loading=loading),
                options.cpu_threads,
            )
        if options.backend == "cpu":
            raise UnsupportedModel(f"The fast CPU kernels cannot run {path}: {problem}", "Use --kernels auto.")
        log.warning("falling back to the slow reference kernels: %s", problem)
    if options.kv_type != "auto":
        raise UnsupportedModel(
            f"The reference kernels store keys and values as float32 only, not as {options.kv_type}", AUTO_KV_TYPE
        )
    keep = float32_bytes(model) <= memory.limit // 2
    return ReferenceDevice(keep_dequantized=keep, threads=options.threads or _spare_threads(), memory=memory)


def _host_memory(options: LoadOptions) -> HostMemory:
    return HostMemory(options.host_memory, options.assumed_memory, options.host_cache)


def _spare_threads() -> int:
    """Return half of the cores. torch's threads wait for each other, so a single busy core delays all of them."""
    return max(1, (os.cpu_count() or 1) // 2)


def physical_cores() -> int:
    """Return the number of physical cores that this process may use. Hyperthreads of a core share its vector units."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = set()
    for number in usable:
        try:
            with open(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list", encoding="ascii") as file:
                siblings.add(file.read())
        except OSError:
            siblings.add(str(number))
    return max(1, len(siblings))


def float32_bytes(model: ModelConfig) -> int:
    """Return the approximate number of bytes that the model's matrices take as float32."""
    return 4 * model.matrix_elements
