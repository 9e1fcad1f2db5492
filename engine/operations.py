"""Operations: the interface in which models are written, and which each kind of device implements.

The operations are few, and coarse enough to be fused. A model file is the same for every backend: one computes at once,
another records a program that runs for every batch. Values between operations belong to the backend, and model code
only passes them on.
"""

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from engine.config import Gate, NormKind
from engine.kv.cache import LayerKV
from engine.rope import RotaryTable
from quant.linear import LinearBackend, QLinear

Activation: TypeAlias = Any  # rows of floats, one per token: a tensor, or a location in a recorded program
Inputs: TypeAlias = Any  # a step's `engine.batch.Batch`, or the backend's form of it


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalization of rows: x / sqrt(mean(x**2) + epsilon) * weight + bias, where LAYER first subtracts mean(x)."""

    weight: Tensor  # float32 [width]
    epsilon: float
    kind: NormKind = NormKind.RMS
    bias: Tensor | None = None  # float32 [width]; for LAYER only


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Normalization of q and k before they are rotated, without biases.

    Weights are [head_dim] for separate heads with the same weights, [heads, head_dim] for separate heads with different
    weights, or [heads * head_dim] for all heads of a token together.
    """

    q: Norm
    k: Norm


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention parameters of one layer."""

    scale: float  # scale of scores
    rotary: RotaryTable | None  # None: heads are not rotated
    norms: HeadNorms | None = None
    softcap: float = 0.0  # c: scores become c * tanh(score / c); 0: no soft cap
    window: int | None = None  # tokens to attend to, including the own one; None: all


class Operations(Protocol):
    """One backend's operations. Widths are those of the weights."""

    @property
    def weights(self) -> LinearBackend:
        """Creates the layers that these operations take."""
        ...

    def embed(self, batch: Inputs, table: QLinear, scale: float = 1.0) -> Activation:
        """Return the table's row of every token, times `scale`."""
        ...

    def norm(self, x: Activation, norm: Norm, add_to: Activation | None = None) -> Activation:
        """Return normalized rows, added to `add_to` as in `linear`."""
        ...

    def linear(
        self, x: Activation, weight: QLinear, add_to: Activation | None = None, bias: Tensor | None = None
    ) -> Activation:
        """Return the product plus `bias`, float32 [outputs], added to `add_to`.

        `add_to` may be overwritten and must not be used again.
        """
        ...

    def rope_and_store(self, qkv: Activation, batch: Inputs, kv: LayerKV, attention: Attention) -> Activation:
        """Split q, k, and v; normalize and rotate q and k; write k and v into their slots. Returns q for `attend`."""
        ...

    def attend(self, q: Activation, batch: Inputs, kv: LayerKV, attention: Attention) -> Activation:
        """Causal attention of every token over its own request's context -> [tokens, heads * head_dim]."""
        ...

    def gated_mlp(
        self, x: Activation, gate_up: QLinear, down: QLinear, add_to: Activation | None = None, gate: Gate = Gate.SILU
    ) -> Activation:
        """Return down(gate(first half of y) * second half) for y = gate_up(x), added to `add_to` as in `linear`."""
        ...

    def select(self, x: Activation, batch: Inputs) -> Activation:
        """Return the rows of x whose logits are wanted."""
        ...

    def logits(self, x: Activation, head: QLinear, softcap: float = 0.0) -> Activation:
        """Return logits, as the last operation of every model. `softcap` is as in `Attention`."""
        ...
