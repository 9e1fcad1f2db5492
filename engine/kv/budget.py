"""KVBudget: the context length that fits into memory, and the number of blocks in each KV group's pool."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.config import BLOCK_SIZE, CHECKPOINT_TOKENS, GroupConfig
from engine.errors import OutOfMemory, UnsupportedModel
from engine.mixer_config import CacheConfig, StateConfig
from engine.model_config import ModelConfig
from engine.system_memory import available_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.kv.cache import KVGroup

KV_SHARE = 0.5  # share of the host's free memory that the KV cache may take
LESS_MEMORY = "Choose a smaller model or fewer bits per weight (ingle fit shows which fit), or close other programs."
USEFUL_CONTEXT = 32_768  # tokens; a context up to this length may take all memory
MIN_CONTEXT = 512  # shortest useful context in tokens
MAX_RUNNING = 16  # requests that may hold blocks at the same time
MAX_CHECKPOINT_TOKENS = 4096
# states of a running request: one that two steps under way read, one that each of them writes, one that is kept
RUNNING_STATES = 4
MIN_CACHED_STATES = 8  # states kept for later requests, if those of a full cache are fewer
CACHED_WINDOWS = 2  # number of windows kept for later requests, per window of a running request


class KVBudget:
    """The memory that one model's caches need."""

    def __init__(
        self,
        model: ModelConfig,
        groups: "Sequence[KVGroup]",
        step_tokens: int,
        max_running: int = MAX_RUNNING,
    ) -> None:
        self._model = model
        self._max_running = max_running
        self._groups = groups
        self._step_tokens = step_tokens

    @property
    def token_bytes(self) -> dict[int | None, int]:
        """Bytes per token in the layers of each window."""
        found: dict[int | None, int] = {}
        for group in self._groups:
            if isinstance(group.cache, CacheConfig):
                window = group.cache.window
                found[window] = found.get(window, 0) + group.block_bytes // BLOCK_SIZE
        return found

    @property
    def state_bytes(self) -> int:
        """Bytes of one state of all recurrent layers."""
        return sum(group.block_bytes for group in self._groups if isinstance(group.cache, StateConfig))

    @property
    def spacing(self) -> int:
        """Number of tokens between two states of a prompt that are kept.

        They are about as large as the keys and values of the tokens between them, unless the number would be out of
        bounds.
        """
        tokens = self.state_bytes // max(1, sum(self.token_bytes.values())) // BLOCK_SIZE * BLOCK_SIZE
        return min(max(tokens, CHECKPOINT_TOKENS), MAX_CHECKPOINT_TOKENS)

    def groups(self, tokens: int, host_bytes: int = 0) -> tuple[GroupConfig, ...]:
        """Return the groups, one for each of `ModelConfig.caches`, with pools for `tokens` tokens in total.

        `host_bytes`: size of all host pools together; 0: none.
        """
        groups = tuple(
            replace(
                group_config(group.cache),
                spacing=self.spacing,
                num_blocks=self._blocks(group.cache, tokens),
                block_bytes=group.block_bytes,
            )
            for group in self._groups
        )
        return with_host_pools(groups, host_bytes) if host_bytes else groups

    def context(self, asked: int, limit: int) -> int:
        """Return the context length to use: `asked` or the model's own, but at most the tokens that fit into `limit`
        bytes.

        Raises UnsupportedModel if `asked` does not fit, or if fewer than MIN_CONTEXT tokens fit.
        """
        wanted = min(asked or self._model.context_length, self._model.context_length)
        fits = self.tokens(limit, wanted)
        if fits == wanted:
            return wanted
        if asked or fits < MIN_CONTEXT:
            raise UnsupportedModel(
                f"A context of {wanted:,} tokens needs {self.bytes(wanted) / 1e9:.1f} GB of memory for its cache; "
                f"{fits:,} tokens fit",
                "Choose a shorter context with --context, or close other programs.",
            )
        return fits

    def limit(self, room: int, share: float, asked: int) -> int:
        """Return the number of bytes that the caches may take: `share` of `room`, or more for a context that needs it.

        `asked`: context length that the user has chosen, in tokens; 0: none, so that a useful one is assumed.
        """
        least = self.bytes(min(asked or USEFUL_CONTEXT, self._model.context_length))
        return min(room, max(int(share * room), least))

    def bytes(self, tokens: int) -> int:
        """Return the size in bytes of the pools and of the rotary tables, which have a row for each position."""
        pools = sum(group.block_bytes * self._blocks(group.cache, tokens) for group in self._groups)
        return pools + self.table_bytes(tokens)

    def table_bytes(self, tokens: int) -> int:
        """Return the size of the rotary tables in bytes."""
        return sum(4 * rope.dimensions for rope in self._model.ropes) * min(tokens, self._model.context_length)

    def tokens(self, limit: int, most: int) -> int:
        """Return the number of tokens that fit into `limit` bytes, at most `most`."""
        if self.bytes(most) <= limit:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes(middle) <= limit else (low, middle)
        return low

    def _blocks(self, cache: CacheConfig | StateConfig, tokens: int) -> int:
        """Return the number of blocks in one group's pool, including the null block."""
        if isinstance(cache, StateConfig):
            running = min(self._max_running, -(-tokens // MIN_CONTEXT))
            return 1 + RUNNING_STATES * running + max(MIN_CACHED_STATES, tokens // self.spacing)
        whole, window = -(-tokens // BLOCK_SIZE), cache.window
        if window is None:
            return 1 + whole
        # A request holds the tokens of a step and the window before the first of them, which can start anywhere in a
        # block.
        running = 1 + -(-(window + self._step_tokens) // BLOCK_SIZE)
        return 1 + min(whole, self._max_running * running * (1 + CACHED_WINDOWS))


def group_config(cache: CacheConfig | StateConfig) -> GroupConfig:
    """Return the group of the layers with a cache configuration, without the sizes of its pools."""
    return GroupConfig(recurrent=True) if isinstance(cache, StateConfig) else GroupConfig(cache.window)


def with_host_pools(groups: "Sequence[GroupConfig]", num_bytes: int) -> tuple[GroupConfig, ...]:
    """Divide `num_bytes` bytes of host memory between the groups, so that all pools hold about as many tokens."""
    tokens = int(num_bytes / sum(group.block_bytes / group.block_tokens for group in groups))
    return tuple(replace(group, host_blocks=1 + max(1, tokens // group.block_tokens)) for group in groups)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host memory that a load may take, in bytes."""

    allotted: int = 0  # all that weights, steps, caches, and host pools may take; 0: a share of the free memory
    free: int = 0  # free memory to assume in estimates; 0: the actual free memory
    pools: int | None = None  # size of the host pools; None: the device's default
    loading: int = 0  # memory that loading needs besides the weights, and frees again
    reserved: int = 0  # memory to leave for another model

    @property
    def limit(self) -> int:
        return (self.allotted or self.free or available_memory()) - self.reserved

    def kv_bytes(self, weights: int, steps: int) -> int:
        """Return the size of the caches of a model that computes in the host's memory.

        Raises OutOfMemory if the weights do not fit.
        """
        pools, limit = self.pools or 0, self.limit
        rest = limit - weights - steps - pools
        needed = weights + max(steps + pools, self.loading)  # caches are not written before the weights are loaded
        if rest <= 0 or needed > limit:
            raise OutOfMemory(
                f"The model needs {needed / 1e9:.1f} GB of memory, but only {limit / 1e9:.1f} GB are free", LESS_MEMORY
            )
        return rest if self.allotted else min(int(limit * KV_SHARE), rest)

    def pool_bytes(self, default: int, weights: int) -> int:
        """Return the size of the host pools of a device with its own memory.

        `weights`: weights that stay in the host's memory. Raises OutOfMemory if more memory than allotted is needed for
        them.
        """
        asked = default if self.pools is None else self.pools
        if not self.allotted:
            return asked
        if weights > self.allotted:
            raise OutOfMemory(
                f"The model keeps {weights / 1e9:.1f} GB of weights in the computer's memory, but may use only "
                f"{self.allotted / 1e9:.1f} GB of it",
                LESS_MEMORY,
            )
        return min(asked, self.allotted - weights)


ANY_MEMORY = HostMemory()


def host_share() -> int:
    """Return the number of bytes of host memory that caches may take.

    It is a share of the free memory; weights that are loaded later are not subtracted.
    """
    return int(available_memory() * KV_SHARE)
