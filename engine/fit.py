"""Check from a checkpoint's headers alone whether a model fits into a device's memory, and with which context length.

The numbers come from the functions that the engine itself uses when it loads a model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine import models
from engine.backends.device_choice import KV_TYPES, cuda_device, gpu_for, host_device
from engine.checkpoints.checkpoint import Checkpoint, Names, StoredWeight, host_weight_bytes, stored_bytes
from engine.config import MemoryLimit
from engine.device import Device, Needs
from engine.errors import OutOfMemory, UnsupportedModel
from engine.kv.budget import MIN_CONTEXT
from engine.load_options import LoadOptions
from engine.loading import cache_budget
from engine.model_config import ModelConfig
from engine.models import ENCODERS
from engine.system_memory import available_memory

if TYPE_CHECKING:
    from engine.backends.cuda.gpu import Gpu


@dataclass(frozen=True, slots=True)
class CacheFit:
    """The context length that fits with one KV cache type."""

    kv_type: str
    token_bytes: Mapping[int | None, int]  # window -> bytes per token in its layers; None: layers without a window
    context: int  # number of tokens that fit, at most the requested number
    # size of the caches in bytes, for `context` tokens or for the shortest useful context, whichever is longer
    size: int
    tables: int  # the share of `size` that rotary tables take; they are filled at load time
    state_bytes: int = 0  # size in bytes of the state of all recurrent layers, kept every `spacing` tokens
    spacing: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    """The memory that a model needs, and the memory that is available."""

    device: str  # name of the backend
    memory: int  # bytes available for the model
    needs: Needs
    caches: tuple[CacheFit, ...]  # one per KV type, the selected type first; empty for a model without a KV cache
    wanted: int  # requested context length in tokens; by default, the length that the model was trained for
    least: int  # shortest useful context length in tokens
    kv_limit: int = 0  # limit of the caches in bytes; 0: all memory that the model leaves free
    elements: int = 0  # approximate number of elements in the model's matrices; 0: unknown
    active_elements: int = 0  # approximate number of those that compute one token

    @property
    def is_possible(self) -> bool:
        """Whether the model fits as requested, with the selected KV type."""
        return self._has(self.least)

    @property
    def has_room(self) -> bool:
        """Whether the model fits with a useful context, even if that context is shorter than requested."""
        return self._has(min(self.wanted, MIN_CONTEXT))

    def _has(self, context: int) -> bool:
        return self.caches[0].context >= context if self.caches else self.needs.total < self.memory

    @property
    def active_weights(self) -> int:
        """Approximate number of bytes of the weights that compute one token."""
        return self.needs.weights * self.active_elements // self.elements if self.elements else self.needs.weights

    @property
    def needed(self) -> int:
        """Number of bytes needed with the context that fits, or with the shortest useful one if that is longer."""
        return self.needs.total + (self.caches[0].size if self.caches else 0)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory in bytes that a load would take, estimated from a checkpoint's headers."""

    gpu: int | None  # index of the GPU; None: the model computes in the host's memory
    weights: int
    steps: int
    loading: int  # memory besides the weights that loading takes and frees again, before caches are written
    kv_least: int  # caches of the shortest useful context, or of the requested one
    kv_wanted: int  # caches of the longest context, on a GPU for every request that can run at once
    host_weights: int = 0  # weights that stay in the host's memory beside a GPU
    host_pool: int = 0  # host pools; beside a GPU, they can be smaller
    vocab_size: int = 0  # tokens
    draft: int = 0  # all of the draft model, in the memory of `gpu`

    @property
    def least(self) -> int:
        """The memory of `gpu` without which the load fails."""
        return self.weights + max(self.loading, self.steps + self.kv_least + self._own_pool) + self.draft

    @property
    def most(self) -> int:
        """The memory of `gpu` with which caches have the size that is wanted. More memory would stay unused."""
        return max(self.least, self.weights + self.steps + self.kv_wanted + self._own_pool + self.draft)

    @property
    def _own_pool(self) -> int:
        return self.host_pool if self.gpu is None else 0

    def allotted(self, options: LoadOptions, memory: int, host: int = 0) -> LoadOptions:
        """Return `options` of a load that takes at most `memory` bytes, and beside a GPU `host` bytes of the host's."""
        if self.gpu is None:
            return replace(options, host_memory=memory)
        return replace(options, device=f"cuda:{self.gpu}", gpu_memory=MemoryLimit(memory), host_memory=host)


def plan_memory(checkpoint: Checkpoint, options: LoadOptions) -> MemoryPlan:
    """Return what a load would take of the device that the engine would try first. Loads nothing.

    The result does not depend on the free memory, except for the default size of host pools. Raises the errors of
    `fit`.
    """
    gpu = gpu_for(options)
    index = None if gpu is None else gpu.index
    if checkpoint.metadata.architecture in ENCODERS:
        return MemoryPlan(index, stored_bytes(checkpoint.weights(Names({}))), 0, 0, 0, 0)
    model, stored = models.read_config(checkpoint.metadata), models.stored_weights(checkpoint)
    _, device = next(_devices(checkpoint, options, model, stored, 0))
    needs, budget = device.needs(model, stored), cache_budget(model, device)
    wanted = min(options.context_length or model.context_length, model.context_length)
    least = budget.bytes(wanted if options.context_length else min(wanted, MIN_CONTEXT))
    host_weights = 0 if index is None else host_weight_bytes(stored)
    return MemoryPlan(
        gpu=index,
        weights=needs.weights,
        steps=needs.steps,
        loading=needs.loading,
        kv_least=least,
        kv_wanted=budget.bytes(device.contexts * wanted),
        host_weights=host_weights,
        host_pool=device.host_pool(host_weights),
        vocab_size=model.vocab_size,
    )


def fit(checkpoint: Checkpoint, options: LoadOptions, memory: int = 0) -> Fit:
    """Return the fit for the device that the engine would try first.

    `memory`: device memory to assume, in bytes; 0: the actual memory of the device. Raises UnsupportedModel,
    UnsupportedTier, ModelFileError, or UnsupportedQuantization.
    """
    options = replace(options, assumed_memory=memory) if memory else options
    if checkpoint.metadata.architecture in ENCODERS:
        return _encoder_fit(checkpoint, memory)
    model, stored = models.read_config(checkpoint.metadata), models.stored_weights(checkpoint)
    wanted = min(options.context_length or model.context_length, model.context_length)
    least = wanted if options.context_length else min(wanted, MIN_CONTEXT)
    devices = dict(_devices(checkpoint, options, model, stored, memory))
    device = next(iter(devices.values()))
    limits = {name: _limit(it, model, stored, options.context_length) for name, it in devices.items()}
    caches = tuple(_cache_fit(name, it, model, limits[name][0], wanted, least) for name, it in devices.items())
    limit, room = next(iter(limits.values()))
    kv_limit = limit if limit < room else 0
    return Fit(
        device.name,
        device.free_memory(),
        device.needs(model, stored),
        caches,
        wanted,
        least,
        kv_limit,
        model.matrix_elements,
        model.active_elements,
    )


def _limit(device: Device, model: ModelConfig, stored: Mapping[str, StoredWeight], asked: int) -> tuple[int, int]:
    """Return the bytes that caches may take, and those that the model leaves free; 0 if the model does not fit."""
    try:
        room = device.kv_memory(model, device.weight_bytes(stored))
    except OutOfMemory:
        return 0, 0
    return cache_budget(model, device).limit(room, device.kv_share, asked), room


def _cache_fit(name: str, device: Device, model: ModelConfig, limit: int, wanted: int, least: int) -> CacheFit:
    budget = cache_budget(model, device)
    context = budget.tokens(limit, wanted)
    held = max(context, least)
    states = budget.state_bytes, budget.spacing if budget.state_bytes else 0
    return CacheFit(name, budget.token_bytes, context, budget.bytes(held), budget.table_bytes(held), *states)


def _devices(
    checkpoint: Checkpoint,
    options: LoadOptions,
    model: ModelConfig,
    stored: Mapping[str, StoredWeight],
    memory: int,
) -> Iterator[tuple[str, Device]]:
    """Yield (KV type, device configured with it) for every KV type, the requested type first."""
    gpu = _gpu(options, memory)
    if gpu is not None:
        from engine.backends.cuda.device import KV_TYPES as GPU_KV_TYPES

        for name in _type_names(GPU_KV_TYPES, options.kv_type):
            yield name, cuda_device(gpu, replace(options, kv_type=name), model)
        return
    first = host_device(options, model, checkpoint.path, stored)
    names = _type_names(KV_TYPES, options.kv_type) if first.name == "cpu" else ["f32"]
    for name in names:
        plain = name == names[0]
        yield name, first if plain else host_device(replace(options, kv_type=name), model, checkpoint.path, stored)


def _gpu(options: LoadOptions, memory: int) -> "Gpu | None":
    """Return the GPU to use, or None. If `memory` is given, it is assumed to be the memory size in bytes."""
    if not memory:
        return gpu_for(options)
    if not options.asks_for_gpu and gpu_for(options) is None:
        return None
    try:
        from engine.backends.cuda.gpu import planned_gpu
    except ImportError as problem:
        raise UnsupportedModel(f"GPU support cannot be loaded: {problem}", "Use --device cpu.") from None
    return planned_gpu(memory)


def _type_names(kinds: Mapping[str, object], chosen: str) -> list[str]:
    """Return the names of a device's KV types, the requested type first. For `auto`, that is the type it selects."""
    names = [name for name in kinds if name != "auto"]
    first = next(name for name in names if kinds[name] == kinds.get(chosen))
    return [first, *(name for name in names if name != first)]


def _encoder_fit(checkpoint: Checkpoint, memory: int) -> Fit:
    """Return the fit of an embedding model, which has no cache and needs little besides its weights."""
    weights = stored_bytes(checkpoint.weights(Names({})))
    return Fit("cpu", memory or available_memory(), Needs(weights, 0), (), 0, 0)
