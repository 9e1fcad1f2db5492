"""Operations: what model code is written in, and the seam behind which each kind of device computes.

Coarse enough to fuse, few enough to know by heart. A model file reads the same on every backend: the reference computes
at once, another may record. Values between operations are tensors that model code passes on and never looks into.
"""

from typing import Protocol

import torch
from torch import Tensor

from engine.batch import Batch
from engine.kernels import reference
from engine.kv_cache import LayerKV
from engine.rope import RotaryTable
from quant.linear import LinearBackend, QLinear, ReferenceBackend


class Operations(Protocol):
    """One backend. T tokens of a batch; activations are float32 [T, width]."""

    weights: LinearBackend

    def embed(self, token_ids: Tensor, table: QLinear) -> Tensor: ...

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor: ...

    def linear(self, x: Tensor, weight: QLinear) -> Tensor: ...

    def rope_and_store(self, qkv: Tensor, batch: Batch, kv: LayerKV, rotary: RotaryTable) -> Tensor:
        """Split q, k and v, turn q and k, write k and v into their slots; returns q, ready for `attend`."""
        ...

    def attend(self, q: Tensor, batch: Batch, kv: LayerKV) -> Tensor:
        """Causal attention of every token over its own request's context -> [T, heads * head_dim]."""
        ...

    def gated_mlp(self, x: Tensor, gate_up: QLinear, down: QLinear) -> Tensor: ...

    def add(self, x: Tensor, y: Tensor) -> Tensor: ...

    def select(self, x: Tensor, rows: Tensor) -> Tensor:
        """The rows of x whose logits are wanted."""
        ...


class ReferenceOperations:
    """Plain torch on the CPU, one operation at a time."""

    def __init__(self, *, keep_dequantized: bool) -> None:
        self.weights: LinearBackend = ReferenceBackend(keep_dequantized=keep_dequantized)

    def embed(self, token_ids: Tensor, table: QLinear) -> Tensor:
        return table.rows(token_ids)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return reference.rms_norm(x, weight, epsilon)

    def linear(self, x: Tensor, weight: QLinear) -> Tensor:
        return weight.forward(x)

    def rope_and_store(self, qkv: Tensor, batch: Batch, kv: LayerKV, rotary: RotaryTable) -> Tensor:
        kv_heads, head_dim = kv.pool.shape[2], kv.pool.shape[4]
        heads = qkv.view(len(qkv), -1, head_dim)
        q, k, v = heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]
        cos, sin = rotary.cos[batch.positions], rotary.sin[batch.positions]
        turned = reference.rope(k, cos, sin, interleaved=rotary.interleaved)
        reference.store_kv(kv.pool, batch.slot_mappings[kv.group], turned, v)
        return reference.rope(q, cos, sin, interleaved=rotary.interleaved)

    def attend(self, q: Tensor, batch: Batch, kv: LayerKV) -> Tensor:
        starts = batch.query_starts
        attended = [
            reference.paged_attention(
                q[start:stop], batch.positions[start:stop], kv.pool, table, context, q.shape[-1] ** -0.5
            )
            for start, stop, table, context in zip(
                starts, starts[1:], batch.block_tables[kv.group], batch.context_lengths, strict=False
            )
        ]
        return torch.cat(attended).flatten(1)

    def gated_mlp(self, x: Tensor, gate_up: QLinear, down: QLinear) -> Tensor:
        return down.forward(reference.silu_gate(gate_up.forward(x)))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def select(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[rows]
