"""Operations: the interface in which models are written, and which each kind of device implements.

The operations are few, and coarse enough to be fused. The model code is the same for every backend: one backend
computes immediately, another records a program that runs for every batch. The type of the values between operations is
up to the backend, and model code only passes them on.
"""

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from engine.kv.cache import LayerKV, LayerState
from engine.mixer_config import DeltaConfig
from engine.model_config import Gate, NormKind, Routing
from engine.rope import RotaryTable
from quant.linear import LinearBackend, QLinear

Activation: TypeAlias = Any  # rows of floats, one per token: a tensor, or a buffer in a recorded program
Inputs: TypeAlias = Any  # the `engine.batch.Batch` of a step, or the backend's form of it
Routes: TypeAlias = Any  # the experts of every token and their weights, in the backend's form


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalization of rows: x / sqrt(mean(x**2) + epsilon) * weight + bias, where LAYER first subtracts mean(x)."""

    weight: Tensor  # float32 [width]
    epsilon: float
    kind: NormKind = NormKind.RMS
    bias: Tensor | None = None  # float32 [width]; for LAYER only
    sum_scale: float = 1.0  # factor of the sum, if the result is added to other rows


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Normalization of q and k before they are rotated, and of v, without biases.

    Weights are [head_dim] for separate heads with the same weights, [heads, head_dim] for separate heads with different
    weights, or [heads * head_dim] for all heads of a token together.
    """

    q: Norm
    k: Norm  # unused if rows have only q
    v: Norm | None = None  # None: v is not normalized; otherwise, heads are separate


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention parameters of one layer."""

    scale: float  # scale of scores
    rotary: RotaryTable | None  # table of the rotation angles; None: q and k are not rotated
    norms: HeadNorms | None = None
    softcap: float = 0.0  # soft cap c: scores become c * tanh(score / c); 0: no soft cap
    window: int | None = None  # number of tokens that a query attends to, including its own; None: all
    # float32 [heads]: one more score for the softmax of each head, without a value (arXiv:2309.17453); None: none
    sinks: Tensor | None = None
    shared: bool = False  # whether rows have only q, because keys and values are those of an earlier layer


@dataclass(frozen=True, slots=True)
class ShortConv:
    """The weights of a causal convolution of each channel over the last tokens.

    weight: float32 [taps, width]; the last row is for the token itself.
    """

    weight: Tensor


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The weights of a gated delta rule (arXiv:2412.06464). `config` gives the shape.

    The decay of a head's state is exp(rate * softplus(a + time_bias)).
    """

    config: DeltaConfig
    conv: Tensor  # float32 [taps, conv_width]; see `ShortConv`
    rate: Tensor  # float32 [value_heads], negative
    time_bias: Tensor  # float32 [value_heads]
    norm: Norm  # of each value head's output, without a bias


@dataclass(frozen=True, slots=True)
class Router:
    """The weights that choose a token's experts.

    If the shared MLP has a gate, the last row of `weight` computes it, and the other rows the logits of the experts.
    """

    routing: Routing
    weight: QLinear  # [experts, hidden], or [experts + 1, hidden]
    choice_bias: Tensor | None = None  # float32 [experts], added to scores for the choice, but not for the weights
    bias: Tensor | None = None  # float32 [experts], added to the logits; only without a gate of the shared MLP
    scale: Tensor | None = None  # float32 [experts], factors of the weights

    @property
    def gates_shared(self) -> bool:
        return self.weight.outputs > self.routing.experts


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """The weights of an MLP: down(gate(first half of y) * second half of y), where y = gate_up(x)."""

    gate_up: QLinear  # gate and up as one layer
    down: QLinear


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    """The biases of the products of all experts of a layer."""

    gate_up: Tensor  # float32 [experts, 2 * width]
    down: Tensor  # float32 [experts, hidden]


@dataclass(frozen=True, slots=True)
class ExpertMLP:
    """A mixture of experts: the sum of the outputs of the chosen experts, times their weights, and of a shared MLP."""

    router: Router
    experts: tuple[GatedMLP, ...]
    shared: GatedMLP | None = None
    biases: ExpertBiases | None = None


class Operations(Protocol):
    """The operations of one backend. The weights determine the widths of all results."""

    @property
    def weights(self) -> LinearBackend:
        """The backend that creates the layers which these operations take."""
        ...

    def embed(self, batch: Inputs, table: QLinear, scale: float = 1.0) -> Activation:
        """Return the table row of every token, times `scale`."""
        ...

    def norm(self, x: Activation, norm: Norm, add_to: Activation | None = None) -> Activation:
        """Return the normalized rows of x. With `add_to`, add them to it as `linear` does.

        With `add_to`, x may be wider than the norm: then each part of a row is normalized separately.
        """
        ...

    def linear(
        self,
        x: Activation,
        weight: QLinear,
        add_to: Activation | None = None,
        bias: Tensor | None = None,
        *,
        in_float32: bool = False,
    ) -> Activation:
        """Return the product plus `bias`, float32 [outputs]. With `add_to`, return the sum of both.

        `add_to` may be overwritten, so the caller must not use it again. With `in_float32`, no backend rounds the
        result to a shorter type.
        """
        ...

    def rope_and_store(self, qkv: Activation, batch: Inputs, kv: LayerKV, attention: Attention) -> Activation:
        """Split q, k, and v; normalize them; rotate q and k; write k and v into their slots. Returns q for `attend`."""
        ...

    def attend(self, q: Activation, batch: Inputs, kv: LayerKV, attention: Attention) -> Activation:
        """Compute causal attention of every token over its own request's context. Returns [tokens, heads *
        head_dim].
        """
        ...

    def convolve(self, x: Activation, batch: Inputs, state: LayerState, conv: ShortConv) -> Activation:
        """Return c * convolution(b * x) of every token, where b, c, and x are the thirds of its row.

        The state holds the last inputs of the convolution, [taps - 1, width], oldest first. It is read before the
        request's first token, and written after its last one.
        """
        ...

    def delta_rule(self, x: Activation, batch: Inputs, state: LayerState, delta: DeltaRule) -> Activation:
        """Return the outputs of all value heads, normalized and gated, and update the states.

        A row of x has the queries, keys, and values of all heads before the convolution, then the gate of each output,
        then, for each value head, the logit of its step size, then that of its decay.
        """
        ...

    def scale(self, x: Activation, gate: Activation) -> Activation:
        """Return x * sigmoid(gate)."""
        ...

    def gate_part(self, x: Activation, values: Activation, part: int, gate: Gate) -> Activation:
        """Return gate(x) * part number `part` of the rows of `values`, whose parts are as wide as x."""
        ...

    def gated_mlp(
        self, x: Activation, mlp: GatedMLP, add_to: Activation | None = None, gate: Gate = Gate.SILU
    ) -> Activation:
        """Return the output of an MLP. `add_to` is as in `linear`."""
        ...

    def route(self, x: Activation, router: Router) -> Routes:
        """Choose the experts of every row of x, and their weights, for `experts`."""
        ...

    def experts(
        self, x: Activation, routes: Routes, mlp: ExpertMLP, add_to: Activation | None = None, gate: Gate = Gate.SILU
    ) -> Activation:
        """Return the weighted sum of the outputs of each row's experts. `add_to` is as in `linear`.

        The outputs are added in ascending order of the experts, then the output of the shared MLP, and then `add_to`.
        So the bits of a row do not depend on the other rows.
        """
        ...

    def select(self, x: Activation, batch: Inputs) -> Activation:
        """Return the rows of x whose logits are needed."""
        ...

    def selected(self, batch: Inputs) -> Inputs:
        """Return the inputs of layers that read only the rows of `select`, and write no keys, values, or states."""
        ...

    def logits(self, x: Activation, head: QLinear, softcap: float = 0.0) -> Activation:
        """Return the logits, as the last operation of every model. `softcap` is as in `Attention`."""
        ...
