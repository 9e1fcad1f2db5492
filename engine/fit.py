"""Whether a model fits into a device's memory, and how long its context may be, told from its headers alone.

Every number is one by which the engine itself chooses when it loads: what a device says of its memory and its needs,
and the budget of the caches. Nothing is decided here. Refuses to know where headers come from, and how people are told.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine import models
from engine.backends.device_choice import KV_TYPES, cuda_device, gpu_for, host_device
from engine.checkpoints.checkpoint import Checkpoint, Names, StoredWeight
from engine.config import ModelConfig
from engine.device import Device, Needs
from engine.errors import OutOfMemory, UnsupportedModel
from engine.kv.budget import MIN_CONTEXT, host_memory
from engine.load_options import LoadOptions
from engine.loading import cache_budget
from engine.models import ENCODERS

if TYPE_CHECKING:
    from engine.backends.cuda.gpu import Gpu


@dataclass(frozen=True, slots=True)
class CacheFit:
    """What there is room for with keys and values of one type."""

    kv_type: str
    token_bytes: Mapping[int | None, int]  # that a token takes in the layers of each window; None: that see all
    context: int  # tokens that fit, as many as were asked for at most
    size: int  # bytes of the caches of so many tokens, or of the fewest that are of use
    tables: int  # bytes among them that are filled when the model is loaded, whatever is asked


@dataclass(frozen=True, slots=True)
class Fit:
    """What a model takes, and what there is."""

    device: str  # name of the backend
    memory: int  # bytes that are there for it, in all
    needs: Needs
    caches: tuple[CacheFit, ...]  # the type that is used first; none of a model that keeps no keys and values
    wanted: int  # tokens of context: those asked for, or what the model was made for
    least: int  # tokens of context, below which it is of no use

    @property
    def is_possible(self) -> bool:
        """As it was asked for, with the type of keys and values that is used."""
        return self._has(self.least)

    @property
    def has_room(self) -> bool:
        """For a context that is of some use, whatever was asked for."""
        return self._has(min(self.wanted, MIN_CONTEXT))

    def _has(self, context: int) -> bool:
        return self.caches[0].context >= context if self.caches else self.needs.total < self.memory

    @property
    def needed(self) -> int:
        """Bytes, with the context that fits, or the least one that would be of use."""
        return self.needs.total + (self.caches[0].size if self.caches else 0)


def fit(checkpoint: Checkpoint, options: LoadOptions, memory: int = 0) -> Fit:
    """For the device that the engine would try first. `memory`: bytes of it, had it so many; 0: what it has.

    Raises UnsupportedModel, UnsupportedTier, ModelFileError or UnsupportedQuantization.
    """
    options = replace(options, host_memory=memory) if memory else options
    if checkpoint.metadata.architecture in ENCODERS:
        return _encoder_fit(checkpoint, memory)
    model, stored = models.read_config(checkpoint.metadata), models.stored_weights(checkpoint)
    wanted = min(options.context_length or model.context_length, model.context_length)
    least = wanted if options.context_length else min(wanted, MIN_CONTEXT)
    devices = dict(_devices(checkpoint, options, model, stored, memory))
    device = next(iter(devices.values()))
    caches = tuple(_cache_fit(name, it, model, stored, wanted, least) for name, it in devices.items())
    return Fit(device.name, device.free_memory(), device.needs(model, stored), caches, wanted, least)


def _cache_fit(
    name: str, device: Device, model: ModelConfig, stored: Mapping[str, StoredWeight], wanted: int, least: int
) -> CacheFit:
    budget = cache_budget(model, device)
    try:
        room = device.kv_memory(model, sum(weight.nbytes for weight in stored.values()))
    except OutOfMemory:
        room = 0
    context = budget.tokens(room, wanted)
    held = max(context, least)
    return CacheFit(name, budget.token_bytes, context, budget.bytes(held), budget.table_bytes(held))


def _devices(
    checkpoint: Checkpoint,
    options: LoadOptions,
    model: ModelConfig,
    stored: Mapping[str, StoredWeight],
    memory: int,
) -> Iterator[tuple[str, Device]]:
    """The device, by each type of keys and values that it has; first the one that is asked for."""
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
    """The one that is there; one that is asked about, where its memory is said."""
    if not memory:
        return gpu_for(options)
    if not options.asks_for_gpu and gpu_for(options) is None:
        return None
    try:
        from engine.backends.cuda.gpu import planned_gpu
    except ImportError as problem:
        raise UnsupportedModel(f"Nothing is known of GPUs here: {problem}", "Use --device cpu.") from None
    return planned_gpu(memory)


def _type_names(kinds: Mapping[str, object], chosen: str) -> list[str]:
    """Those of a device's types: the chosen one, or the one that `auto` stands for, and the others behind it."""
    names = [name for name in kinds if name != "auto"]
    first = next(name for name in names if kinds[name] == kinds.get(chosen))
    return [first, *(name for name in names if name != first)]


def _encoder_fit(checkpoint: Checkpoint, memory: int) -> Fit:
    """Of a model that gives embeddings: it has no cache, and its weights are nearly all it takes."""
    weights = sum(weight.nbytes for weight in checkpoint.weights(Names({})).values())
    return Fit("cpu", host_memory(memory), Needs(weights, 0), (), 0, 0)
