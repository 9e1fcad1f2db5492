"""The CUDA device: loads a model on one GPU and sizes its caches."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from engine import models
from engine.backends.cuda.batch_tensors import BatchLimits
from engine.backends.cuda.blocks import GpuBlocks
from engine.backends.cuda.gpu import CaptureStream, Gpu
from engine.backends.cuda.kernel_compilation import Report, compile_kernels, recording_kernels
from engine.backends.cuda.kernel_launches import launch_every_kernel
from engine.backends.cuda.memory import LOADING_THREADS, USE_LESS, GpuMemory
from engine.backends.cuda.operations import CudaOperations
from engine.backends.cuda.runner import CudaRunner
from engine.backends.cuda.step import CudaStep, largest_batch
from engine.backends.device_errors import first_line
from engine.checkpoints.checkpoint import StoredWeight, host_weight_bytes, stored_bytes
from engine.checkpoints.weights import Weights
from engine.config import ALL_FREE, BLOCK_SIZE, EngineConfig, GroupConfig, MemoryLimit, default_activation_bits
from engine.device import LoadedModel, Needs
from engine.errors import LoadStopped, OutOfMemory
from engine.kernels.attention_tiles import tile_queries
from engine.kv.budget import ANY_MEMORY, HostMemory, KVBudget
from engine.kv.cache import LayerBlock, kv_groups
from engine.load_options import UNCONTROLLED, LoadControl
from engine.mixer_config import CacheConfig
from engine.model_config import ModelConfig
from engine.models import Model
from quant.cuda.backend import CudaBackend
from quant.kernels.card import Card
from quant.kernels.tiles import MeasuredTiles

log = logging.getLogger(__name__)

NUMERICS_VERSION = "3"  # increase when a change to the kernels changes result bits: this invalidates KV caches on disk
KV_TYPES = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "f16": torch.float16, "fp8": torch.uint8}
MAX_RUNNING = 128
HEAD_DIMS = range(16, 257)
WIDTH = 16  # every width of a model must be a multiple of this
STEP_SECONDS = 0.2
# operations per second of one multiprocessor in a prompt of quantized weights
OPERATIONS = 1.5e12
INTEGER_OPERATIONS = 2.6e12  # estimated
HOPPER_OPERATIONS, HOPPER = 3.5e12, (9, 10)  # measured on an H200; and the compute capabilities that it is used for
MAX_STEP_TOKENS = 4096
MIN_STEP_TOKENS = 256
SMALLER = 0.97  # factor by which pools shrink if they cannot be allocated
SMALLER_POOLS = 3  # number of times that they shrink


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """Options for using a GPU."""

    kv_type: torch.dtype = torch.bfloat16
    deterministic: bool = False
    memory: MemoryLimit = ALL_FREE
    host_memory: HostMemory = ANY_MEMORY
    reserved: int = 0  # bytes of the GPU's memory to leave for another model
    tiles: MeasuredTiles = field(default_factory=dict)  # tiles that replace the default ones
    activation_bits: int = 0  # of prompts, on cards that multiply integers faster: 8, or 14 for bfloat16; 0: by size
    report_kernels: Report = lambda done, total: None  # shows the progress of compilation
    control: LoadControl = UNCONTROLLED


class CudaDevice:
    """See `engine.device.Device`."""

    name = "cuda"
    threads = LOADING_THREADS  # number of host threads that load weights
    max_running = contexts = MAX_RUNNING
    max_logit_rows = MAX_RUNNING  # those of the step whose memory is measured
    step_depth = 2

    def __init__(self, gpu: Gpu, options: CudaOptions) -> None:
        order = "deterministic" if options.deterministic else "any order"
        # The architecture is included because it determines the kernels and their tiles.
        bits = f"{options.activation_bits} bits"
        self.numerics = ("cuda", NUMERICS_VERSION, f"sm_{gpu.card.architecture}", order, bits, repr(options.tiles))
        self._tiles = options.tiles
        self._report_kernels = options.report_kernels
        self._control = options.control
        self.kv_type = options.kv_type
        self._gpu = gpu
        self._deterministic = options.deterministic
        self._activation_bits = options.activation_bits
        self._memory = GpuMemory(gpu, options.memory, options.host_memory, options.reserved)

    def layer_block(self, cache: CacheConfig) -> LayerBlock:
        return LayerBlock((2, cache.kv_heads, BLOCK_SIZE, cache.head_dim), self.kv_type)  # k, v

    def step_tokens(self, model: ModelConfig) -> int:
        """Return the number of tokens, a power of two, whose step takes about STEP_SECONDS."""
        tokens = int(STEP_SECONDS * self._operations(model)) // (2 * model.active_elements)
        return min(max(1 << tokens.bit_length() - 1, MIN_STEP_TOKENS), MAX_STEP_TOKENS)

    def _operations(self, model: ModelConfig) -> float:
        """Return the operations per second of the card in a prompt."""
        card = self._gpu.card
        others = HOPPER_OPERATIONS if card.capability[0] in HOPPER else OPERATIONS
        return card.multiprocessors * (INTEGER_OPERATIONS if self._rounds_prompts(model) else others)

    def _rounds_prompts(self, model: ModelConfig) -> bool:
        return rounds_prompts(self._gpu.card, model, self._activation_bits) and not self._deterministic

    @property
    def kv_share(self) -> float:
        return self._memory.kv_share

    def host_pool(self, weights: int) -> int:
        return self._memory.host_pool(weights)

    def free_memory(self) -> int:
        return self._memory.allowed()

    def needs(self, model: ModelConfig, stored: Mapping[str, StoredWeight]) -> Needs:
        return self._memory.needs(model, self.weight_bytes(stored), self.step_tokens(model), self.max_running)

    def weight_bytes(self, stored: Mapping[str, StoredWeight]) -> int:
        return stored_bytes(stored) - host_weight_bytes(stored)

    def kv_memory(self, model: ModelConfig, weight_bytes: int) -> int:
        return self._memory.kv_bytes_before_loading(model, weight_bytes, self.step_tokens(model), self.max_running)

    def load(
        self, model: ModelConfig, weights: Weights, config: EngineConfig, pools: Sequence[Tensor] = ()
    ) -> LoadedModel:
        if pools:
            raise ValueError("a GPU cannot use pools in the host's memory")
        with self._gpu.current():
            self._memory.start_loading()
            loaded = self._loaded(model, weights, config)
            if not self._gpu.card.interpreted:
                self._compile_kernels(loaded, config)
                self._control.check()
                config = config.with_pools(self._fitting_pools(loaded, config))
            step = self._largest_step(loaded, config)
        return LoadedModel(step, step.kv, self._gpu.synchronize, step.close)

    def compile_kernels(self, model: ModelConfig, weights: Weights, config: EngineConfig) -> None:
        """Compile the model's kernels into the cache on disk. Loads the weights, but allocates no KV cache."""
        with self._gpu.current():
            self._compile_kernels(self._loaded(model, weights, config), config)

    def runner(self, loaded: LoadedModel, vocab_size: int, groups: Sequence[GroupConfig]) -> CudaRunner:
        if not isinstance(loaded.compute, CudaStep):
            raise TypeError("the model was loaded by another device")
        runner = CudaRunner(loaded.compute, vocab_size, groups)
        if not self._gpu.card.interpreted:
            runner.prepare()
        return runner

    def _loaded(self, model: ModelConfig, weights: Weights, config: EngineConfig) -> Model:
        card, integers = self._gpu.card, self._rounds_prompts(model)
        backend = CudaBackend(self._gpu.device, card, self._deterministic, self._tiles, integers)
        operations = CudaOperations(backend, card, deterministic=self._deterministic)
        return models.load(model, weights, operations, config.context_length)

    def _compile_kernels(self, loaded: Model, config: EngineConfig) -> None:
        """Compile all kernels of the model in several processes. Kernels that are left out compile when launched."""
        try:
            step = self._step(loaded, config.with_pools([1] * len(config.groups)).without_host_pools())
            with recording_kernels() as variants:
                launch_every_kernel(step, _limits(config), loaded.config)
            compile_kernels(variants, self._report_kernels, self._control.check)
        except LoadStopped:
            raise
        except Exception as error:  # noqa: BLE001 # Triton and processes raise errors of any type
            log.warning("kernels are compiled when they are needed: %s", first_line(error))

    def _step(self, loaded: Model, config: EngineConfig) -> CudaStep:
        groups = kv_groups(loaded.config, self.layer_block)
        kv = GpuBlocks(self._gpu, groups, config.pool_sizes, config.host_pool_sizes)
        queries = tile_queries(loaded.config.attentions, self._gpu.card, deterministic=self._deterministic)
        return CudaStep(self._gpu, loaded, kv, _limits(config), queries, self._capture_stream)

    @cached_property
    def _capture_stream(self) -> CaptureStream:
        """The stream of all graphs, also of those that only measure memory: libraries keep a workspace per stream."""
        return self._gpu.capture_stream()

    def _largest_step(self, loaded: Model, config: EngineConfig) -> CudaStep:
        """Return a step with pools of the configured size, or smaller ones if the driver cannot allocate them."""
        for _ in range(SMALLER_POOLS):
            try:
                return self._step(loaded, config)
            except torch.OutOfMemoryError:
                self._gpu.drop_caches()
                config = config.with_pools([int(SMALLER * size) for size in config.pool_sizes])
        return self._step(loaded, config)

    def _fitting_pools(self, loaded: Model, config: EngineConfig) -> list[int]:
        """Return the number of blocks per group that fits beside the largest step and all graphs.

        Runs that step and captures the graphs, with pools of one block, to measure their memory.
        """
        model, requests = loaded.config, min(config.max_running, config.max_step_tokens)
        step = self._step(loaded, config.with_pools([1] * len(config.groups)).without_host_pools())
        batch = largest_batch(config.max_step_tokens, requests, len(config.groups))
        largest = self._gpu.peak_memory(lambda: step(batch))
        step.capture()
        room = self._memory.kv_bytes_after_loading(largest)
        budget = KVBudget(model, step.kv.groups, config.max_step_tokens, config.max_running)
        limit = budget.limit(room, self.kv_share, config.context_length)
        tokens = budget.tokens(limit, self.contexts * config.context_length)
        if tokens < config.context_length:
            raise OutOfMemory(
                f"A context of {config.context_length:,} tokens needs {budget.bytes(config.context_length) / 1e9:.1f} "
                f"GB of GPU memory, and {max(0, room) / 1e9:.1f} GB are left by the model",
                USE_LESS,
            )
        return [group.num_blocks for group in budget.groups(tokens)]


def _limits(config: EngineConfig) -> BatchLimits:
    return BatchLimits(
        tokens=config.max_step_tokens,
        requests=config.max_running,
        table_blocks=-(-config.context_length // BLOCK_SIZE),
        groups=len(config.groups),
    )


def rounds_prompts(card: Card, model: ModelConfig, bits: int = 0) -> bool:
    """Whether products of many tokens round inputs to 8-bit integers. `bits`: see `CudaOptions.activation_bits`."""
    return card.prefers_integers and (bits or default_activation_bits(model.matrix_elements)) == 8


def why_unsupported(model: ModelConfig) -> str | None:
    """Return why the GPU kernels cannot run a model, or None if they can."""
    for head_dim in {attention.head_dim for attention in model.attentions}.difference(HEAD_DIMS):
        return f"its head dimension is {head_dim}; the GPU kernels support {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
    for name, width in (("hidden size", model.hidden), *(("MLP", width) for width in sorted(model.mlp_widths))):
        if width % WIDTH:
            return f"its {name} is {width}, not a multiple of {WIDTH}"
    return None
