"""The shapes of mixers, the parts of layers that compute across tokens, and of what they keep of past tokens.

Everything here is frozen.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The keys and values that a layer keeps. Layers with equal configurations share a KV group."""

    kv_heads: int
    head_dim: int
    window: int | None = None  # number of tokens that a query attends to, including its own; None: all

    @property
    def order(self) -> tuple[int, ...]:
        """The sort key of KV groups. Groups without a window are first, and groups of states last."""
        return 0, self.window or 0, self.kv_heads, self.head_dim


@dataclass(frozen=True, slots=True)
class StateConfig:
    """The state that a recurrent layer keeps: a summary of all past tokens. See `CacheConfig`."""

    elements: int  # number of float32

    @property
    def order(self) -> tuple[int, ...]:
        return 1, self.elements


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The shape of a layer's attention."""

    heads: int
    cache: CacheConfig
    rope: int | None = 0  # index of the model's rope that rotates the heads; None: no rotation
    # whether the output is scaled by the sigmoid of a product; its weight is in that of q, after each head
    gated: bool = False
    # whether the softmax of each head has one more score, which is a weight of the model and has no value
    sinks: bool = False
    # whether the values are the keys before their norm; None: if the checkpoint has no weight for values
    values_are_keys: bool | None = False
    source: int | None = None  # number of the layer whose keys and values are attended to; None: its own

    @property
    def head_dim(self) -> int:
        return self.cache.head_dim

    @property
    def kv_heads(self) -> int:
        return self.cache.kv_heads

    @property
    def width(self) -> int:
        """Number of outputs."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return self.width + (2 * self.kv_width if self.source is None else 0)

    @property
    def in_width(self) -> int:
        """Number of outputs of the product before the mixer."""
        return self.qkv_width


@dataclass(frozen=True, slots=True)
class ConvConfig:
    """The shape of a layer's gated short convolution (arXiv:2511.23404). See `AttentionConfig` for its properties."""

    width: int
    taps: int  # number of tokens that an output depends on, including its own

    @property
    def cache(self) -> StateConfig:
        """The last inputs of the convolution."""
        return StateConfig((self.taps - 1) * self.width)

    @property
    def in_width(self) -> int:
        return 3 * self.width


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The shape of a layer's gated delta rule (arXiv:2412.06464). See `AttentionConfig` for its properties.

    Each value head has a matrix of key_dim rows and value_dim columns as its state. Several value heads share a key
    head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # of the convolution of queries, keys, and values
    # whether value head n has key head n % key_heads, as in GGUF files; otherwise, adjacent value heads share one
    tiled: bool

    @property
    def width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Width of the queries, keys, and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.width

    @property
    def in_width(self) -> int:
        return self.conv_width + self.width + 2 * self.value_heads

    @property
    def cache(self) -> StateConfig:
        """The last inputs of the convolution, then the matrices of the value heads."""
        matrices = self.value_heads * self.key_dim * self.value_dim
        return StateConfig((self.taps - 1) * self.conv_width + matrices)


MixerConfig = AttentionConfig | ConvConfig | DeltaConfig
