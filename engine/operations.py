"""Operations: what model code is written in, and the seam behind which each kind of device computes.

Coarse enough to fuse, few enough to know by heart. A model file reads the same on every backend: one computes at once,
another records a program that is run for every batch. Values between operations are the backend's own; model code
passes them on and never looks into them.
"""

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from engine.config import Gate, NormKind
from engine.kv.cache import LayerKV
from engine.rope import RotaryTable
from quant.linear import LinearBackend, QLinear

Activation: TypeAlias = Any  # rows of floats, one for each token: a tensor, or a place in a recorded program
Inputs: TypeAlias = Any  # a step's `engine.batch.Batch`, or what the backend has made of it


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalization of rows: x / sqrt(mean(x**2) + epsilon) * weight + bias, where LAYER first subtracts mean(x)."""

    weight: Tensor  # float32 [width]
    epsilon: float
    kind: NormKind = NormKind.RMS
    bias: Tensor | None = None  # float32 [width]; of LAYER alone


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Normalization of q and k before they turn, without biases.

    Weights are [head_dim]: every head for itself; [heads, head_dim]: the same, each head with its own weights; or
    [heads * head_dim]: all heads of a token together.
    """

    q: Norm
    k: Norm


@dataclass(frozen=True, slots=True)
class Attention:
    """How the heads of one layer attend."""

    scale: float  # of scores
    rotary: RotaryTable | None  # None: heads do not turn
    norms: HeadNorms | None = None
    softcap: float = 0.0  # c: scores become c * tanh(score / c); 0: they stay
    window: int | None = None  # tokens that are looked back on, the own one included; None: all


class Operations(Protocol):
    """One backend. Widths are those of the weights."""

    @property
    def weights(self) -> LinearBackend:
        """Makes the layers that these operations take."""
        ...

    def embed(self, batch: Inputs, table: QLinear, scale: float = 1.0) -> Activation:
        """The table's row of every token, times `scale`."""
        ...

    def norm(self, x: Activation, norm: Norm, add_to: Activation | None = None) -> Activation:
        """Normalized rows, added to `add_to` as in `linear`."""
        ...

    def linear(
        self, x: Activation, weight: QLinear, add_to: Activation | None = None, bias: Tensor | None = None
    ) -> Activation:
        """The product, and `bias`, float32 [outputs]; added to `add_to`, which may be overwritten and must not be used
        again."""
        ...

    def rope_and_store(self, qkv: Activation, batch: Inputs, kv: LayerKV, attention: Attention) -> Activation:
        """Split q, k and v, normalize and turn q and k, write k and v into their slots; the result is for `attend`."""
        ...

    def attend(self, q: Activation, batch: Inputs, kv: LayerKV, attention: Attention) -> Activation:
        """Causal attention of every token over its own request's context -> [tokens, heads * head_dim]."""
        ...

    def gated_mlp(
        self, x: Activation, gate_up: QLinear, down: QLinear, add_to: Activation | None = None, gate: Gate = Gate.SILU
    ) -> Activation:
        """down(gate(x's first half) * its second half), of x times gate_up; added to `add_to` as in `linear`."""
        ...

    def select(self, x: Activation, batch: Inputs) -> Activation:
        """The rows of x whose logits are wanted."""
        ...

    def logits(self, x: Activation, head: QLinear, softcap: float = 0.0) -> Activation:
        """The last operation of every model; `softcap` as that of `Attention`."""
        ...
