"""Operations on a GPU. Each launches kernels on tensors, and returns without waiting for them.

Between layers, activations are float32 [tokens, hidden], and products are added to them in place. The results of norms,
attention, gates, and the q, k, v projection are bfloat16. In a step of one token, an operation may be launched by the
next one (`single_row`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.cuda.batch_tensors import BatchTensors, selected_tensors
from engine.backends.cuda.single_row import ProductRow, Rows, StreamRow, input_of, is_row, rows_of
from engine.kernels import reference, rotated_product
from engine.kernels.activations import gated
from engine.kernels.delta_rule import gated_delta_rule
from engine.kernels.expert_sum import expert_sum
from engine.kernels.norms import normalize, normalize_add
from engine.kernels.paged_attention import arrival_counts, paged_attention
from engine.kernels.rope_store import rope_and_store
from engine.kernels.routing import route
from engine.kernels.short_convolution import short_convolution
from engine.kv.cache import LayerKV, LayerState
from engine.model_config import Gate
from engine.operations import Attention, DeltaRule, ExpertMLP, GatedMLP, Norm, Router, ShortConv
from quant.cuda.backend import CudaBackend
from quant.cuda.experts import CudaExpert, ExpertStack, tiles_of_experts
from quant.cuda.linear import CudaLinear
from quant.kernels.card import Card
from quant.kernels.integer_rows import IntegerRows, integer_gated
from quant.linear import QLinear


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of every token. See `engine.kernels.routing.route`."""

    ids: Tensor  # int32 [tokens, active], ascending
    weights: Tensor  # float32 [tokens, active]
    shared: Tensor | None  # weight of the shared MLP, float32 [tokens]; None: 1


class CudaOperations:
    """See `engine.operations.Operations`."""

    def __init__(self, weights: CudaBackend, card: Card, *, deterministic: bool) -> None:
        self.weights = weights
        self._card = card
        self._deterministic = deterministic
        self._arrivals = arrival_counts(card, weights.device)

    def embed(self, batch: BatchTensors, table: QLinear, scale: float = 1.0) -> Tensor:
        rows = table.rows(batch.token_ids)
        return rows if scale == 1.0 else rows.mul_(scale)

    def norm(self, x: Rows, norm: Norm, add_to: Rows | None = None) -> Rows:
        if add_to is not None:
            return normalize_add(rows_of(x), norm, rows_of(add_to))
        return x.normalized(norm) if isinstance(x, StreamRow) else normalize(rows_of(x), norm)

    def linear(
        self,
        x: Rows,
        weight: QLinear,
        add_to: Rows | None = None,
        bias: Tensor | None = None,
        *,
        in_float32: bool = False,
    ) -> Rows:
        if add_to is not None:
            return _added(x, _cuda_layer(weight), rows_of(add_to), bias)
        layer, dtype = _cuda_layer(weight), torch.float32 if in_float32 else torch.bfloat16
        given = input_of(x)
        if is_row(given) and layer.takes_rows:
            return ProductRow(layer, given, bias, dtype)
        return layer.multiply(rows_of(x), bias=bias, out_dtype=dtype)

    def rope_and_store(self, qkv: Rows, batch: BatchTensors, kv: LayerKV, attention: Attention) -> Tensor:
        slots = batch.positions if attention.shared else batch.slots[kv.group]
        if isinstance(qkv, ProductRow) and rotated_product.is_supported(qkv.layer, kv.head_dim, attention):
            return rotated_product.rotated_product(
                qkv.layer, qkv.x, qkv.bias, batch.positions, slots, kv.pool,
                heads=kv.query_heads(qkv.layer.outputs, queries_only=attention.shared), kv_heads=kv.kv_heads,
                head_dim=kv.head_dim, attention=attention,
            )  # fmt: skip
        rows = rows_of(qkv)
        return rope_and_store(
            rows, batch.positions, slots, kv.pool,
            heads=kv.query_heads(rows.shape[1], queries_only=attention.shared), kv_heads=kv.kv_heads,
            head_dim=kv.head_dim, attention=attention, early=self._card.starts_early,
        )  # fmt: skip

    def attend(self, q: Tensor, batch: BatchTensors, kv: LayerKV, attention: Attention) -> Tensor:
        rule = reference.ScoreRule(attention.scale, attention.softcap, attention.window)
        return paged_attention(
            q, kv.pool, batch.tables[kv.group], batch.query_starts, batch.context_lengths, batch.tiles, rule,
            sinks=attention.sinks, arrivals=self._arrivals, card=self._card, deterministic=self._deterministic,
        )  # fmt: skip

    def convolve(self, x: Rows, batch: BatchTensors, state: LayerState, conv: ShortConv) -> Tensor:
        return short_convolution(
            rows_of(x), state.pool, batch.tables[state.group], batch.query_starts, batch.context_lengths, conv.weight
        )

    def delta_rule(self, x: Rows, batch: BatchTensors, state: LayerState, delta: DeltaRule) -> Tensor:
        return gated_delta_rule(
            rows_of(x), state.pool, batch.tables[state.group], batch.query_starts, batch.context_lengths, delta,
            chunked=not self._deterministic,
        )  # fmt: skip

    def scale(self, x: Tensor, gate: Rows) -> Tensor:
        return (x * torch.sigmoid(rows_of(gate).float())).to(x.dtype)

    def gate_part(self, x: Rows, values: Tensor, part: int, gate: Gate) -> Tensor:
        x = rows_of(x)
        own = values[:, part * x.shape[1] : (part + 1) * x.shape[1]]
        return gated(torch.cat([x, own.to(x.dtype)], dim=1), gate)

    def gated_mlp(self, x: Rows, mlp: GatedMLP, add_to: Rows | None = None, gate: Gate = Gate.SILU) -> Rows:
        down = _cuda_layer(mlp.down)
        inner = _gated_product(x, _cuda_layer(mlp.gate_up), gate, down)
        if add_to is None or isinstance(inner, IntegerRows):
            return down.multiply(inner, add_to=None if add_to is None else rows_of(add_to))
        return _added(inner, down, rows_of(add_to))

    def route(self, x: Rows, router: Router) -> Routes:
        logits = _cuda_layer(router.weight).multiply(rows_of(x), bias=router.bias, out_dtype=torch.float32)
        return Routes(*route(logits, router.routing, router.choice_bias, router.scale))

    def experts(
        self, x: Rows, routes: Routes, mlp: ExpertMLP, add_to: Rows | None = None, gate: Gate = Gate.SILU
    ) -> Tensor:
        x = rows_of(x)
        gate_up, down = _stack(mlp.experts[0].gate_up), _stack(mlp.experts[0].down)
        tiles = tiles_of_experts(routes.ids, (gate_up, down))
        gate_bias, down_bias = (mlp.biases.gate_up, mlp.biases.down) if mlp.biases else (None, None)
        inner: Tensor | IntegerRows | None = None if mlp.biases else gate_up.multiply_gated(x, tiles, gate.value)
        if inner is None:
            product = gate_up.multiply(x, tiles)
            fused = gate_bias is None and down.takes_integers(tiles)
            ids = routes.ids.flatten()
            inner = integer_gated(product, gate.value) if fused else gated(product, gate, gate_bias, ids)
        outputs = down.multiply(inner, tiles, torch.float32)
        shared = None
        if mlp.shared:
            shared_down = _cuda_layer(mlp.shared.down)
            both = _gated_product(x, _cuda_layer(mlp.shared.gate_up), gate, shared_down)
            shared = shared_down.multiply(both, out_dtype=torch.float32)
        stream = None if add_to is None else rows_of(add_to)
        return expert_sum(outputs, routes.weights, shared, routes.shared, stream, down_bias, routes.ids)

    def select(self, x: Rows, batch: BatchTensors) -> Rows:
        return x if batch.logit_rows is None else rows_of(x).index_select(0, batch.logit_rows)

    def selected(self, batch: BatchTensors) -> BatchTensors:
        return batch if batch.logit_rows is None else selected_tensors(batch, batch.logit_rows)

    def logits(self, x: Rows, head: QLinear, softcap: float = 0.0) -> Tensor:
        return reference.soft_cap(rows_of(self.linear(x, head, in_float32=True)), softcap)


def _added(x: Rows, layer: CudaLinear, stream: Tensor, bias: Tensor | None = None) -> Rows:
    """Add a product to the residual stream. For one token, the launch waits for what reads the sum."""
    rows = rows_of(x)
    if is_row(rows) and layer.adds_rows:
        return StreamRow(stream, layer, rows, bias)
    return layer.multiply(rows, bias=bias, add_to=stream)


def _gated_product(x: Rows, gate_up: CudaLinear, gate: Gate, down: CudaLinear) -> Tensor | IntegerRows:
    """Return the inner activations of an MLP, as the product after them takes them."""
    given = input_of(x)
    if is_row(given) and gate_up.gates_rows:
        return gate_up.gate_row(given, gate.value)
    product = gate_up.multiply(rows_of(x))
    return integer_gated(product, gate.value) if down.takes_integers(len(product)) else gated(product, gate)


def _stack(layer: QLinear) -> ExpertStack:
    if not isinstance(layer, CudaExpert):
        raise TypeError(f"{type(layer).__name__} is not the layer of an expert of the CUDA backend")
    return layer.stack


def _cuda_layer(layer: QLinear) -> CudaLinear:
    if not isinstance(layer, CudaLinear):
        raise TypeError(f"{type(layer).__name__} is not a layer of the CUDA backend")
    return layer
