"""The decoder of all families: layers of a mixer and a gated MLP around a residual stream.

A ModelConfig and `Names` describe how each family differs from the others.
"""

from dataclasses import dataclass

from torch import Tensor

from engine.kv.cache import KVCache
from engine.model_config import Block, ModelConfig
from engine.operations import (
    Activation,
    Attention,
    DeltaRule,
    ExpertMLP,
    GatedMLP,
    Inputs,
    Norm,
    Operations,
    ShortConv,
)
from quant.linear import QLinear


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer and its bias, float32 [outputs]."""

    weight: QLinear
    bias: Tensor | None


Mixer = Attention | ShortConv | DeltaRule


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """A mixture of experts beside the MLP of a layer. Both have norms before and after them."""

    router_norm: Norm
    norm: Norm
    mlp: ExpertMLP
    post_norm: Norm
    mlp_post_norm: Norm  # of the MLP, before both are added


@dataclass(frozen=True, slots=True)
class LayerInput:
    """The weights that add a layer's own embedding of each token to the residual stream, after the MLP."""

    gate: QLinear  # the gated activation of its output and of the embedding is the input of `out`
    out: QLinear
    post_norm: Norm


@dataclass(frozen=True, slots=True)
class LayerEmbeddings:
    """The embeddings that each layer has for every token: rows of a table plus a projection of the token's embedding.

    A row has the embeddings of all layers, in order.
    """

    table: QLinear  # in the memory of the host
    projection: QLinear
    norm: Norm  # of the projection, for each layer separately
    scale: float  # of the rows of the table


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer. The norm placement determines which norms exist."""

    mixer: Mixer
    mixer_norm: Norm | None
    mixer_in: Projection  # for attention: q, k, and v as one layer
    mixer_gate: QLinear | None  # its sigmoid scales the output of attention
    mixer_out: Projection
    mixer_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp: GatedMLP | ExpertMLP
    mlp_post_norm: Norm | None
    experts: SeparateExperts | None = None
    own_input: LayerInput | None = None


class Decoder:
    """A loaded decoder. Implements `engine.models.Model`."""

    def __init__(
        self,
        config: ModelConfig,
        operations: Operations,
        embedding: QLinear,
        layers: tuple[Layer, ...],
        output_norm: Norm,
        head: QLinear,
        layer_embeddings: LayerEmbeddings | None = None,
    ) -> None:
        self.config = config
        self._ops = operations
        self._embedding = embedding
        self._layers = layers
        self._output_norm = output_norm
        self._head = head
        self._layer_embeddings = layer_embeddings
        self._first_reading = config.first_reading_layer

    def forward(self, batch: Inputs, kv: KVCache) -> Activation:
        ops, config = self._ops, self.config
        x = ops.embed(batch, self._embedding, config.embedding_scale)
        own = self._embed_layers(x, batch)
        for number, layer in enumerate(self._layers):
            # When the keys and values of all tokens are stored, only tokens whose logits are needed are computed: after
            # the last layer's mixer, or before the first of the layers that read the caches of earlier ones.
            if number == self._first_reading:
                x, own, batch = ops.select(x, batch), self._select_own(own, batch), ops.selected(batch)
            mixed = self._mix(self._before(x, layer.mixer_norm), batch, kv, number)
            if layer is self._layers[-1] and self._first_reading is None:
                mixed, x, own = ops.select(mixed, batch), ops.select(x, batch), self._select_own(own, batch)
            if config.block is Block.SEQUENTIAL:
                x = self._add_mlp(self._add_mixed(x, mixed, layer), layer)
            else:  # Both read x. The mixer has already read it, and the MLP reads it before the addition overwrites it.
                x = self._add_mixed(self._add_mlp(x, layer), mixed, layer)
            if own is not None and layer.own_input:
                x = self._add_own(x, own, layer.own_input, number)
        return ops.logits(self._before(x, self._output_norm), self._head, config.logit_softcap)

    def _mix(self, x: Activation, batch: Inputs, kv: KVCache, number: int) -> Activation:
        """Return the output of a layer's mixer, before its last product."""
        ops, layer = self._ops, self._layers[number]
        exact = isinstance(layer.mixer, DeltaRule)  # the decays of its states are sensitive to rounding
        rows = ops.linear(x, layer.mixer_in.weight, bias=layer.mixer_in.bias, in_float32=exact)
        match layer.mixer:
            case ShortConv() as conv:
                return ops.convolve(rows, batch, kv.state(number), conv)
            case DeltaRule() as delta:
                return ops.delta_rule(rows, batch, kv.state(number), delta)
            case attention:
                cache = kv.layer(self.config.cache_layer(number))
                attended = ops.attend(ops.rope_and_store(rows, batch, cache, attention), batch, cache, attention)
                return attended if layer.mixer_gate is None else ops.scale(attended, ops.linear(x, layer.mixer_gate))

    def _before(self, x: Activation, norm: Norm | None) -> Activation:
        return x if norm is None else self._ops.norm(x, norm)

    def _add_mixed(self, x: Activation, mixed: Activation, layer: Layer) -> Activation:
        out, norm = layer.mixer_out, layer.mixer_post_norm
        if norm is None:
            return self._ops.linear(mixed, out.weight, add_to=x, bias=out.bias)
        output = self._ops.linear(mixed, out.weight, bias=out.bias)
        return self._ops.norm(output, norm, add_to=x)

    def _add_mlp(self, x: Activation, layer: Layer) -> Activation:
        read, norm = self._before(x, layer.mlp_norm), layer.mlp_post_norm
        if norm is None:
            return self._mlp(read, layer.mlp, add_to=x)
        output = self._mlp(read, layer.mlp)
        if layer.experts:
            output = self._add_experts(self._ops.norm(output, layer.experts.mlp_post_norm), x, layer.experts)
        return self._ops.norm(output, norm, add_to=x)

    def _add_experts(self, output: Activation, x: Activation, experts: SeparateExperts) -> Activation:
        ops, mlp = self._ops, experts.mlp
        routes = ops.route(ops.norm(x, experts.router_norm), mlp.router)
        chosen = ops.experts(ops.norm(x, experts.norm), routes, mlp, gate=self.config.gate)
        return ops.norm(chosen, experts.post_norm, add_to=output)

    def _embed_layers(self, x: Activation, batch: Inputs) -> Activation | None:
        """Return the embeddings that each layer has for every token, or None if the model has none."""
        if not (own := self._layer_embeddings):
            return None
        projected = self._ops.linear(x, own.projection, in_float32=True)
        return self._ops.norm(projected, own.norm, add_to=self._ops.embed(batch, own.table, own.scale))

    def _select_own(self, own: Activation | None, batch: Inputs) -> Activation | None:
        return None if own is None else self._ops.select(own, batch)

    def _add_own(self, x: Activation, own: Activation, weights: LayerInput, number: int) -> Activation:
        ops = self._ops
        gated = ops.gate_part(ops.linear(x, weights.gate), own, number, self.config.gate)
        return ops.norm(ops.linear(gated, weights.out), weights.post_norm, add_to=x)

    def _mlp(self, x: Activation, mlp: GatedMLP | ExpertMLP, add_to: Activation | None = None) -> Activation:
        gate = self.config.gate
        if isinstance(mlp, GatedMLP):
            return self._ops.gated_mlp(x, mlp, add_to, gate)
        return self._ops.experts(x, self._ops.route(x, mlp.router), mlp, add_to, gate)
