"""From an open checkpoint to a running engine: which device, how much memory, which model.

The one place where these choices are made. Refuses to know where the file came from and what a user typed.
"""

import contextlib
import ctypes
import gc
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine import models
from engine.blocks import root_key
from engine.checkpoint import Checkpoint, StoredWeight
from engine.config import ALL_FREE, TARGET_LATENCY, EngineConfig, MemoryLimit, ModelConfig, Preemption
from engine.copy_thread import CopyThread
from engine.core import Engine
from engine.device import Device
from engine.disk.folder import About, model_folder
from engine.disk.quota import Quota
from engine.disk.run_file import VERSION
from engine.disk.store import DiskStore
from engine.errors import OutOfMemory, UnsupportedModel
from engine.gguf_checkpoint import GGUFCheckpoint
from engine.kv_budget import KVBudget, available_memory
from engine.kv_cache import KVCache
from engine.quantizing import QuantizedCheckpoint
from engine.reference import ReferenceDevice
from engine.runner import ModelRunner, Runner, Ticket, reporting_shortage
from engine.safetensors_checkpoint import FolderCheckpoint
from engine.weights import LoadProgress, Weights, matrix_samples
from quant.cpu import tiers
from quant.cpu.layouts import Layout, layouts_of
from quant.errors import UnsupportedQuantization
from quant.kernels.card import Card

if TYPE_CHECKING:
    from engine.cuda.gpu import Gpu

log = logging.getLogger(__name__)

ModelEngine = Engine[Any]

BACKENDS = ("auto", "cuda", "cpu", "reference")
SMALL_MODEL = 500_000_000  # matrix elements: below, activations get two planes
MOST_LOADING_THREADS = 4  # more would wait for memory
KV_TYPES = {"auto": torch.float16, "f16": torch.float16, "int8": torch.int8}  # of the CPU kernels
AUTO_KV_TYPE = "Set kv_type to auto: INGLE_KV_TYPE=auto."
ANY_DEVICE, ANY_GPU = "auto", "cuda"
DEVICE_NAME = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Where computed blocks are kept when the process ends."""

    folder: Path  # of all models
    limit: int | None  # bytes of it; None: chosen by what is free
    model: str = ""  # what people call it


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the composition root asks for. Zero means: choose."""

    backend: str = "auto"
    context_length: int = 0
    threads: int = 0
    activation_planes: int = 0
    cpu_tier: str = "auto"  # one of `quant.cpu.tiers.CHOICES`
    kv_type: str = "auto"  # one of those that the device has
    host_cache: int | None = None  # bytes of the host pool; None: as many as suit the device, and none on a CPU
    device: str = ANY_DEVICE  # or cpu, or cuda, or cuda:N
    gpu_memory: MemoryLimit = ALL_FREE
    deterministic: bool = False  # on a GPU, too: what a request gets does not depend on what else runs
    step_depth: int = 0
    card: Card | None = None  # in place of a GPU: an interpreted one, with which kernels run on the CPU
    preemption: Preemption = Preemption.AUTO
    target_latency: float = TARGET_LATENCY
    fingerprint: str = ""  # sha256 of the model file, in hex; empty: not known
    disk: DiskOptions | None = None  # None: nothing is written to disk
    code_cache: Path | None = None  # where compiled kernels are kept, and measured tiles; None: for this process alone

    @property
    def asks_for_gpu(self) -> bool:
        """And for nothing else."""
        return self.backend == "cuda" or self.device.startswith(ANY_GPU) or self.card is not None


def open_checkpoint(path: Path, quantize: str | None = None) -> Checkpoint:
    """A GGUF file, or a folder with a config.json and safetensors files; quantized while it loads, by one of METHODS.

    Raises ModelFileError, UnsupportedModel or UnsupportedQuantization.
    """
    checkpoint: Checkpoint = FolderCheckpoint(path) if path.is_dir() else GGUFCheckpoint(path)
    return QuantizedCheckpoint(checkpoint, quantize) if quantize else checkpoint


@dataclass(frozen=True, slots=True)
class Ending:
    """What becomes of a decoder's last states: logits, of which a runner makes tokens, or something else."""

    config: Callable[[ModelConfig], ModelConfig]
    weights: type[Weights]
    runner: Callable[[ModelRunner], Runner[Ticket]] | None = None  # around the plain one; None: the device's own


NEXT_TOKEN = Ending(lambda model: model, Weights)


def load_engine(
    checkpoint: Checkpoint, options: LoadOptions, progress: LoadProgress | None = None, ending: Ending = NEXT_TOKEN
) -> ModelEngine:
    """The engine for an open checkpoint.

    Raises UnsupportedModel, UnsupportedTier, ModelFileError or OutOfMemory; nothing stays allocated then.
    """
    with reporting_shortage():
        return _load_engine(checkpoint, options, progress, ending)


def _load_engine(
    checkpoint: Checkpoint, options: LoadOptions, progress: LoadProgress | None, ending: Ending
) -> ModelEngine:
    model = ending.config(models.read_config(checkpoint.metadata))
    stored = models.stored_weights(checkpoint)
    if gpu := gpu_for(options):
        try:
            with reporting_shortage():
                return _load_on(_cuda_device(gpu, options, model), model, checkpoint, options, progress, ending)
        except (UnsupportedModel, UnsupportedQuantization, OutOfMemory) as problem:
            if options.asks_for_gpu:
                raise
            log.warning("%s is not used: %s", gpu.card.name, problem)
        gc.collect()
        gpu.drop_caches()
    return _load_on(_device(options, model, checkpoint.path, stored), model, checkpoint, options, progress, ending)


def _load_on(
    device: Device,
    model: ModelConfig,
    checkpoint: Checkpoint,
    options: LoadOptions,
    progress: LoadProgress | None,
    ending: Ending,
) -> ModelEngine:
    stored = models.stored_weights(checkpoint)
    weight_bytes = sum(weight.nbytes for weight in stored.values())
    config = _resolve(model, device, options, (options.fingerprint, checkpoint.digest), weight_bytes)
    weights = ending.weights(checkpoint.path, stored, progress, min(device.threads, MOST_LOADING_THREADS))
    loaded = device.load(model, weights, config)
    _return_freed_memory()
    config = config.with_pools([len(pool) for pool in loaded.kv.pools])
    store = _open_store(options, config, loaded.kv, str(device.kv_type).removeprefix("torch."))
    mover = CopyThread(loaded.kv, store) if config.host_blocks or store else None
    if ending.runner is None:
        runner = device.runner(loaded, model.vocab_size, config.groups)
    else:  # it looks at logits when a step is collected, where the next one must not have overwritten them
        config = replace(config, step_depth=1)
        runner = ending.runner(ModelRunner(loaded, model.vocab_size, config.groups))
    return Engine(config, model.vocab_size, runner, mover)


def _open_store(options: LoadOptions, config: EngineConfig, kv: KVCache, kv_type: str) -> DiskStore | None:
    """The files of the model: those that were written with the same weights, by the same kernels, in the same shape."""
    if options.disk is None or not options.fingerprint:
        return None
    fingerprint = root_key(*config.cache_salt, f"version {VERSION}", *map(str, kv.block_bytes))
    about = About(options.disk.model, options.fingerprint, config.backend, kv_type)
    folder = model_folder(options.disk.folder, fingerprint, about)
    return DiskStore(folder, fingerprint, kv.block_bytes, Quota(options.disk.folder, options.disk.limit))


def _resolve(
    model: ModelConfig, device: Device, options: LoadOptions, identity: tuple[str, ...], weight_bytes: int = 0
) -> EngineConfig:
    """The knobs of a run, with every choice made. Raises UnsupportedModel for a context that memory cannot hold."""
    step_tokens = device.step_tokens(model)
    layer = device.layer_shape(model.kv_heads, model.head_dim)
    budget = KVBudget(model, layer, device.kv_type, step_tokens, device.max_running)
    room = device.kv_room(model, weight_bytes)
    host_cache = device.host_cache if options.host_cache is None else options.host_cache
    context = budget.context(options.context_length, room)
    groups = budget.groups(budget.tokens(room, device.contexts * context))
    shape = repr((model.ropes, model.long_ropes(context), model.layout))
    return EngineConfig(
        backend=device.name,
        threads=device.threads,
        context_length=context,
        num_blocks=max(group.num_blocks for group in groups),
        model_context_length=model.context_length,
        max_running=device.max_running,
        step_depth=options.step_depth or device.step_depth,
        max_step_tokens=step_tokens,
        groups=groups,
        host_blocks=1 + host_cache // budget.block_bytes if host_cache else 0,
        block_bytes=budget.block_bytes,
        preemption=options.preemption,
        target_latency=options.target_latency,
        cache_salt=(*identity, *device.numerics, str(device.kv_type), shape),
    )


# -- which device


def gpu_for(options: LoadOptions) -> "Gpu | None":
    """The GPU that is used if the model allows. Raises UnsupportedModel where one is asked for that is not usable."""
    check_backend(options)
    if options.backend not in ("auto", "cuda") or options.device == "cpu":
        return None
    from engine.cuda.finding import Unusable, find_gpu
    from engine.cuda.gpu import Gpu

    if options.card is not None:
        return Gpu(options.card)
    _, _, number = options.device.partition(":")
    found = find_gpu(int(number) if number else None)
    if not isinstance(found, Unusable):
        return found
    if options.asks_for_gpu:
        raise UnsupportedModel(f"There is no GPU to use: {found.reason}", found.remedy or "Use --device auto.")
    if found.is_there:
        log.warning("the GPU is not used: %s. %s", found.reason, found.remedy)
    return None


def _cuda_device(gpu: "Gpu", options: LoadOptions, model: ModelConfig) -> Device:
    from engine.cuda.device import KV_TYPES as GPU_KV_TYPES
    from engine.cuda.device import CudaDevice, CudaOptions, why_unsupported
    from engine.cuda.tile_file import read_tiles

    if options.kv_type not in GPU_KV_TYPES:
        raise UnsupportedModel(f"The GPU kernels do not keep keys and values as {options.kv_type}", AUTO_KV_TYPE)
    if problem := why_unsupported(model):
        raise UnsupportedModel(f"The GPU kernels cannot run this model: {problem}", "Use --device cpu.")
    tiles = read_tiles(options.code_cache, gpu.card)
    kv_type = GPU_KV_TYPES[options.kv_type]
    return CudaDevice(gpu, CudaOptions(kv_type, options.deterministic, options.gpu_memory, tiles))


def layouts_are_compiled(layouts: frozenset[Layout] | None, options: LoadOptions) -> bool:
    """Whether loading starts at once, because these kernels were compiled on this machine before. None: it needs none.

    Raises UnsupportedTier.
    """
    if layouts is None or options.code_cache is None:
        return layouts is None
    from engine.cpu import code_cache

    return code_cache.is_compiled(options.code_cache, tiers.choose(options.cpu_tier), layouts)


def compile_layouts(layouts: frozenset[Layout] | None, options: LoadOptions) -> None:
    """What loading would do first, for whoever wants to tell the user about it. Raises UnsupportedTier."""
    if layouts is not None:
        from engine.cpu.code_cache import load_code

        load_code(options.code_cache, tiers.choose(options.cpu_tier), layouts)


def layouts_to_compile(checkpoint: Checkpoint, options: LoadOptions) -> frozenset[Layout] | None:
    """Those of the checkpoint's matrices; None where other kernels will be taken.

    Raises UnsupportedModel, UnsupportedQuantization or ModelFileError.
    """
    if not wants_cpu_kernels(options):
        return None
    from engine.cpu.device import why_unsupported

    samples = matrix_samples(models.stored_weights(checkpoint))
    if options.backend == "auto" and why_unsupported(models.read_config(checkpoint.metadata), samples):
        return None
    return layouts_of(samples)


def wants_cpu_kernels(options: LoadOptions) -> bool:
    return options.backend == "cpu" or (options.backend == "auto" and _has_compiler() and gpu_for(options) is None)


@cache
def _has_compiler() -> bool:
    try:
        import numba  # noqa: F401  # there is no build of it for every platform
    except ImportError:
        return False
    return True


def check_backend(options: LoadOptions) -> None:
    """Raises UnsupportedModel where the backend that is asked for is not there."""
    if options.backend not in BACKENDS:
        raise UnsupportedModel(f"There is no kernel backend {options.backend!r}", "Use --kernels auto.")
    if options.backend == "cpu" and not _has_compiler():
        raise UnsupportedModel("The fast CPU kernels need numba, which is not installed", "Use --kernels auto.")
    if not DEVICE_NAME.fullmatch(options.device):
        raise UnsupportedModel(f"There is no device {options.device!r}", "Use --device auto, cpu, cuda or cuda:N.")
    if options.device != ANY_DEVICE and options.backend not in ("auto", options.device.partition(":")[0]):
        raise UnsupportedModel(
            f"The {options.backend} kernels do not run on the device {options.device}", "Use --kernels auto."
        )


def _device(options: LoadOptions, model: ModelConfig, path: Path, stored: Mapping[str, StoredWeight]) -> Device:
    check_backend(options)
    if options.kv_type not in KV_TYPES:
        raise UnsupportedModel(f"There is no KV type {options.kv_type!r}", AUTO_KV_TYPE)
    if wants_cpu_kernels(options):
        from engine.cpu.device import CpuDevice, why_unsupported

        problem = why_unsupported(model, matrix_samples(stored))
        if problem is None:
            return CpuDevice(
                options.threads or physical_cores(),
                options.activation_planes or default_planes(model),
                tiers.choose(options.cpu_tier),
                options.code_cache,
                KV_TYPES[options.kv_type],
            )
        if options.backend == "cpu":
            raise UnsupportedModel(f"The fast CPU kernels cannot run {path}: {problem}", "Use --kernels auto.")
        log.warning("the plain kernels are used, which are slow: %s", problem)
    if options.kv_type != "auto":
        raise UnsupportedModel(
            f"The plain kernels keep keys and values as float32 alone, and not as {options.kv_type}", AUTO_KV_TYPE
        )
    keep = float32_bytes(model) <= available_memory() // 2
    return ReferenceDevice(keep_dequantized=keep, threads=options.threads or _spare_threads())


def _spare_threads() -> int:
    """Half of the cores: torch's threads wait for each other, so one that shares its core stops them all."""
    return max(1, (os.cpu_count() or 1) // 2)


def physical_cores() -> int:
    """Cores this process may use, hyperthreads of one core counted once: they share its vector units."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = set()
    for number in usable:
        try:
            with open(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list", encoding="ascii") as file:
                siblings.add(file.read())
        except OSError:
            siblings.add(str(number))
    return max(1, len(siblings))


def default_planes(model: ModelConfig) -> int:
    """Planes of int8 that activations are quantized into; see `quant.cpu.activations`.

    A small model answers at once either way, and rounding shows most in it: it gets two, and answers as in float32. A
    large one gets the one that all integer engines use, and reads prompts nearly twice as fast.
    """
    return 2 if model.matrix_elements < SMALL_MODEL else 1


def float32_bytes(model: ModelConfig) -> int:
    """About how many bytes the model's matrices take as float32."""
    return 4 * model.matrix_elements


def _return_freed_memory() -> None:
    """Give the system what was freed. Glibc keeps some for each thread that loaded; others have no such function."""
    with contextlib.suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
