"""The GPU memory that the KV cache may take: the free memory, minus reserves for the display and for steps.

The driver reports the free memory, so memory that other programs use is not counted. The memory of a step is measured
with the largest step, and that of the CUDA graphs by capturing them. Before the weights are loaded both are estimated
instead, on the high side, to choose a context length.
"""

from engine.backends.cuda.gpu import Gpu
from engine.config import ALL_FREE, MemoryLimit
from engine.device import Needs
from engine.errors import OutOfMemory
from engine.kv.budget import ANY_MEMORY, HostMemory, host_share
from engine.model_config import ModelConfig
from engine.system_memory import available_memory
from quant.cuda.loading import SLAB_BYTES

RESERVE_SHARE = 0.06  # share of the GPU's memory that is left for the display and other programs
MAX_RESERVE = 1 << 30  # bytes
KV_SHARE = 0.5  # share of the memory that the model leaves free; the KV cache takes it if the user states no limit
HOST_SHARE = 0.25  # share of the host's free memory that KV blocks in host pools may use
MAX_HOST = 32 << 30  # bytes
GRAPH_BYTES = 240 << 20  # estimated bytes of the launch data of all graphs, and of libraries
# bytes for later allocations: the library workspace of the engine's thread, and kernels of rare requests
MARGIN_BYTES = 64 << 20
LOADING_THREADS = 4
LOADED_RATIO = 1.04  # GPU bytes per byte of the weights' files
USE_LESS = "Choose a shorter context with --context, a smaller model, or close other programs that use the GPU."


class GpuMemory:
    """The GPU memory that one engine may use."""

    def __init__(self, gpu: Gpu, limit: MemoryLimit, host_memory: HostMemory = ANY_MEMORY, reserved: int = 0) -> None:
        """`reserved` is the number of bytes to leave for another model."""
        self._gpu = gpu
        self._reserved = reserved
        self._limit = limit
        self._host_memory = host_memory
        self._before: int | None = None  # bytes that this process held when loading started; None: it has not started

    @property
    def kv_share(self) -> float:
        """Share of the memory left by the model that the KV cache takes, so that other programs can use the GPU."""
        return KV_SHARE if self._limit == ALL_FREE and not self._gpu.card.interpreted else 1.0

    def host_pool(self, weights: int) -> int:
        """Return the size in bytes of the host pools, which hold blocks of preempted requests and cached prefixes.

        `weights`: bytes of the weights that stay in the host's memory. Raises OutOfMemory if they do not fit.
        """
        share = 1.0 if self._host_memory.allotted else HOST_SHARE
        default = 0 if self._gpu.card.interpreted else min(int(share * self._host_memory.limit), MAX_HOST)
        return self._host_memory.pool_bytes(default, weights)

    def start_loading(self) -> None:
        """Exclude what this process holds on the GPU now, such as other engines, from this engine's memory.

        Until all pools are allocated, no other engine of the process may be loaded or closed on this GPU.
        """
        if not self._gpu.card.interpreted:
            self._gpu.drop_caches()
            self._before = self._gpu.own_memory()

    def kv_bytes_before_loading(self, model: ModelConfig, weight_bytes: int, step_tokens: int, rows: int) -> int:
        """Return the size of the KV cache in bytes, estimated before the weights are loaded.

        `weight_bytes`: size of the weights in their files. `rows`: logit rows per step. Raises OutOfMemory if the
        weights alone do not fit.
        """
        if self._gpu.card.interpreted:
            return self._limit.num_bytes or host_share()
        needed = self.needs(model, weight_bytes, step_tokens, rows).total
        room = self.allowed()
        if room <= needed:
            raise OutOfMemory(
                f"The model needs {needed / 1e9:.1f} GB of GPU memory, but only {room / 1e9:.1f} GB are available",
                USE_LESS,
            )
        return room - needed

    def needs(self, model: ModelConfig, weight_bytes: int, step_tokens: int, rows: int) -> Needs:
        """Return the memory that the model needs besides its KV cache."""
        steps = step_bytes(model, step_tokens, rows) + GRAPH_BYTES
        return Needs(int(LOADED_RATIO * weight_bytes), max(steps, loading_bytes(model, weight_bytes)))

    def kv_bytes_after_loading(self, step_bytes: int) -> int:
        """Return the size of the KV cache in bytes, after the weights are loaded and all graphs are captured.

        `step_bytes`: measured memory of the largest step.
        """
        return self.allowed() - step_bytes - MARGIN_BYTES

    def allowed(self) -> int:
        """Return the number of bytes that this engine may still allocate: its limit, minus what it has allocated, and
        minus what it leaves for another model.
        """
        return self._allowed() - self._reserved

    def _allowed(self) -> int:
        if self._gpu.card.interpreted:
            return self._limit.num_bytes or available_memory()
        self._gpu.drop_caches()  # cached memory may be too fragmented for the KV cache, or belong to graphs
        total, free = self._gpu.card.memory_bytes, self._gpu.free_memory()
        limit = self._limit.num_bytes or int(self._limit.share * total)
        if limit:
            allocated = 0 if self._before is None else self._gpu.own_memory() - self._before
            return min(limit - allocated, free)
        return free - min(MAX_RESERVE, int(RESERVE_SHARE * total))


def loading_bytes(model: ModelConfig, weight_bytes: int) -> int:
    """Return the approximate memory that loading needs besides the weights, in bytes. It is freed before the first
    step.

    Each thread rearranges codes, and concatenates the matrices of a layer, of which gate and up are the largest.
    Experts are loaded one by one.
    """
    widest = max(2 * max(model.mlp_widths), *(mixer.in_width for mixer in model.mixers))
    joined = weight_bytes * widest * model.hidden // model.matrix_elements
    return LOADING_THREADS * (SLAB_BYTES + joined)


def step_bytes(model: ModelConfig, tokens: int, rows: int) -> int:
    """Return the approximate memory of a step in bytes: activations, one dequantized matrix, two copies of the logits,
    and two more for the CUDA graphs. The output of each expert is float32.
    """
    heads = max(mixer.in_width for mixer in model.mixers)
    widest = max(2 * model.step_columns, heads)
    own = 8 * model.per_layer * len(model.layers)  # bytes of the embeddings that layers have for one token
    activations = tokens * ((8 + 4 * model.active_experts) * model.hidden + 6 * widest + own)
    matrix = 2 * max(2 * max(model.mlp_widths), heads) * model.hidden
    return activations + matrix + 16 * rows * model.vocab_size
