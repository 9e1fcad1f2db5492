"""KVBudget: how long a context fits into memory, and how many blocks the pool of each KV group has.

Knows shapes, and how much of the host's memory is free. Refuses to know devices.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine.config import BLOCK_SIZE, GroupConfig, ModelConfig
from engine.errors import OutOfMemory, UnsupportedModel

if TYPE_CHECKING:
    import torch

ASSUMED_MEMORY = 8 << 30  # bytes, where the system does not tell how much is free
KV_SHARE = 0.5  # of the host's free memory: the most that the cache may grow to
LESS_MEMORY = "Choose a smaller model or fewer bits a weight (ingle fit tells which fit), or close other programs."
LEAST_CONTEXT = 512  # tokens
MAX_RUNNING = 16  # requests that hold blocks at the same time
KEPT_WINDOWS = 2  # for each window that a running request looks at, those that are kept for later ones


class KVBudget:
    """The memory of one model's caches. `layer_shape` is that of one layer of one block, in elements of `kv_type`."""

    def __init__(
        self,
        model: ModelConfig,
        layer_shape: Iterable[int],
        kv_type: "torch.dtype",
        step_tokens: int,
        max_running: int = MAX_RUNNING,
    ) -> None:
        self._model = model
        self._max_running = max_running
        self._layer_bytes = math.prod(layer_shape) * kv_type.itemsize
        self._step_tokens = step_tokens
        windows = [model.layer(number).window for number in range(model.layers)]
        self._layers = {window: windows.count(window) for window in model.windows}

    @property
    def token_bytes(self) -> dict[int | None, int]:
        """What a token takes in the layers of each window."""
        return {window: layers * self._layer_bytes // BLOCK_SIZE for window, layers in self._layers.items()}

    @property
    def block_bytes(self) -> int:
        """That one block of every group takes together."""
        return self._model.layers * self._layer_bytes

    def groups(self, tokens: int) -> tuple[GroupConfig, ...]:
        """Pools that hold so many tokens, of one request or of several: one for each window, in the order of
        `ModelConfig.windows`."""
        return tuple(GroupConfig(window, num_blocks=self._blocks(window, tokens)) for window in self._layers)

    def context(self, asked: int, limit: int) -> int:
        """What is asked for, else what the model was made for, as far as `limit` bytes hold its cache.

        Raises UnsupportedModel where they do not hold what was asked for, or next to nothing.
        """
        wanted = min(asked or self._model.context_length, self._model.context_length)
        fits = self.tokens(limit, wanted)
        if fits == wanted:
            return wanted
        if asked or fits < LEAST_CONTEXT:
            raise UnsupportedModel(
                f"A context of {wanted:,} tokens needs {self.bytes(wanted) / 1e9:.1f} GB of memory for its cache; "
                f"there is room for {fits:,} tokens",
                "Choose a shorter context with --context, or close other programs.",
            )
        return fits

    def bytes(self, tokens: int) -> int:
        """Of the pools, and of the rotary tables, which have a row for every position."""
        pools = sum(
            layers * self._layer_bytes * self._blocks(window, tokens) for window, layers in self._layers.items()
        )
        return pools + self.table_bytes(tokens)

    def table_bytes(self, tokens: int) -> int:
        """Of the rotary tables."""
        return len(self._model.ropes) * 4 * self._model.head_dim * min(tokens, self._model.context_length)

    def tokens(self, limit: int, most: int) -> int:
        """Of how many tokens, up to `most`, the pools take no more than `limit` bytes."""
        if self.bytes(most) <= limit:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes(middle) <= limit else (low, middle)
        return low

    def _blocks(self, window: int | None, tokens: int) -> int:
        """Of one group's pool, the null block included."""
        whole = -(-tokens // BLOCK_SIZE)
        if window is None:
            return 1 + whole
        # A step's tokens, and what the first of them looks back on, which may begin anywhere in a block.
        running = 1 + -(-(window + self._step_tokens) // BLOCK_SIZE)
        return 1 + min(whole, self._max_running * running * (1 + KEPT_WINDOWS))


def host_share() -> int:
    """Bytes that caches in the host's memory may take, whatever else is there."""
    return int(available_memory() * KV_SHARE)


def host_room(needed: int, memory: int = 0) -> int:
    """Bytes that caches may take of the host's memory beside `needed` ones, for weights and steps. `memory`: how much
    there is; 0: what is free.

    Raises OutOfMemory where there is no room for those.
    """
    free = host_memory(memory)
    if needed >= free:
        raise OutOfMemory(
            f"The model needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free", LESS_MEMORY
        )
    return min(int(free * KV_SHARE), free - needed)


def host_memory(given: int) -> int:
    """Bytes that there are: those that are given, else those that are free."""
    return given or available_memory()


def available_memory() -> int:
    """Bytes of memory that can be taken without swapping, as far as the system tells."""
    try:
        # What the kernel would give to a new program: page cache counts, unlike in sysconf's free pages.
        with open("/proc/meminfo", encoding="ascii") as table:
            kibibytes = next(line.split()[1] for line in table if line.startswith("MemAvailable:"))
        return int(kibibytes) << 10
    except (OSError, StopIteration, ValueError):
        return ASSUMED_MEMORY
