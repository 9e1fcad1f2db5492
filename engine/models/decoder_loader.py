"""Loads the decoder of all families: takes weights by name and shape, and joins those that one product computes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.checkpoints.checkpoint import LAYER_EMBEDDINGS
from engine.checkpoints.weights import Weights
from engine.errors import UnsupportedModel
from engine.model_config import (
    AttentionConfig,
    Block,
    ConvConfig,
    DeltaConfig,
    ExpertConfig,
    HeadNorm,
    LongRopeScaling,
    MixerConfig,
    MLPConfig,
    ModelConfig,
    NormPlacement,
)
from engine.models.decoder import (
    Decoder,
    Layer,
    LayerEmbeddings,
    LayerInput,
    Mixer,
    Projection,
    SeparateExperts,
)
from engine.operations import (
    Attention,
    DeltaRule,
    ExpertBiases,
    ExpertMLP,
    GatedMLP,
    HeadNorms,
    Norm,
    Operations,
    Router,
    ShortConv,
)
from engine.rope import RotaryTable, rotary_table
from quant.kernels.reference import dequantize
from quant.linear import QLinear, Use
from quant.tensor import QTensor


def load_decoder(config: ModelConfig, weights: Weights, operations: Operations, context_length: int) -> Decoder:
    """Load a decoder for positions below `context_length`. See `engine.models.load`."""
    config = _resolve_optional_parts(config, weights)
    loader = _Loader(config, weights, operations, _rotary_tables(config, weights, operations, context_length))
    tables = weights.load_parallel(loader.table, loader.tables_to_load())
    layers = weights.load_parallel(loader.layer, range(len(config.layers)))
    norm, own = loader.output_norm(), loader.layer_embeddings()
    return Decoder(config, operations, tables[0], tuple(layers), norm, tables[-1], own)


def _resolve_optional_parts(config: ModelConfig, weights: Weights) -> ModelConfig:
    """Set the options of the configuration that depend on which weights the checkpoint has."""
    if config.block is None:
        mlp_norm = "blk.0.ffn_norm.weight" in weights
        config = replace(config, block=Block.SEQUENTIAL if mlp_norm else Block.PARALLEL_ONE_NORM)
    if config.optional_head_norm and "blk.0.attn_q_norm.weight" not in weights:
        config = replace(config, head_norm=None)
    return config


def _rotary_tables(
    config: ModelConfig, weights: Weights, operations: Operations, context_length: int
) -> tuple[RotaryTable, ...]:
    """Return one rotary table per rope of the model."""
    factors, to_device = _stored_factors(config, weights, context_length), operations.weights.to_device
    # the factors are of the first rope, that of layers without a window
    tables = (
        rotary_table(rope, None if number else factors, context_length) for number, rope in enumerate(config.ropes)
    )
    return tuple(replace(table, cos=to_device(table.cos), sin=to_device(table.sin)) for table in tables)


def _stored_factors(config: ModelConfig, weights: Weights, context_length: int) -> Tensor | None:
    """Return the rope factors that GGUF stores as tensors: those of LongRoPE, or the scaling of Llama 3.1."""
    rope = config.ropes[0]
    half = (rope.span or rope.dimensions) // 2
    match rope.scaling:
        case LongRopeScaling(short=()) as scaling:
            short, long = (weights.take_vector(f"rope_factors_{kind}.weight", half) for kind in ("short", "long"))
            return long if scaling.is_long(context_length) else short
        case _ if "rope_freqs.weight" in weights:
            factors = weights.take_vector("rope_freqs.weight", half)
            if rope.span and not torch.equal(factors >= NO_TURN, torch.arange(half) >= rope.dimensions // 2):
                raise UnsupportedModel(f"rope_freqs.weight does not rotate the first {rope.dimensions // 2} pairs")
            return factors[: rope.dimensions // 2]
    return None


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loads the parts of a decoder, taking weights by name."""

    config: ModelConfig
    weights: Weights
    operations: Operations
    tables: tuple[RotaryTable, ...]

    def tables_to_load(self) -> list[tuple[str, Use]]:
        """Return the name and use of the embedding, and those of the head unless the two are tied."""
        tied, output = self.config.tied_head, "output.weight"
        if tied:  # some checkpoints contain the tied head as well
            self.weights.drop(output)
        separate = not tied and (tied is False or output in self.weights)
        embedding = "token_embd.weight"
        return [(embedding, Use.ROWS), (output, Use.PRODUCTS)] if separate else [(embedding, Use.ROWS | Use.PRODUCTS)]

    def table(self, named: tuple[str, Use]) -> QLinear:
        name, use = named
        weight = self.weights.take(name, self.config.vocab_size, self.config.hidden)
        return self.operations.weights.linear([weight], use)

    def layer(self, number: int) -> Layer:
        config, mixer, prefix = self.config, self.config.layers[number].mixer, f"blk.{number}."
        before, after = (config.norm_placement in (it, NormPlacement.BOTH) for it in _PLACEMENTS)
        mixer_norm = self.norm(f"{prefix}attn_norm") if before else None
        one_norm = config.block is Block.PARALLEL_ONE_NORM
        loaded, mixer_in, mixer_gate, mixer_out = self._mixer(prefix, mixer)
        own_input, sum_scale = self._own_input(prefix), self._layer_scale(prefix)
        mlp_post_norm = self.norm(f"{prefix}post_ffw_norm") if after else None
        if own_input:  # the last addition of a layer scales the sum
            own_input = replace(own_input, post_norm=replace(own_input.post_norm, sum_scale=sum_scale))
        elif mlp_post_norm:
            mlp_post_norm = replace(mlp_post_norm, sum_scale=sum_scale)
        return Layer(
            mixer=loaded,
            mixer_norm=mixer_norm,
            mixer_in=mixer_in,
            mixer_gate=mixer_gate,
            mixer_out=mixer_out,
            mixer_post_norm=self.norm(f"{prefix}post_attention_norm") if after else None,
            mlp_norm=self._mlp_norm(prefix) if before and not one_norm else mixer_norm,
            mlp=self._mlp(f"{prefix}ffn_", config.layers[number].mlp),
            mlp_post_norm=mlp_post_norm,
            experts=self._separate_experts(prefix, config.layers[number].mlp),
            own_input=own_input,
        )

    def layer_embeddings(self) -> LayerEmbeddings | None:
        width, hidden, linear = self.config.per_layer, self.config.hidden, self.operations.weights.linear
        if not width:
            return None
        columns = width * len(self.config.layers)
        table = self.weights.take(LAYER_EMBEDDINGS, self.config.vocab_size, columns)
        projection = self.weights.take("per_layer_model_proj.weight", columns, hidden)
        # The projection is divided by sqrt(hidden) before its norm, and the sum with the table by sqrt(2).
        norm = self._unbiased_norm("per_layer_proj_norm", width, scale=2**-0.5)
        norm = replace(norm, epsilon=norm.epsilon * hidden)
        return LayerEmbeddings(linear([table], Use.ROWS | Use.HOST), linear([projection]), norm, (width / 2) ** 0.5)

    def _own_input(self, prefix: str) -> LayerInput | None:
        width, hidden = self.config.per_layer, self.config.hidden
        if not width:
            return None
        gate, out = self._linear(prefix, hidden, {"inp_gate": width}), self._linear(prefix, width, {"proj": hidden})
        return LayerInput(gate, out, self.norm(f"{prefix}post_norm"))

    def _layer_scale(self, prefix: str) -> float:
        name = f"{prefix}layer_output_scale.weight"
        if not self.config.scaled_layers or name not in self.weights:
            return 1.0
        return float(self.weights.take_vector(name, 1))

    def _separate_experts(self, prefix: str, mlp: MLPConfig | ExpertConfig) -> SeparateExperts | None:
        if isinstance(mlp, MLPConfig) or not mlp.separate:
            return None
        rule, hidden, count = self.config.norm, self.config.hidden, mlp.routing.experts
        scale = self.weights.take_vector(f"{prefix}ffn_gate_inp.scale", hidden) * hidden**-0.5
        router = replace(self._router(f"{prefix}ffn_", mlp), scale=self._vector(f"{prefix}ffn_down_exps.scale", count))
        return SeparateExperts(
            router_norm=Norm(self.operations.weights.to_device(scale), rule.epsilon),
            norm=self.norm(f"{prefix}pre_ffw_norm_2"),
            mlp=ExpertMLP(router, self._experts(f"{prefix}ffn_", mlp)),
            post_norm=self.norm(f"{prefix}post_ffw_norm_2"),
            mlp_post_norm=self.norm(f"{prefix}post_ffw_norm_1"),
        )

    def _mixer(self, prefix: str, mixer: MixerConfig) -> tuple[Mixer, Projection, QLinear | None, Projection]:
        """Load a mixer, the products before it, and the one after it."""
        hidden = self.config.hidden
        match mixer:
            case AttentionConfig():
                out = self._projection(prefix, mixer.width, {"attn_output": hidden}, self.config.out_bias)
                if not mixer.gated:
                    return self._attention(prefix, mixer), self._qkv(prefix, mixer), None, out
                return self._attention(prefix, mixer), *self._gated_qkv(prefix, mixer), out
            case ConvConfig():
                conv = ShortConv(self._convolution(f"{prefix}shortconv.conv.weight", mixer.width, mixer.taps))
                inputs = self._linear(f"{prefix}shortconv.", hidden, {"in_proj": mixer.in_width})
                out_weight = self._linear(f"{prefix}shortconv.", mixer.width, {"out_proj": hidden})
                return conv, Projection(inputs, None), None, Projection(out_weight, None)
            case DeltaConfig():
                inputs = self.operations.weights.linear(self._delta_inputs(prefix, mixer))
                out_weight = self._linear(prefix, mixer.width, {"ssm_out": hidden})
                return self._delta_rule(prefix, mixer), Projection(inputs, None), None, Projection(out_weight, None)

    def _gated_qkv(self, prefix: str, mixer: AttentionConfig) -> tuple[Projection, QLinear]:
        """Load q, k, and v as one layer, and the gate, whose rows are between those of the heads of q."""
        hidden, linear = self.config.hidden, self.operations.weights.linear
        both = self.weights.take(f"{prefix}attn_q.weight", 2 * mixer.width, hidden)
        rows = torch.arange(2 * mixer.width).view(mixer.heads, 2, mixer.head_dim)
        q, gate = (self.weights.rows(both, rows[:, half].flatten()) for half in (0, 1))
        kv = self._segments(prefix, hidden, {"attn_k": mixer.kv_width, "attn_v": mixer.kv_width})
        return Projection(linear([q, *kv]), None), linear([gate])

    def _convolution(self, name: str, channels: int, taps: int) -> Tensor:
        """Load the weights of a convolution, float32 [taps, channels]."""
        return self.operations.weights.to_device(self.weights.take_convolution(name, channels, taps).T.contiguous())

    def _delta_inputs(self, prefix: str, mixer: DeltaConfig) -> list[QTensor]:
        """Load the weights of q, k, and v, of the gate, of the step sizes, and of the decays, in this order."""
        hidden, each = self.config.hidden, mixer.value_heads // mixer.key_heads
        values = each * mixer.value_dim
        if f"{prefix}ssm_in.weight" in self.weights:
            rows = [self._ungrouped(f"{prefix}ssm_in", mixer.key_heads, [mixer.key_dim, mixer.key_dim, values, values])]
        else:
            rows = self._segments(prefix, hidden, {"attn_qkv": mixer.conv_width, "attn_gate": mixer.width})
        if f"{prefix}ssm_ba.weight" in self.weights:
            return [*rows, self._ungrouped(f"{prefix}ssm_ba", mixer.key_heads, [each, each])]
        return rows + self._segments(prefix, hidden, dict.fromkeys(DELTA_LOGITS, mixer.value_heads))

    def _ungrouped(self, name: str, heads: int, parts: list[int]) -> QTensor:
        """Load a matrix whose rows are grouped by head, and return the first part of all heads, then the second.

        `parts`: the number of rows of each part of one head.
        """
        index = torch.arange(heads * sum(parts)).view(heads, -1)
        weight = self.weights.take(f"{name}.weight", index.numel(), self.config.hidden)
        return self.weights.rows(weight, torch.cat([part.flatten() for part in torch.split(index, parts, dim=1)]))

    def _delta_rule(self, prefix: str, mixer: DeltaConfig) -> DeltaRule:
        heads, to_device = mixer.value_heads, self.operations.weights.to_device
        if f"{prefix}ssm_a" in self.weights:
            rate = self.weights.take_vector(f"{prefix}ssm_a", heads)
        else:
            rate = -self.weights.take_vector(f"{prefix}ssm_a_log.weight", heads).exp()
        norm = dequantize(self.weights.take(f"{prefix}ssm_norm.weight", mixer.value_dim))
        return DeltaRule(
            mixer,
            self._convolution(f"{prefix}ssm_conv1d.weight", mixer.conv_width, mixer.taps),
            to_device(rate),
            self._vector(f"{prefix}ssm_dt.bias", heads),
            Norm(to_device(norm), self.config.norm.epsilon),
        )

    def _mlp_norm(self, prefix: str) -> Norm:
        """Load the norm of the MLP's input. Some families name it by its position, after attention."""
        other = f"{prefix}post_attention_norm"
        is_other = self.config.norm_placement is NormPlacement.BEFORE and f"{other}.weight" in self.weights
        return self.norm(other if is_other else f"{prefix}ffn_norm")

    def output_norm(self) -> Norm:
        """Load the norm before the head. GGUF files of LFM2 name it by the embedding."""
        other = "token_embd_norm"
        name = other if f"{other}.weight" in self.weights else "output_norm"
        return self.norm(name, scale=self.config.logit_scale)

    def norm(self, name: str, *, scale: float = 1.0) -> Norm:
        """Load a norm of rows, whose output is multiplied by `scale`."""
        rule, hidden = self.config.norm, self.config.hidden
        bias = self.weights.take_vector(f"{name}.bias", hidden) if rule.bias else None
        norm = self._unbiased_norm(name, hidden, scale=scale)
        return norm if bias is None else replace(norm, bias=self.operations.weights.to_device(bias * scale))

    def _unbiased_norm(self, name: str, *shape: int, scale: float = 1.0) -> Norm:
        rule, stored = self.config.norm, dequantize(self.weights.take(f"{name}.weight", *shape))
        return Norm(self.operations.weights.to_device((stored + rule.offset) * scale), rule.epsilon, rule.kind)

    def _attention(self, prefix: str, mixer: AttentionConfig) -> Attention:
        return Attention(
            scale=self.config.attention_scale or mixer.head_dim**-0.5,
            rotary=None if mixer.rope is None else self.tables[mixer.rope],
            norms=self._head_norms(prefix, mixer),
            softcap=self.config.attention_softcap,
            window=mixer.cache.window,
            sinks=self._vector(f"{prefix}attn_sinks.weight", mixer.heads) if mixer.sinks else None,
            shared=mixer.source is not None,
        )

    def _head_norms(self, prefix: str, mixer: AttentionConfig) -> HeadNorms | None:
        if (kind := self.config.head_norm) is None:
            return None

        def norm(letter: str, heads: int) -> Norm:
            return self._unbiased_norm(f"{prefix}attn_{letter}_norm", *head_norm_shape(kind, heads, mixer.head_dim))

        q = norm("q", mixer.heads)
        if mixer.source is not None:
            return HeadNorms(q, q)
        ones = self.operations.weights.to_device(torch.ones(mixer.head_dim))
        values = replace(q, weight=ones) if self.config.value_norm else None
        return HeadNorms(q, norm("k", mixer.kv_heads), values)

    def _qkv(self, prefix: str, mixer: AttentionConfig) -> Projection:
        q, kv = mixer.width, mixer.kv_width
        if mixer.source is not None:  # some checkpoints contain the unused weights
            for name in ("k", "v", "k_norm"):
                self.weights.drop(f"{prefix}attn_{name}.weight")
            return self._projection(prefix, self.config.hidden, {"attn_q": q}, self.config.qkv_bias)
        if mixer.values_are_keys or (mixer.values_are_keys is None and f"{prefix}attn_v.weight" not in self.weights):
            query, key = self._segments(prefix, self.config.hidden, {"attn_q": q, "attn_k": kv})
            return Projection(self.operations.weights.linear([query, key, key]), None)
        fused = f"{prefix}attn_qkv.weight" in self.weights
        outputs = {"attn_qkv": mixer.qkv_width} if fused else {"attn_q": q, "attn_k": kv, "attn_v": kv}
        return self._projection(prefix, self.config.hidden, outputs, self.config.qkv_bias)

    def _mlp(self, prefix: str, mlp: MLPConfig | ExpertConfig) -> GatedMLP | ExpertMLP:
        if isinstance(mlp, MLPConfig) or mlp.separate:
            return self._gated_mlp(prefix, mlp.hidden if isinstance(mlp, MLPConfig) else mlp.shared_hidden)
        shared = self._gated_mlp(prefix, mlp.shared_hidden, "_shexp") if mlp.shared_hidden else None
        biases = self._expert_biases(prefix, mlp) if mlp.biased else None
        return ExpertMLP(self._router(prefix, mlp), self._experts(prefix, mlp), shared, biases)

    def _gated_mlp(self, prefix: str, width: int, suffix: str = "") -> GatedMLP:
        hidden, gate_up = self.config.hidden, self._gate_up(prefix, width, suffix)
        return GatedMLP(self._linear(prefix, hidden, gate_up), self._linear(prefix, width, {f"down{suffix}": hidden}))

    def _experts(self, prefix: str, experts: ExpertConfig) -> tuple[GatedMLP, ...]:
        hidden, width, count = self.config.hidden, experts.hidden, experts.routing.experts
        suffixes = [f".{number}" for number in range(count)]
        gate_up = (self._segments(prefix, hidden, self._gate_up(prefix, width, it)) for it in suffixes)
        if experts.interleaved:
            gate_up = ([self.weights.rows(it, _in_halves(2 * width)) for it in weights] for weights in gate_up)
        down = (self._segments(prefix, width, {f"down{it}": hidden}) for it in suffixes)
        layers = [self.operations.weights.experts(segments, count) for segments in (gate_up, down)]
        return tuple(map(GatedMLP, *layers))

    def _expert_biases(self, prefix: str, experts: ExpertConfig) -> ExpertBiases:
        hidden, width = self.config.hidden, experts.hidden
        gate_up, down = [], []
        for expert in range(experts.routing.experts):
            names = self._gate_up(prefix, width, f".{expert}", kind="bias")
            joined = torch.cat([self.weights.take_vector(f"{prefix}{it}.bias", size) for it, size in names.items()])
            gate_up.append(joined[_in_halves(2 * width)] if experts.interleaved else joined)
            down.append(self.weights.take_vector(f"{prefix}down.{expert}.bias", hidden))
        to_device = self.operations.weights.to_device
        return ExpertBiases(to_device(torch.stack(gate_up)), to_device(torch.stack(down)))

    def _vector(self, name: str, length: int) -> Tensor:
        return self.operations.weights.to_device(self.weights.take_vector(name, length))

    def _gate_up(self, prefix: str, width: int, suffix: str, kind: str = "weight") -> Mapping[str, int]:
        """Return the names and outputs of an MLP's gate and up. They may be separate, or one weight called `gate_up`,
        or `up` in old dense models.
        """
        gate, up, fused = (f"{name}{suffix}" for name in ("gate", "up", "gate_up"))
        if f"{prefix}{gate}.{kind}" in self.weights:
            return {gate: width, up: width}
        return {fused if f"{prefix}{fused}.{kind}" in self.weights else up: 2 * width}

    def _router(self, prefix: str, experts: ExpertConfig) -> Router:
        hidden, count = self.config.hidden, experts.routing.experts
        rows = [self.weights.take(f"{prefix}gate_inp.weight", count, hidden)]
        if experts.shared_gate:
            rows.append(self.weights.take_row(f"{prefix}gate_inp_shexp.weight", hidden))
        choice, bias = f"{prefix.removesuffix('ffn_')}exp_probs_b.bias", f"{prefix}gate_inp.bias"
        choice_bias = None
        if choice in self.weights:
            stored = dequantize(self.weights.take_row(choice, count)).flatten()
            choice_bias = self.operations.weights.to_device(stored)
        logit_bias = self._vector(bias, count) if experts.biased else None
        return Router(experts.routing, self.operations.weights.linear(rows), choice_bias, logit_bias)

    def _projection(self, prefix: str, inputs: int, outputs: Mapping[str, int], bias: bool | None) -> Projection:
        weight = self._linear(prefix, inputs, outputs)
        biases = {f"{prefix}{name}.bias": width for name, width in outputs.items()}
        if bias is False or (bias is None and not any(name in self.weights for name in biases)):
            return Projection(weight, None)
        joined = torch.cat([self.weights.take_vector(*it) for it in biases.items()])
        return Projection(weight, self.operations.weights.to_device(joined))

    def _linear(self, prefix: str, inputs: int, outputs: Mapping[str, int]) -> QLinear:
        """Load several weights as one layer, with their outputs in order."""
        return self.operations.weights.linear(self._segments(prefix, inputs, outputs))

    def _segments(self, prefix: str, inputs: int, outputs: Mapping[str, int]) -> list[QTensor]:
        return [self.weights.take(f"{prefix}{name}.weight", width, inputs) for name, width in outputs.items()]


def _in_halves(rows: int) -> Tensor:
    """Return the even numbers below `rows`, then the odd ones, int64."""
    return torch.arange(rows).view(-1, 2).T.flatten()


def head_norm_shape(kind: HeadNorm, heads: int, head_dim: int) -> tuple[int, ...]:
    """Return the shape of a head norm's weights (see `HeadNorms`)."""
    return {HeadNorm.EACH: (head_dim,), HeadNorm.OWN: (heads, head_dim), HeadNorm.ALL: (heads * head_dim,)}[kind]


NO_TURN = 1e20  # a divisor of frequencies from which on the pair does not turn at any position
DELTA_LOGITS = ("ssm_beta", "ssm_alpha")  # weights of the step sizes and of the decays
_PLACEMENTS = (NormPlacement.BEFORE, NormPlacement.AFTER)
