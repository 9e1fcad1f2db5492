"""What the engine is told before it starts: the shape of a model, and the resolved knobs of a run.

Both are frozen and built once. Knows numbers. Refuses to know files (a family's module reads those) and user settings.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

BLOCK_SIZE = 16  # tokens in a KV block
TARGET_LATENCY = 0.06  # seconds between two tokens of a stream while others' prompts are read


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by a factor (arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths are stretched, short ones stay (the `llama3` rope type of transformers' configuration)."""

    factor: float
    low: float  # turns within the original context, below which a frequency is divided by the factor
    high: float  # and above which it stays
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Frequencies that make many turns within the original context stay, those that make few are divided by the factor,
    and cosine and sine are multiplied (arXiv:2309.00071; `yarn` in transformers' configuration)."""

    factor: float
    original_context: int
    fast: float = 32.0  # turns within the original context, above which a frequency stays
    slow: float = 1.0  # and below which it is divided
    attention_factor: float | None = None  # of cosine and sine; None: it follows from the factor and the two below
    mscale: float = 1.0
    mscale_all: float = 0.0  # 0: neither of the two is used
    truncate: bool = True  # the blended frequencies begin and end at whole numbers


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Every frequency is divided by a factor of its own, and cosine and sine are multiplied (arXiv:2402.13753).

    There are factors for contexts up to the original one, and others for longer ones. Cached keys must not depend on
    how long their request becomes, so an engine takes one of the two for all it computes, by its own context length.
    """

    original_context: int
    factor: float = 1.0  # by which the context is longer than that
    attention_factor: float | None = None  # of cosine and sine; None: it follows from the factor
    short: tuple[float, ...] = ()  # empty: both are tensors of the checkpoint
    long: tuple[float, ...] = ()

    def is_long(self, context_length: int) -> bool:
        return context_length > self.original_context


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: which frequencies, and which elements of a head form a pair."""

    base: float
    dimensions: int  # elements of a head that turn, the first ones of it
    interleaved: (
        bool  # pairs are neighbours (2i, 2i+1), as GGUF files of the llama family store them; else (i, i + d/2)
    )
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """In what the attention of one layer differs from that of others."""

    window: int | None = None  # tokens that it looks back on, its own included; None: all
    rope: int | None = 0  # which of the model's ropes turns its heads; None: none does


class Gate(enum.Enum):
    """What the gate of an MLP goes through before it is multiplied."""

    SILU = "silu"
    GELU = "gelu"  # by tanh, as `gelu_pytorch_tanh`


class NormPlacement(enum.Enum):
    """Where a layer normalizes what its attention and its MLP read, or what they give."""

    BEFORE = "before"
    AFTER = "after"  # what they give, before it is added
    BOTH = "both"


class Block(enum.Enum):
    """What the MLP of a layer reads."""

    SEQUENTIAL = "sequential"  # the stream after attention was added to it
    PARALLEL = "parallel"  # the stream that attention reads, through a norm of its own
    PARALLEL_ONE_NORM = "parallel, one norm"  # the stream that attention reads, through the same norm


class NormKind(enum.Enum):
    """What a normalized row is divided by."""

    RMS = "rms"  # its root mean square (arXiv:1910.07467)
    LAYER = "layer"  # its standard deviation, after its mean was subtracted (arXiv:1607.06450)


@dataclass(frozen=True, slots=True)
class NormRule:
    """What all norms of a model have in common."""

    epsilon: float
    kind: NormKind = NormKind.RMS
    bias: bool = False  # added to normalized rows; normalized heads have none
    offset: float = 0.0  # added to the weights


class HeadNorm(enum.Enum):
    """What is normalized of q and k before they turn."""

    EACH = "each"  # every head for itself, all with the same weights
    OWN = "own"  # every head for itself, each with weights of its own
    ALL = "all"  # all heads of a token together


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
    norm: NormRule
    ropes: tuple[RopeConfig, ...]
    layout: tuple[LayerConfig, ...] = ()  # one for each layer; empty: all are alike
    attention_scale: float = 0.0  # of scores; 0: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0  # c: scores become c * tanh(score / c); 0: they stay
    logit_softcap: float = 0.0
    logit_scale: float = 1.0  # of logits, before the soft cap
    embedding_scale: float = 1.0
    gate: Gate = Gate.SILU
    norm_placement: NormPlacement = NormPlacement.BEFORE
    block: Block | None = Block.SEQUENTIAL  # None: one norm, unless the checkpoint has another one for the MLP
    head_norm: HeadNorm | None = None
    optional_head_norm: bool = False  # a checkpoint without weights of head norms has no head norms
    qkv_bias: bool | None = False  # added to q, k and v; None: where the checkpoint has one
    out_bias: bool | None = False  # added to what attention gives, in the same way
    tied_head: bool | None = None  # the head is the embedding; None: where the checkpoint has no other

    @property
    def matrix_elements(self) -> int:
        """About how many weights its matrices have."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        mlp = 3 * self.mlp_hidden * self.hidden
        return self.layers * (attention + mlp) + 2 * self.vocab_size * self.hidden

    def layer(self, number: int) -> LayerConfig:
        return self.layout[number] if self.layout else LayerConfig()

    def long_ropes(self, context_length: int) -> tuple[bool, ...]:
        """Of each rope, whether it takes the factors for long contexts."""
        scalings = (rope.scaling for rope in self.ropes)
        return tuple(isinstance(it, LongRopeScaling) and it.is_long(context_length) for it in scalings)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each KV group: one group for all layers that look back as far."""
        windows = {self.layer(number).window for number in range(self.layers)}
        return tuple(sorted(windows, key=lambda window: (window is not None, window)))


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """How the layers of one KV group remember. Which layers they are, and what a block holds, is the device's."""

    window: int | None = None  # tokens that attention looks back on, its own included; None: all
    recurrent: bool = False  # one state a request, in place of a block for each BLOCK_SIZE tokens
    num_blocks: int = 0  # in the device pool, the null block included; 0: EngineConfig.num_blocks


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """How much of a GPU's memory an engine may take, in all. Neither: what is free, but for a reserve."""

    num_bytes: int = 0
    share: float = 0.0  # of all that the GPU has


ALL_FREE = MemoryLimit()


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
    longest_context: int = 0  # the most of that which the memory holds; 0: not known
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

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """Blocks of each group's device pool, the null block included."""
        return tuple(map(self.pool_blocks, range(len(self.groups))))

    def pool_blocks(self, group: int) -> int:
        return self.groups[group].num_blocks or self.num_blocks

    def with_pools(self, sizes: Sequence[int]) -> Self:
        """With pools of so many blocks, of each group."""
        groups = tuple(replace(group, num_blocks=size) for group, size in zip(self.groups, sizes, strict=True))
        return replace(self, groups=groups, num_blocks=max(sizes))

    def without_host_pools(self) -> Self:
        return replace(self, host_blocks=0)


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The shape of an encoder. Filled by the family's module from the checkpoint."""

    layers: int
    hidden: int
    heads: int
    mlp_hidden: int
    vocab_size: int
    context_length: int  # positions that it has
    token_types: int
    norm_epsilon: float

    @property
    def matrix_elements(self) -> int:
        """About how many weights its matrices have."""
        return self.layers * (4 * self.hidden + 2 * self.mlp_hidden) * self.hidden + self.vocab_size * self.hidden
