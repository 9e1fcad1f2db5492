"""KVBudget: how long a context fits into memory, and how many blocks the pool of each KV group has.

Knows shapes and how much memory is free. Refuses to know devices.
"""

import math
from collections.abc import Iterable

import torch

from engine.config import BLOCK_SIZE, GroupConfig, ModelConfig
from engine.errors import UnsupportedModel

ASSUMED_MEMORY = 8 << 30  # bytes, where the system does not tell how much is free
KV_SHARE = 0.5  # of the free memory: the most that the cache may grow to
LEAST_CONTEXT = 512  # tokens
MAX_RUNNING = 16  # requests that hold blocks at the same time
KEPT_WINDOWS = 2  # for each window that a running request looks at, those that are kept for later ones


class KVBudget:
    """The memory of one model's caches. `layer_shape` is that of one layer of one block, in elements of `kv_type`."""

    def __init__(self, model: ModelConfig, layer_shape: Iterable[int], kv_type: torch.dtype, step_tokens: int) -> None:
        self._model = model
        self._layer_bytes = math.prod(layer_shape) * kv_type.itemsize
        self._step_tokens = step_tokens
        windows = [model.layer(number).window for number in range(model.layers)]
        self._layers = {window: windows.count(window) for window in model.windows}

    @property
    def block_bytes(self) -> int:
        """That one block of every group takes together."""
        return self._model.layers * self._layer_bytes

    def groups(self, context: int) -> tuple[GroupConfig, ...]:
        """One for each window, in the order of `ModelConfig.windows`."""
        return tuple(GroupConfig(window, num_blocks=self._blocks(window, context)) for window in self._layers)

    def context(self, asked: int) -> int:
        """What is asked for, else what the model was made for, as far as half of the memory there is holds its cache.

        Raises UnsupportedModel where memory does not hold what was asked for, or next to nothing.
        """
        limit = int(available_memory() * KV_SHARE)
        wanted = min(asked or self._model.context_length, self._model.context_length)
        if self.bytes(wanted) <= limit:
            return wanted
        fits = self._longest(limit, wanted)
        if asked or fits < LEAST_CONTEXT:
            raise UnsupportedModel(
                f"A context of {wanted:,} tokens needs {self.bytes(wanted) / 1e9:.1f} GB of memory for its cache; "
                f"there is room for {fits:,} tokens",
                "Choose a shorter context with --context, or close other programs.",
            )
        return fits

    def bytes(self, context: int) -> int:
        """Of the pools, and of the rotary tables, which have a row for every position."""
        pools = sum(
            layers * self._layer_bytes * self._blocks(window, context) for window, layers in self._layers.items()
        )
        return pools + len(self._model.ropes) * 4 * self._model.head_dim * context

    def _longest(self, limit: int, above: int) -> int:
        """The longest context below `above` that takes no more than `limit` bytes."""
        low, high = 0, above
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes(middle) <= limit else (low, middle)
        return low

    def _blocks(self, window: int | None, context: int) -> int:
        """Of one group's pool, the null block included."""
        whole = -(-context // BLOCK_SIZE)
        if window is None:
            return 1 + whole
        # A step's tokens, and what the first of them looks back on, which may begin anywhere in a block.
        running = 1 + -(-(window + self._step_tokens) // BLOCK_SIZE)
        return 1 + min(whole, MAX_RUNNING * running * (1 + KEPT_WINDOWS))


def available_memory() -> int:
    """Bytes of memory that can be taken without swapping, as far as the system tells."""
    try:
        # What the kernel would give to a new program: page cache counts, unlike in sysconf's free pages.
        with open("/proc/meminfo", encoding="ascii") as table:
            kibibytes = next(line.split()[1] for line in table if line.startswith("MemAvailable:"))
        return int(kibibytes) << 10
    except (OSError, StopIteration, ValueError):
        return ASSUMED_MEMORY
