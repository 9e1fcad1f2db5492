"""Configuration that is fixed before the engine starts: the shape of a model, and the resolved options of a run.

Both are frozen. The module of a model family fills the shape from a checkpoint; `engine.loading` resolves the options.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

BLOCK_SIZE = 16  # tokens in a KV block
TARGET_LATENCY = 0.06  # seconds between two tokens of a stream while other prompts are prefilled


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by a factor (arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths are stretched, short ones stay (the `llama3` rope type of transformers' configuration)."""

    factor: float
    low: float  # below this number of rotations in the original context, a frequency is divided by the factor
    high: float  # above this number of rotations in the original context, a frequency is unchanged
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Frequencies with many rotations within the original context stay, those with few are divided by the factor, and
    cosine and sine are scaled (arXiv:2309.00071; `yarn` in transformers' configuration).
    """

    factor: float
    original_context: int
    fast: float = 32.0  # above this number of rotations in the original context, a frequency is unchanged
    slow: float = 1.0  # below this number of rotations in the original context, a frequency is divided
    # scale of cosine and sine; None: computed from the factor and the two fields below
    attention_factor: float | None = None
    mscale: float = 1.0
    mscale_all: float = 0.0  # 0: both mscales are ignored
    truncate: bool = True  # round the bounds of the blended frequencies to whole indices


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Every frequency is divided by its own factor, and cosine and sine are scaled (arXiv:2402.13753).

    There are factors for contexts up to the original one, and others for longer contexts. Cached keys must not depend
    on how long their request becomes, so an engine uses one of the two sets, by its own context length.
    """

    original_context: int
    factor: float = 1.0  # ratio of the extended context to the original one
    attention_factor: float | None = None  # scale of cosine and sine; None: computed from the factor
    short: tuple[float, ...] = ()  # empty: both are tensors of the checkpoint
    long: tuple[float, ...] = ()

    def is_long(self, context_length: int) -> bool:
        return context_length > self.original_context


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the frequencies, and which elements of a head form a pair."""

    base: float
    dimensions: int  # leading elements of a head that are rotated
    interleaved: bool  # pairs are (2i, 2i+1), as in GGUF files of the llama family; else (i, i + d/2)
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The properties in which the attention of a layer differs from that of others."""

    window: int | None = None  # tokens that it attends to, including its own; None: all
    rope: int | None = 0  # index of the model's rope that rotates its heads; None: no rotation


class Gate(enum.Enum):
    """The activation function of an MLP's gate."""

    SILU = "silu"
    GELU = "gelu"  # with tanh, as in `gelu_pytorch_tanh`


class NormPlacement(enum.Enum):
    """Whether a layer normalizes the inputs of attention and MLP, their outputs, or both."""

    BEFORE = "before"
    AFTER = "after"  # the outputs, before they are added to the residual stream
    BOTH = "both"


class Block(enum.Enum):
    """The input of a layer's MLP."""

    SEQUENTIAL = "sequential"  # the residual stream after attention was added
    PARALLEL = "parallel"  # the input of attention, with a separate norm
    PARALLEL_ONE_NORM = "parallel, one norm"  # the input of attention, with the same norm


class NormKind(enum.Enum):
    """The divisor of a normalized row."""

    RMS = "rms"  # the root mean square (arXiv:1910.07467)
    LAYER = "layer"  # the standard deviation, after the mean was subtracted (arXiv:1607.06450)


@dataclass(frozen=True, slots=True)
class NormRule:
    """The properties that all norms of a model share."""

    epsilon: float
    kind: NormKind = NormKind.RMS
    bias: bool = False  # added to normalized rows, but not to normalized heads
    offset: float = 0.0  # added to the weights


class HeadNorm(enum.Enum):
    """How q and k are normalized before they are rotated."""

    EACH = "each"  # each head separately, all with the same weights
    OWN = "own"  # each head separately, with weights per head
    ALL = "all"  # all heads of a token together


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder. The family's module fills it from the checkpoint."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_hidden: int
    vocab_size: int
    context_length: int  # tokens the model was trained for
    norm: NormRule
    ropes: tuple[RopeConfig, ...]
    layout: tuple[LayerConfig, ...] = ()  # one per layer; empty: all layers are alike
    attention_scale: float = 0.0  # scale of scores; 0: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0  # c: scores become c * tanh(score / c); 0: no soft cap
    logit_softcap: float = 0.0
    logit_scale: float = 1.0  # scale of logits, before the soft cap
    embedding_scale: float = 1.0
    gate: Gate = Gate.SILU
    norm_placement: NormPlacement = NormPlacement.BEFORE
    block: Block | None = Block.SEQUENTIAL  # None: one norm, unless the checkpoint has a second one for the MLP
    head_norm: HeadNorm | None = None
    optional_head_norm: bool = False  # a checkpoint without weights of head norms has no head norms
    qkv_bias: bool | None = False  # added to q, k, and v; None: if the checkpoint has one
    out_bias: bool | None = False  # added to the output of attention, in the same way
    tied_head: bool | None = None  # the head is the embedding; None: if the checkpoint has no other head

    @property
    def matrix_elements(self) -> int:
        """Approximate number of weights in its matrices."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        mlp = 3 * self.mlp_hidden * self.hidden
        return self.layers * (attention + mlp) + 2 * self.vocab_size * self.hidden

    def layer(self, number: int) -> LayerConfig:
        return self.layout[number] if self.layout else LayerConfig()

    def long_ropes(self, context_length: int) -> tuple[bool, ...]:
        """Return, per rope, whether it uses the factors for long contexts."""
        scalings = (rope.scaling for rope in self.ropes)
        return tuple(isinstance(it, LongRopeScaling) and it.is_long(context_length) for it in scalings)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each KV group. Layers with the same window form a group."""
        windows = {self.layer(number).window for number in range(self.layers)}
        return tuple(sorted(windows, key=lambda window: (window is not None, window)))


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """The attention span of one KV group. The device decides its layers and the content of a block."""

    window: int | None = None  # tokens that attention looks back on, including its own; None: all
    recurrent: bool = False  # one state per request instead of one block per BLOCK_SIZE tokens
    num_blocks: int = 0  # in the device pool, including the null block; 0: EngineConfig.num_blocks


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Limit of the GPU memory that an engine may use. Without either field: the free memory, minus a reserve."""

    num_bytes: int = 0
    share: float = 0.0  # share of the GPU's total memory


ALL_FREE = MemoryLimit()


class Preemption(enum.Enum):
    """How the KV blocks of a preempted request are handled."""

    AUTO = "auto"  # the faster of the two, as measured
    SWAP = "swap"  # copied to the host pool, and back
    RECOMPUTE = "recompute"  # dropped, except for what stays in the prefix cache


class Restore(enum.Enum):
    """Whether a prefix that is in files is read."""

    AUTO = "auto"  # read the prefix from disk if measurements show that this is faster than recomputing it
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The resolved options of one engine. Filled by `engine.loading`."""

    backend: str  # name of the kernel backend
    context_length: int  # limit of a request in tokens, prompt and reply together
    num_blocks: int  # KV blocks in the device pool, including the null block
    model_context_length: int = 0  # tokens the model was trained for
    longest_context: int = 0  # longest context that fits the memory, at most model_context_length; 0: unknown
    max_step_tokens: int = 256  # token budget of one step: bounds how long an abort or a new request waits
    max_running: int = 16  # requests that may hold blocks at the same time
    step_depth: int = 1  # steps launched before the first of them is collected
    # everything besides the tokens that keys and values depend on: model, numerics, KV type
    cache_salt: tuple[str, ...] = ()
    threads: int = 1  # that compute
    groups: tuple[GroupConfig, ...] = (GroupConfig(),)
    host_blocks: int = 0  # in each group's host pool, including the null block; 0: no host pool
    block_bytes: int = 0  # bytes of one block of every group together
    preemption: Preemption = Preemption.AUTO
    restore: Restore = Restore.AUTO
    write_delay: float = 0.5  # seconds that filled blocks wait for more blocks before they are written to files
    target_latency: float = 0.0  # seconds between two tokens of a stream while long prompts are prefilled; 0: unlimited

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """Blocks of each group's device pool, including the null block."""
        return tuple(map(self.pool_blocks, range(len(self.groups))))

    def pool_blocks(self, group: int) -> int:
        return self.groups[group].num_blocks or self.num_blocks

    def with_pools(self, sizes: Sequence[int]) -> Self:
        """Return a copy with these numbers of blocks per group."""
        groups = tuple(replace(group, num_blocks=size) for group, size in zip(self.groups, sizes, strict=True))
        return replace(self, groups=groups, num_blocks=max(sizes))

    def without_host_pools(self) -> Self:
        return replace(self, host_blocks=0)


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The shape of an encoder. The family's module fills it from the checkpoint."""

    layers: int
    hidden: int
    heads: int
    mlp_hidden: int
    vocab_size: int
    context_length: int  # number of position embeddings
    token_types: int
    norm_epsilon: float

    @property
    def matrix_elements(self) -> int:
        """Approximate number of weights in its matrices."""
        return self.layers * (4 * self.hidden + 2 * self.mlp_hidden) * self.hidden + self.vocab_size * self.hidden
