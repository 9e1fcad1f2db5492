"""Configuration that is fixed before the engine starts: the resolved options of a run, filled by `engine.loading`."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

BLOCK_SIZE = 16  # tokens in a KV block
SMALL_MODEL = 500_000_000  # matrix elements
CHECKPOINT_TOKENS = 256  # least number of tokens between two states that are kept for later requests
TARGET_LATENCY = 0.06  # target for the seconds between two tokens of a stream while other prompts are prefilled


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """The attention span of one KV group. The device decides which layers are in it and what a block contains."""

    window: int | None = None  # number of tokens that a query attends to, including its own; None: all
    recurrent: bool = False  # whether a block is a state of a request
    spacing: int = CHECKPOINT_TOKENS  # number of tokens between two states that are kept for later requests
    num_blocks: int = 0  # number of blocks in the device pool, including the null block; 0: EngineConfig.num_blocks
    host_blocks: int = 0  # number of blocks in the host pool, including the null block; 0: EngineConfig.host_blocks
    block_bytes: int = 0  # size of one block in bytes; 0: unknown

    @property
    def block_tokens(self) -> int:
        """Number of tokens between one cached block of a request and the next."""
        return self.spacing if self.recurrent else BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Limit of the memory that an engine may use. With neither field set, it is the free memory minus a reserve."""

    num_bytes: int = 0
    share: float = 0.0  # share of the total memory


ALL_FREE = MemoryLimit()


class Preemption(enum.Enum):
    """How to handle the KV blocks of a preempted request."""

    AUTO = "auto"  # use the method that is faster by measurement
    SWAP = "swap"  # copy the blocks to the host pool, and back on resuming
    RECOMPUTE = "recompute"  # drop the blocks, except for those that stay in the prefix cache


class Restore(enum.Enum):
    """Whether to read a cached prefix from disk."""

    AUTO = "auto"  # read the prefix if measurements show that this is faster than recomputing it
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The resolved options of one engine, filled by `engine.loading`."""

    backend: str  # name of the kernel backend
    context_length: int  # limit of a request in tokens, prompt and reply together
    num_blocks: int  # number of KV blocks in the device pool, including the null block
    model_context_length: int = 0  # number of tokens that the model was trained for
    longest_context: int = 0  # longest context that fits into memory, at most model_context_length; 0: unknown
    max_step_tokens: int = 256  # token budget of one step: bounds how long an abort or a new request waits
    max_running: int = 16  # maximum number of requests that hold blocks at the same time
    # maximum rows of logits in one step that reports log-probabilities of prompts; 0: unlimited
    max_logit_rows: int = 0
    step_depth: int = 1  # maximum number of steps launched before the first of them is collected
    # the inputs other than tokens that keys and values depend on: model, numerics, KV type
    cache_salt: tuple[str, ...] = ()
    threads: int = 1  # number of threads that compute
    groups: tuple[GroupConfig, ...] = (GroupConfig(),)
    host_blocks: int = 0  # blocks in each group's host pool, including the null block; 0: no host pools
    preemption: Preemption = Preemption.AUTO
    restore: Restore = Restore.AUTO
    write_delay: float = 0.5  # seconds to wait for more filled blocks before they are written to files together
    # limit of the seconds between two tokens of a stream while long prompts are prefilled; 0: unlimited
    target_latency: float = 0.0
    drafts: bool = False  # whether steps verify drafted tokens

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """The number of blocks in each group's device pool, including the null block."""
        return tuple(map(self.pool_blocks, range(len(self.groups))))

    @property
    def host_pool_sizes(self) -> tuple[int, ...]:
        """The number of blocks in each group's host pool, including the null block; empty without host pools."""
        sizes = tuple(group.host_blocks or self.host_blocks for group in self.groups)
        return sizes if all(sizes) else ()

    @property
    def has_states(self) -> bool:
        """Whether any group holds a state, which cannot be reset to an earlier token."""
        return any(group.recurrent for group in self.groups)

    def pool_blocks(self, group: int) -> int:
        return self.groups[group].num_blocks or self.num_blocks

    def with_pools(self, sizes: Sequence[int]) -> Self:
        """Return a copy with the given number of blocks per group."""
        groups = tuple(replace(group, num_blocks=size) for group, size in zip(self.groups, sizes, strict=True))
        return replace(self, groups=groups, num_blocks=max(sizes))

    def without_host_pools(self) -> Self:
        return replace(self, host_blocks=0, groups=tuple(replace(group, host_blocks=0) for group in self.groups))


def default_activation_bits(matrix_elements: int) -> int:
    """Return the number of bits, 14 or 8, to which a model's activations are rounded.

    Rounding has the largest effect in small models, which are fast with either. With 14 bits they give the same answers
    as with float32. Large models use 8 bits, as most integer engines do, and prefill nearly twice as fast. CPU kernels
    round all activations (`quant.cpu.activations`). GPU kernels round those of prompts to 8 bits on cards where this is
    faster, and use bfloat16 instead of 14 bits.
    """
    return 14 if matrix_elements < SMALL_MODEL else 8
