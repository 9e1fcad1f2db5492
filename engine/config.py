"""What the engine is told before it starts: the shape of a model, and the resolved knobs of a run.

Both are frozen and built once. Knows numbers. Refuses to know files (a family's module reads those) and user settings.
"""

import enum
from dataclasses import dataclass

BLOCK_SIZE = 16  # tokens in a KV block
TARGET_LATENCY = 0.06  # seconds between two tokens of a stream while others' prompts are read


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: which frequencies, and which elements of a head form a pair."""

    base: float
    dimensions: int  # elements of a head that turn; all of them, in this version
    interleaved: (
        bool  # pairs are neighbours (2i, 2i+1), as GGUF files of the llama family store them; else (i, i + d/2)
    )
    linear_factor: float = 1.0  # positions are divided by it


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder. Filled by the family's module from the checkpoint."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_hidden: int
    vocab_size: int
    context_length: int  # tokens the model was made for
    norm_epsilon: float
    rope: RopeConfig

    @property
    def matrix_elements(self) -> int:
        """About how many weights its matrices have."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        mlp = 3 * self.mlp_hidden * self.hidden
        return self.layers * (attention + mlp) + 2 * self.vocab_size * self.hidden


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """How the layers of one KV group remember. Which layers they are, and what a block holds, is the device's."""

    window: int | None = None  # tokens that attention looks back on, its own included; None: all
    recurrent: bool = False  # one state a request, in place of a block for each BLOCK_SIZE tokens
    num_blocks: int = 0  # in the device pool, the null block included; 0: EngineConfig.num_blocks


class Preemption(enum.Enum):
    """What a request that yields does with what it has computed."""

    AUTO = "auto"  # whichever is measured to be faster
    SWAP = "swap"  # copied to the host pool, and back
    RECOMPUTE = "recompute"  # given up, but for what stays in the prefix cache


class Restore(enum.Enum):
    """Whether a prefix that lies in files is read."""

    AUTO = "auto"  # where that is measured to be faster than computing it
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The resolved knobs of one engine. Filled by `engine.loading`."""

    backend: str  # name of the kernel backend
    context_length: int  # most tokens a request may hold, prompt and reply together
    num_blocks: int  # KV blocks in the device pool, the null block included
    model_context_length: int = 0  # what the model was made for
    max_step_tokens: int = 256  # token budget of one step: bounds how long a stop or a newcomer waits
    max_running: int = 16  # requests that may hold blocks at the same time
    step_depth: int = 1  # steps launched before the first of them is collected
    cache_salt: tuple[str, ...] = ()  # what keys and values depend on besides the tokens: model, numerics, KV type
    threads: int = 1  # that compute
    groups: tuple[GroupConfig, ...] = (GroupConfig(),)
    host_blocks: int = 0  # in each group's host pool, the null block included; 0: there is none
    block_bytes: int = 0  # that one block of every group takes together
    preemption: Preemption = Preemption.AUTO
    restore: Restore = Restore.AUTO
    write_delay: float = 0.5  # seconds that filled blocks wait for others before they are written to files together
    target_latency: float = 0.0  # seconds between two tokens of a stream that a long prompt may cause; 0: any

    def pool_blocks(self, group: int) -> int:
        """Blocks of a group's device pool, the null block included."""
        return self.groups[group].num_blocks or self.num_blocks
