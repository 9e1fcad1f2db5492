"""How much of a GPU's memory the caches may take: what is free, less what the display and the steps need.

What is free is asked of the driver, so that what other programs have is theirs. What a step takes is measured, by a
step of the largest kind; before the weights are loaded it is estimated, high rather than low, to choose a context.
Knows bytes. Refuses to know what is in them.
"""

from engine.backends.cuda.gpu import Gpu
from engine.config import MemoryLimit, ModelConfig
from engine.device import Needs
from engine.errors import OutOfMemory
from engine.kv.budget import available_memory, host_share

RESERVE_SHARE = 0.06  # of a GPU's memory, for the display and whatever else begins to draw on it
MOST_RESERVE = 1 << 30  # bytes
HOST_SHARE = 0.25  # of the host's free memory
MOST_HOST = 32 << 30  # bytes
UNMEASURED = 192 << 20  # bytes that recorded steps and libraries take later on
LOADED_WEIGHT = 1.04  # bytes of the GPU for each of a file
LESS = "Choose a shorter context with --context, a smaller model, or close other programs that use the GPU."


class GpuMemory:
    """The memory of one GPU, as far as one engine may take it."""

    def __init__(self, gpu: Gpu, limit: MemoryLimit) -> None:
        self._gpu = gpu
        self._limit = limit

    def host_cache(self) -> int:
        """Bytes of the host's memory for blocks of requests that wait, and of prefixes."""
        return 0 if self._gpu.card.interpreted else min(int(HOST_SHARE * available_memory()), MOST_HOST)

    def room_before(self, model: ModelConfig, weight_bytes: int, step_tokens: int, rows: int) -> int:
        """Bytes for caches, before weights are loaded that take about `weight_bytes` in their files; steps have so many
        tokens, and rows of logits. Raises OutOfMemory where the weights alone do not fit."""
        if self._gpu.card.interpreted:
            return self._limit.num_bytes or host_share()
        needed = self.needs(model, weight_bytes, step_tokens, rows).total
        room = self.allowed()
        if room <= needed:
            raise OutOfMemory(
                f"The model needs {needed / 1e9:.1f} GB of the GPU's memory, and there are {room / 1e9:.1f} GB for it",
                LESS,
            )
        return room - needed

    def needs(self, model: ModelConfig, weight_bytes: int, step_tokens: int, rows: int) -> Needs:
        """What the same model takes besides its caches."""
        return Needs(int(LOADED_WEIGHT * weight_bytes), step_bytes(model, step_tokens, rows) + UNMEASURED)

    def room_after(self, step_bytes: int) -> int:
        """Bytes for caches, now that weights are loaded, and steps were measured to take so many."""
        return self.allowed() - step_bytes - UNMEASURED

    def allowed(self) -> int:
        """Bytes that may still be taken."""
        if self._gpu.card.interpreted:
            return self._limit.num_bytes or available_memory()
        total, free = self._gpu.card.memory_bytes, self._gpu.free_memory()
        limit = self._limit.num_bytes or int(self._limit.share * total)
        if limit:
            return min(limit - self._gpu.own_memory(), free)
        return free - min(MOST_RESERVE, int(RESERVE_SHARE * total))


def step_bytes(model: ModelConfig, tokens: int, rows: int) -> int:
    """About what a step takes: some activations of each width, one matrix multiplied out, logits twice."""
    widest = max(2 * model.mlp_hidden, (model.heads + 2 * model.kv_heads) * model.head_dim)
    activations = tokens * (8 * model.hidden + 6 * widest)
    return activations + 2 * widest * model.hidden + 8 * rows * model.vocab_size
