"""Operations: what model code is written in, and the seam behind which each kind of device computes.

Coarse enough to fuse, few enough to know by heart. A model file reads the same on every backend: one computes at once,
another records a program that is run for every batch. Values between operations are the backend's own; model code
passes them on and never looks into them.
"""

from typing import Any, Protocol, TypeAlias

from torch import Tensor

from engine.batch import Batch
from engine.kv_cache import LayerKV
from engine.rope import RotaryTable
from quant.linear import LinearBackend, QLinear

Activation: TypeAlias = Any  # rows of float32, one for each token: a tensor, or a place in a recorded program


class Operations(Protocol):
    """One backend. Widths are those of the weights."""

    @property
    def weights(self) -> LinearBackend:
        """Makes the layers that these operations take."""
        ...

    def embed(self, batch: Batch, table: QLinear) -> Activation:
        """The table's row of every token."""
        ...

    def norm(self, x: Activation, weight: Tensor, epsilon: float) -> Activation:
        """Root mean square normalization, times `weight`, float32 [width]."""
        ...

    def linear(self, x: Activation, weight: QLinear, add_to: Activation | None = None) -> Activation:
        """The product; added to `add_to`, which may be overwritten and must not be used again."""
        ...

    def rope_and_store(self, qkv: Activation, batch: Batch, kv: LayerKV, rotary: RotaryTable) -> Activation:
        """Split q, k and v, turn q and k, write k and v into their slots; what it returns is for `attend`."""
        ...

    def attend(self, q: Activation, batch: Batch, kv: LayerKV) -> Activation:
        """Causal attention of every token over its own request's context -> [tokens, heads * head_dim]."""
        ...

    def gated_mlp(self, x: Activation, gate_up: QLinear, down: QLinear, add_to: Activation) -> Activation:
        """down(silu(gate) * up), added to `add_to` as in `linear`."""
        ...

    def select(self, x: Activation, batch: Batch) -> Activation:
        """The rows of x whose logits are wanted."""
        ...

    def logits(self, x: Activation, head: QLinear) -> Activation:
        """The last operation of every model."""
        ...
