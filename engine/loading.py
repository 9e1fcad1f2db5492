"""Loading: turn an open checkpoint into a running engine on a device, with all options resolved."""

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from engine import models
from engine.backends.device_choice import cuda_device, gpu_for, host_device
from engine.backends.device_errors import first_line, raising_out_of_memory
from engine.backends.runner import ModelRunner, Ticket
from engine.checkpoints.checkpoint import Checkpoint, StoredWeight, host_weight_bytes
from engine.checkpoints.gguf import GGUFCheckpoint
from engine.checkpoints.quantizing import QuantizedCheckpoint
from engine.checkpoints.safetensors import SafetensorsCheckpoint
from engine.checkpoints.weights import LoadProgress, Weights
from engine.config import EngineConfig, MemoryLimit
from engine.core import Engine
from engine.device import Device, LoadedModel
from engine.drafting.draft_model import DraftModel
from engine.errors import DeviceLost, NoCompiler, OutOfMemory, UnsupportedModel
from engine.freed_memory import FreeingOnError, trim
from engine.kv.blocks import root_key
from engine.kv.budget import KVBudget
from engine.kv.cache import KVCache, kv_groups
from engine.kv.disk.folder import About, model_folder
from engine.kv.disk.quota import Quota
from engine.kv.disk.segment_file import VERSION
from engine.kv.disk.store import DiskStore
from engine.kv.parked_cache import ParkedCache, ParkedCopies, ParkedPools
from engine.kv.threaded_transfer import ThreadedTransfer
from engine.load_options import LoadOptions
from engine.mixer_config import StateConfig
from engine.model_config import ModelConfig
from engine.step import Runner
from quant.errors import InglenookError, UnsupportedQuantization

log = logging.getLogger(__name__)

ModelEngine = Engine[Any]


def open_checkpoint(path: Path, quantize: str | None = None) -> Checkpoint:
    """Open a GGUF file, or a folder with config.json and safetensors files.

    `quantize` names one of METHODS, which is applied to the weights while they load. Raises ModelFileError,
    UnsupportedModel, or UnsupportedQuantization.
    """
    checkpoint: Checkpoint = SafetensorsCheckpoint(path) if path.is_dir() else GGUFCheckpoint(path)
    with ExitStack() as undo:
        undo.callback(checkpoint.close)
        opened = QuantizedCheckpoint(checkpoint, quantize) if quantize else checkpoint
        undo.pop_all()
        return opened


@dataclass(frozen=True, slots=True)
class OutputStage:
    """How a decoder's last hidden states are used: for logits, or for something else, such as embeddings."""

    config: Callable[[ModelConfig], ModelConfig]
    weights: type[Weights]
    # wraps the plain runner; None: use the device's own runner
    runner: Callable[[ModelRunner], Runner[Ticket]] | None = None


NEXT_TOKEN = OutputStage(lambda model: model, Weights)
DRAFT_CONTEXT = 16_384  # longest requests in tokens for which a model drafts, unless the user chose a context


def load_engine(
    checkpoint: Checkpoint,
    options: LoadOptions,
    progress: LoadProgress | None = None,
    output: OutputStage = NEXT_TOKEN,
    parked: ParkedCache | None = None,
) -> ModelEngine:
    """Load a checkpoint into an engine.

    `parked`: the cache of an earlier engine, which is used if it fits the same model and configuration.

    Raises UnsupportedModel, UnsupportedTier, ModelFileError, OutOfMemory, or LoadStopped, after releasing everything it
    allocated.
    """
    with FreeingOnError(), raising_out_of_memory():
        return _load_engine(checkpoint, options, progress, output, parked)


def _load_engine(
    checkpoint: Checkpoint,
    options: LoadOptions,
    progress: LoadProgress | None,
    output: OutputStage,
    parked: ParkedCache | None,
) -> ModelEngine:
    model = output.config(models.read_config(checkpoint.metadata))
    stored = models.stored_weights(checkpoint)
    if gpu := gpu_for(options):
        try:
            with raising_out_of_memory():
                on_gpu = replace(options, turns=None)  # the steps of a GPU are in the order of their launch
                return _load_on(cuda_device(gpu, options, model), model, checkpoint, on_gpu, progress, output, parked)
        except Exception as problem:  # CUDA and Triton raise errors of any type
            if options.asks_for_gpu or not _cpu_may_succeed(problem):
                raise
            log.warning("%s is not used: %s", gpu.card.name, first_line(problem))
            log.debug("loading on the GPU failed", exc_info=problem)
        gc.collect()
        with suppress(RuntimeError):  # the GPU may have stopped working
            gpu.drop_caches()
        options = replace(options, device="cpu")
    device = host_device(options, model, checkpoint.path, stored)
    return _load_on(device, model, checkpoint, options, progress, output, parked)


def load_draft_model(
    checkpoint: Checkpoint, options: LoadOptions, engine: ModelEngine, progress: LoadProgress | None = None
) -> DraftModel:
    """Load a small model that drafts for an engine, with the engine's load options. Its vocabulary must be the same.

    It takes the memory that the options leave for it. Raises the errors of `load_engine`, and UnsupportedModel if the
    engine verifies no drafts, or if the small model has states.
    """
    if not engine.config.drafts:
        raise UnsupportedModel(f"The {engine.config.backend} engine verifies no drafts here", "Leave out --draft.")
    model = models.read_config(checkpoint.metadata)
    if any(isinstance(cache, StateConfig) for cache in model.caches):
        raise UnsupportedModel(
            f"{checkpoint.path} has recurrent layers, whose states cannot be reset after a wrong draft",
            "Choose another model with --draft.",
        )
    stored = models.stored_weights(checkpoint)
    options = draft_options(options)
    context = min(options.context_length, engine.config.context_length, model.context_length)
    options = replace(options, context_length=context)
    with FreeingOnError(), raising_out_of_memory():
        device = _same_device(engine, options, model, checkpoint.path, stored)
        config = _resolve(model, device, options, ("drafts",), device.weight_bytes(stored))
        weights = Weights(checkpoint.path, stored, progress, device.threads, options.control)
        loaded, config = _load_weights(device, model, weights, config)
        with ExitStack() as undo:
            undo.callback(loaded.close)
            runner = device.runner(loaded, model.vocab_size, config.groups)
            drafting = DraftModel(config, model.vocab_size, engine.vocab_size, runner)
            drafting.measure()
            undo.pop_all()
    return drafting


def draft_options(options: LoadOptions) -> LoadOptions:
    """Return the load options of a draft model for an engine with these options."""
    return replace(
        options,
        context_length=options.context_length or DRAFT_CONTEXT,
        gpu_memory=MemoryLimit(options.draft_memory),
        host_memory=options.draft_memory,
        draft_memory=0,
        host_cache=0,
        disk=None,
    )


def _same_device(
    engine: ModelEngine, options: LoadOptions, model: ModelConfig, path: Path, stored: Mapping[str, StoredWeight]
) -> Device:
    """Return the device of an engine, for a model that runs beside it."""
    gpu = gpu_for(options)
    if gpu and engine.config.backend == "cuda":
        return cuda_device(gpu, replace(options, host_memory=0), model)
    if gpu:  # the engine's model could not be loaded there, and the planned memory is that of the GPU
        options = replace(options, device="cpu", host_memory=0)
    return host_device(options, model, path, stored)


def compile_gpu_kernels(checkpoint: Checkpoint, options: LoadOptions, progress: LoadProgress | None = None) -> None:
    """Compile the kernels of a model for the GPU that would run it, so that a later load finds them.

    Does nothing if no GPU would. Raises the errors of `load_engine`.
    """
    if gpu := gpu_for(options):
        model, stored = models.read_config(checkpoint.metadata), models.stored_weights(checkpoint)
        with raising_out_of_memory():
            device = cuda_device(gpu, options, model)
            config = _resolve(model, device, options, (), device.weight_bytes(stored))
            weights = Weights(checkpoint.path, stored, progress, device.threads, options.control)
            device.compile_kernels(model, weights, config)


def _cpu_may_succeed(problem: Exception) -> bool:
    """Whether a model that could not be loaded on a GPU may load on the CPU. A damaged file fails on both."""
    gpu_problems = (UnsupportedModel, UnsupportedQuantization, OutOfMemory, DeviceLost, NoCompiler)
    return isinstance(problem, gpu_problems) or not isinstance(problem, InglenookError)


def _load_on(
    device: Device,
    model: ModelConfig,
    checkpoint: Checkpoint,
    options: LoadOptions,
    progress: LoadProgress | None,
    output: OutputStage,
    parked: ParkedCache | None = None,
) -> ModelEngine:
    stored = models.stored_weights(checkpoint)
    identity = options.fingerprint, checkpoint.digest
    config = _resolve(model, device, options, identity, device.weight_bytes(stored), host_weight_bytes(stored))
    weights = output.weights(checkpoint.path, stored, progress, device.threads, options.control)
    pools: Sequence[Tensor] = ()
    fitted = parked.fitted(config, kv_groups(model, device.layer_block)) if parked and options.fingerprint else None
    if parked and fitted:
        config, pools = fitted, parked.take_pools()
    loaded, config = _load_weights(device, model, weights, config, pools)
    with ExitStack() as undo:
        undo.callback(loaded.close)
        options.control.check()
        engine = _engine(model, device, options, output, loaded, config)
        undo.pop_all()
        undo.callback(engine.close)
        if parked and fitted:
            _adopt(engine, parked, loaded.kv)
        undo.pop_all()
    return engine


def _adopt(engine: ModelEngine, parked: ParkedCache, kv: KVCache) -> None:
    """Let an engine use a parked cache, unless it cannot be copied to the device."""
    try:
        index = parked.take_index(kv)
    except RuntimeError as problem:
        log.warning("the parked KV cache is dropped: %s", first_line(problem))
        return
    engine.adopt(index)


def _engine(
    model: ModelConfig,
    device: Device,
    options: LoadOptions,
    output: OutputStage,
    loaded: LoadedModel,
    config: EngineConfig,
) -> ModelEngine:
    store = _open_store(options, config, loaded.kv, str(device.kv_type).removeprefix("torch."))
    block_transfer = ThreadedTransfer(loaded.kv, store) if config.host_pool_sizes or store else None
    if output.runner is None:
        runner = device.runner(loaded, model.vocab_size, config.groups)
    else:  # this runner reads logits when a step is collected, so the next step must not have overwritten them
        config = replace(config, step_depth=1, drafts=False)
        runner = output.runner(ModelRunner(loaded, model.vocab_size, config.groups))
    turn = options.turns.join() if options.turns else None
    park = partial(ParkedPools if loaded.kv.computes_on_host else ParkedCopies, config.cache_salt, loaded.kv)
    return Engine(config, model.vocab_size, runner, block_transfer, store, turn=turn, park=park)


def _load_weights(
    device: Device, model: ModelConfig, weights: Weights, config: EngineConfig, pools: Sequence[Tensor] = ()
) -> tuple[LoadedModel, EngineConfig]:
    """Load the weights and reserve the caches. Returns the configuration with the size that each pool really has."""
    loaded = device.load(model, weights, config, pools)
    trim()
    return loaded, config.with_pools([len(pool) for pool in loaded.kv.pools])


def _open_store(options: LoadOptions, config: EngineConfig, kv: KVCache, kv_type: str) -> DiskStore | None:
    """Open the disk tier for blocks of the same weights, kernels, and shapes. Returns None if the disk tier is off."""
    if options.disk is None or not options.fingerprint:
        return None
    fingerprint = root_key(*config.cache_salt, f"version {VERSION}", *map(str, kv.block_bytes))
    about = About(options.disk.model, options.fingerprint, config.backend, kv_type)
    folder = model_folder(options.disk.folder, fingerprint, about)
    store = DiskStore(folder, fingerprint, kv.block_bytes, Quota(options.disk.folder, options.disk.limit))
    store.prepare()
    return store


def _resolve(
    model: ModelConfig,
    device: Device,
    options: LoadOptions,
    identity: tuple[str, ...],
    weight_bytes: int = 0,
    host_weights: int = 0,
) -> EngineConfig:
    """Resolve all options of a run. Raises UnsupportedModel if the context does not fit into memory."""
    budget = cache_budget(model, device)
    room = device.kv_memory(model, weight_bytes)
    limit = budget.limit(room, device.kv_share, options.context_length)
    context = budget.context(options.context_length, limit)
    groups = budget.groups(budget.tokens(limit, device.contexts * context), device.host_pool(host_weights))
    shape = repr((model.ropes, model.long_ropes(context), model.layers))
    return EngineConfig(
        backend=device.name,
        threads=device.threads,
        context_length=context,
        num_blocks=max(group.num_blocks for group in groups),
        model_context_length=model.context_length,
        longest_context=max(context, budget.tokens(room, model.context_length)),
        max_running=device.max_running,
        max_logit_rows=device.max_logit_rows,
        step_depth=options.step_depth or device.step_depth,
        max_step_tokens=device.step_tokens(model),
        groups=groups,
        preemption=options.preemption,
        target_latency=options.target_latency,
        drafts=options.drafts,
        cache_salt=(*identity, *device.numerics, str(device.kv_type), shape),
    )


def cache_budget(model: ModelConfig, device: Device) -> KVBudget:
    """Return the memory budget of a model's caches on a device. Raises UnsupportedModel."""
    groups = kv_groups(model, device.layer_block)
    return KVBudget(model, groups, device.step_tokens(model), device.max_running)
