"""The shape of a model: the layers of a decoder, its ropes and its norms; or the shape of an encoder.

A model family's module reads it from a checkpoint. Everything here is frozen.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from engine.mixer_config import AttentionConfig, CacheConfig, MixerConfig, StateConfig


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides positions by a factor (arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Divides low frequencies by a factor and keeps high ones (rope type `llama3` in transformers)."""

    factor: float
    low: float  # a frequency with fewer rotations in the original context is divided by the factor
    high: float  # a frequency with more rotations in the original context is unchanged
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Keeps frequencies with many rotations in the original context, and divides those with few by the factor.

    Cosine and sine are scaled too (arXiv:2309.00071; `yarn` in transformers' configuration).
    """

    factor: float
    original_context: int
    fast: float = 32.0  # a frequency with more rotations in the original context is unchanged
    slow: float = 1.0  # a frequency with fewer rotations in the original context is divided by the factor
    # scale of cosine and sine; None: computed from the factor and the two fields below
    attention_factor: float | None = None
    mscale: float = 1.0
    mscale_all: float = 0.0  # second factor of the YaRN attention scale; 0: both mscale fields are ignored
    truncate: bool = True  # whether the bounds of the blended frequencies are rounded to whole indices


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Divides every frequency by its own factor, and scales cosine and sine (arXiv:2402.13753).

    There is one set of factors for contexts up to the original length, and another for longer contexts. Cached keys
    must not depend on how long their request becomes, so an engine always uses one set, chosen by its own context
    length.
    """

    original_context: int
    factor: float = 1.0  # ratio of the extended context to the original one
    attention_factor: float | None = None  # scale of cosine and sine; None: computed from the factor
    # factors per frequency; if both tuples are empty, the factors are tensors of the checkpoint
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    def is_long(self, context_length: int) -> bool:
        return context_length > self.original_context


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the frequencies, and which elements of a head are rotated as pairs."""

    base: float
    dimensions: int  # number of leading elements of a head that are rotated
    interleaved: bool  # whether pairs are (2i, 2i+1), as in GGUF files of the llama family; otherwise (i, i + d/2)
    scaling: RopeScaling | None = None
    # the d of frequencies and pairs; 0: `dimensions`. If it is larger, only the first frequencies rotate pairs.
    span: int = 0


class Score(enum.Enum):
    """How the scores of experts are computed from the logits of a router."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router chooses experts, and the weights of their outputs (arXiv:1701.06538).

    The experts with the largest scores are chosen. If scores are equal, the lower index is chosen.
    """

    experts: int
    active: int  # number of experts chosen for each token
    score: Score = Score.SOFTMAX
    normalized: bool = True  # whether the weights are divided by their sum
    epsilon: float = 0.0  # added to that sum
    scale: float = 1.0  # factor of all weights
    groups: int = 1  # experts are in this many groups of equal size
    active_groups: int = 1  # experts are chosen from the groups whose two largest scores have the largest sum


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """The shape of a layer's mixture of experts. Each expert is a gated MLP."""

    routing: Routing
    hidden: int  # width of an expert
    shared_hidden: int = 0  # width of the MLP that is computed for every token; 0: none
    shared_gate: bool = False  # whether the output of that MLP is scaled by the sigmoid of a product
    biased: bool = False  # whether biases are added to the logits of the router and to the products of each expert
    interleaved: bool = False  # whether the checkpoint has the rows of gate and up in turn
    # whether router, experts, and shared MLP have separate norms, and each expert's output has a scale
    separate: bool = False

    @property
    def columns(self) -> int:
        """Sum of the widths of all experts."""
        return self.routing.experts * self.hidden + self.shared_hidden

    @property
    def active_columns(self) -> int:
        """Sum of the widths of the experts that compute one token."""
        return self.routing.active * self.hidden + self.shared_hidden

    @property
    def active(self) -> int:
        """Number of experts that are chosen for one token."""
        return self.routing.active

    @property
    def widths(self) -> frozenset[int]:
        """The widths of all experts, and of the shared one."""
        return frozenset({self.hidden, self.shared_hidden} - {0})


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """The shape of a gated MLP that computes every token. See `ExpertConfig` for its properties."""

    hidden: int
    active: ClassVar[int] = 0

    @property
    def columns(self) -> int:
        return self.hidden

    @property
    def active_columns(self) -> int:
        return self.hidden

    @property
    def widths(self) -> frozenset[int]:
        return frozenset({self.hidden})


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The two parts of a layer: the mixer computes across tokens, and the MLP computes each token by itself."""

    mixer: MixerConfig
    mlp: MLPConfig | ExpertConfig

    def with_attention(self, change: Callable[[AttentionConfig], AttentionConfig]) -> Self:
        """Return a copy with changed attention; unchanged if the layer has none."""
        if not isinstance(self.mixer, AttentionConfig):
            return self
        return replace(self, mixer=change(self.mixer))


class Gate(enum.Enum):
    """The activation function of an MLP's gate."""

    SILU = "silu"
    GELU = "gelu"  # the tanh approximation, as in `gelu_pytorch_tanh`
    # x * sigmoid(1.702 * x), where x is at most 7; up is limited to 7 and -7, and 1 is added to it
    CLAMPED = "clamped"


class NormPlacement(enum.Enum):
    """Whether a layer normalizes the inputs of attention and MLP, their outputs, or both."""

    BEFORE = "before"
    AFTER = "after"  # the outputs, before they are added to the residual stream
    BOTH = "both"


class Block(enum.Enum):
    """The value that a layer's MLP takes as its input."""

    SEQUENTIAL = "sequential"  # the residual stream after attention has been added
    PARALLEL = "parallel"  # the input of attention, with a separate norm
    PARALLEL_ONE_NORM = "parallel, one norm"  # the input of attention, with the same norm


class NormKind(enum.Enum):
    """The value that a norm divides a row by."""

    RMS = "rms"  # the root mean square (arXiv:1910.07467)
    LAYER = "layer"  # the standard deviation, after subtracting the mean (arXiv:1607.06450)


@dataclass(frozen=True, slots=True)
class NormRule:
    """The properties shared by all norms of a model."""

    epsilon: float
    kind: NormKind = NormKind.RMS
    bias: bool = False  # whether norms of rows add a bias; norms of heads do not
    offset: float = 0.0  # constant added to the weights of a norm


class HeadNorm(enum.Enum):
    """How q and k are normalized before they are rotated."""

    EACH = "each"  # each head separately, all with the same weights
    OWN = "own"  # each head separately, with weights per head
    ALL = "all"  # all heads of a token together


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder. The family's module reads it from the checkpoint."""

    architecture: str
    layers: tuple[LayerConfig, ...]
    hidden: int
    vocab_size: int
    context_length: int  # number of tokens that the model was trained for
    norm: NormRule
    ropes: tuple[RopeConfig, ...]
    attention_scale: float = 0.0  # scale of scores; 0: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0  # soft cap c: scores become c * tanh(score / c); 0: no soft cap
    logit_softcap: float = 0.0
    logit_scale: float = 1.0  # scale of logits, before the soft cap
    embedding_scale: float = 1.0
    gate: Gate = Gate.SILU
    norm_placement: NormPlacement = NormPlacement.BEFORE
    # None: SEQUENTIAL if the checkpoint has a norm for the MLP, else PARALLEL_ONE_NORM
    block: Block | None = Block.SEQUENTIAL
    head_norm: HeadNorm | None = None
    optional_head_norm: bool = False  # whether head norms are left out if the checkpoint has no weights for them
    value_norm: bool = False  # whether the heads of v are normalized too, without weights
    qkv_bias: bool | None = False  # whether a bias is added to q, k, and v; None: if the checkpoint has one
    out_bias: bool | None = False  # whether a bias is added to the output of attention; None: if the checkpoint has one
    # whether the embedding also serves as the output head; None: if the checkpoint has no separate head
    tied_head: bool | None = None
    # number of layers in the file after the last one of the decoder; they draft further tokens, and are not loaded
    draft_layers: int = 0
    per_layer: int = 0  # width of the embeddings that each layer has for every token; 0: none
    scaled_layers: bool = False  # whether each layer scales its output

    @property
    def matrix_elements(self) -> int:
        """Approximate number of elements in the model's matrices."""
        tables = self.vocab_size * self.per_layer * len(self.layers)
        return self._elements(sum(layer.mlp.columns for layer in self.layers)) + tables

    @property
    def active_elements(self) -> int:
        """Approximate number of elements in the matrices that compute one token."""
        return self._elements(sum(layer.mlp.active_columns for layer in self.layers))

    def _elements(self, mlp_columns: int) -> int:
        mixers = sum(layer.mixer.in_width + layer.mixer.width for layer in self.layers)
        return (mixers + 3 * (mlp_columns + self.per_layer * len(self.layers)) + 2 * self.vocab_size) * self.hidden

    @property
    def mixers(self) -> frozenset[MixerConfig]:
        """The different mixers of the layers."""
        return frozenset(layer.mixer for layer in self.layers)

    @property
    def attentions(self) -> frozenset[AttentionConfig]:
        """The different kinds of attention of the layers."""
        return frozenset(mixer for mixer in self.mixers if isinstance(mixer, AttentionConfig))

    @property
    def attention(self) -> AttentionConfig:
        """The attention of the first layer that has any. Every model has such a layer."""
        return next(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionConfig))

    @property
    def mlp_widths(self) -> frozenset[int]:
        """The widths of all MLPs, dense ones, experts, and shared ones."""
        return frozenset().union(*(layer.mlp.widths for layer in self.layers))

    @property
    def step_columns(self) -> int:
        """The largest number of MLP columns that a layer computes for one token."""
        return max(layer.mlp.active_columns for layer in self.layers)

    @property
    def active_experts(self) -> int:
        """The largest number of experts that a layer computes for one token; 0 if the model has none."""
        return max(layer.mlp.active for layer in self.layers)

    @property
    def caches(self) -> tuple[CacheConfig | StateConfig, ...]:
        """The cache configuration of each KV group, in the order of the groups."""
        return tuple(sorted({mixer.cache for mixer in self.mixers}, key=lambda cache: cache.order))

    def layers_of(self, cache: CacheConfig | StateConfig) -> tuple[int, ...]:
        """Return the numbers of the layers in a KV group. Those that use the keys of another layer are in none."""
        own = (number for number in range(len(self.layers)) if self.cache_layer(number) == number)
        return tuple(number for number in own if self.layers[number].mixer.cache == cache)

    def cache_layer(self, number: int) -> int:
        """Return the number of the layer whose cache a layer reads: its own, unless attention has another source."""
        mixer = self.layers[number].mixer
        return number if not isinstance(mixer, AttentionConfig) or mixer.source is None else mixer.source

    @property
    def first_reading_layer(self) -> int | None:
        """The number of the first layer from which on every layer reads the cache of an earlier one; None: none does.

        For these layers, only tokens whose logits are needed have to be computed.
        """
        own = [number for number in range(len(self.layers)) if self.cache_layer(number) == number]
        return own[-1] + 1 if own[-1] + 1 < len(self.layers) else None

    def long_ropes(self, context_length: int) -> tuple[bool, ...]:
        """Return whether each rope uses the factors for long contexts."""
        scalings = (rope.scaling for rope in self.ropes)
        return tuple(isinstance(it, LongRopeScaling) and it.is_long(context_length) for it in scalings)


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The shape of an encoder. The family's module reads it from the checkpoint."""

    layers: int
    hidden: int
    heads: int
    mlp_hidden: int
    vocab_size: int
    context_length: int  # number of position embeddings, which is the token limit of a text
    token_types: int
    norm_epsilon: float

    @property
    def matrix_elements(self) -> int:
        """Approximate number of elements in the encoder's matrices."""
        return self.layers * (4 * self.hidden + 2 * self.mlp_hidden) * self.hidden + self.vocab_size * self.hidden
