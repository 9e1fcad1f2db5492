"""Loads the mixers of layers, and the products before and after them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.mixer_config import AttentionConfig, ConvConfig, DeltaConfig, MixerConfig
from engine.model_config import HeadNorm
from engine.models.decoder import Mixer, Projection
from engine.models.part_loader import PartLoader
from engine.operations import Attention, DeltaRule, HeadNorms, Norm, ShortConv
from engine.rope import RotaryTable
from quant.kernels.reference import dequantize
from quant.linear import QLinear
from quant.tensor import QTensor

DELTA_LOGITS = ("ssm_beta", "ssm_alpha")  # weights of the step sizes and of the decays


@dataclass(frozen=True, slots=True)
class MixerLoader:
    """Loads mixers. Names of weights start with `prefix`, such as `blk.3.`."""

    parts: PartLoader
    tables: tuple[RotaryTable, ...]

    def mixer(self, prefix: str, mixer: MixerConfig) -> tuple[Mixer, Projection, QLinear | None, Projection]:
        """Load a mixer, the products before it, and the one after it."""
        hidden = self.parts.config.hidden
        match mixer:
            case AttentionConfig():
                out = self.parts.projection(prefix, mixer.width, {"attn_output": hidden}, self.parts.config.out_bias)
                if not mixer.gated:
                    return self._attention(prefix, mixer), self._qkv(prefix, mixer), None, out
                return self._attention(prefix, mixer), *self._gated_qkv(prefix, mixer), out
            case ConvConfig():
                conv = ShortConv(self._convolution(f"{prefix}shortconv.conv.weight", mixer.width, mixer.taps))
                inputs = self.parts.linear(f"{prefix}shortconv.", hidden, {"in_proj": mixer.in_width})
                out_weight = self.parts.linear(f"{prefix}shortconv.", mixer.width, {"out_proj": hidden})
                return conv, Projection(inputs, None), None, Projection(out_weight, None)
            case DeltaConfig():
                inputs = self.parts.backend.linear(self._delta_inputs(prefix, mixer))
                out_weight = self.parts.linear(prefix, mixer.width, {"ssm_out": hidden})
                return self._delta_rule(prefix, mixer), Projection(inputs, None), None, Projection(out_weight, None)

    def _gated_qkv(self, prefix: str, mixer: AttentionConfig) -> tuple[Projection, QLinear]:
        """Load q, k, and v as one layer, and the gate, whose rows are between those of the heads of q."""
        hidden, linear = self.parts.config.hidden, self.parts.backend.linear
        both = self.parts.weights.take(f"{prefix}attn_q.weight", 2 * mixer.width, hidden)
        rows = torch.arange(2 * mixer.width).view(mixer.heads, 2, mixer.head_dim)
        q, gate = (self.parts.weights.rows(both, rows[:, half].flatten()) for half in (0, 1))
        kv = self.parts.segments(prefix, hidden, {"attn_k": mixer.kv_width, "attn_v": mixer.kv_width})
        return Projection(linear([q, *kv]), None), linear([gate])

    def _convolution(self, name: str, channels: int, taps: int) -> Tensor:
        """Load the weights of a convolution, float32 [taps, channels]."""
        return self.parts.backend.to_device(self.parts.weights.take_convolution(name, channels, taps).T.contiguous())

    def _delta_inputs(self, prefix: str, mixer: DeltaConfig) -> list[QTensor]:
        """Load the weights of q, k, and v, of the gate, of the step sizes, and of the decays, in this order."""
        hidden, each = self.parts.config.hidden, mixer.value_heads // mixer.key_heads
        values = each * mixer.value_dim
        if f"{prefix}ssm_in.weight" in self.parts.weights:
            rows = [self._ungrouped(f"{prefix}ssm_in", mixer.key_heads, [mixer.key_dim, mixer.key_dim, values, values])]
        else:
            rows = self.parts.segments(prefix, hidden, {"attn_qkv": mixer.conv_width, "attn_gate": mixer.width})
        if f"{prefix}ssm_ba.weight" in self.parts.weights:
            return [*rows, self._ungrouped(f"{prefix}ssm_ba", mixer.key_heads, [each, each])]
        return rows + self.parts.segments(prefix, hidden, dict.fromkeys(DELTA_LOGITS, mixer.value_heads))

    def _ungrouped(self, name: str, heads: int, parts: list[int]) -> QTensor:
        """Load a matrix whose rows are grouped by head, and return the first part of all heads, then the second.

        `parts`: the number of rows of each part of one head.
        """
        index = torch.arange(heads * sum(parts)).view(heads, -1)
        weight = self.parts.weights.take(f"{name}.weight", index.numel(), self.parts.config.hidden)
        return self.parts.weights.rows(weight, torch.cat([part.flatten() for part in torch.split(index, parts, dim=1)]))

    def _delta_rule(self, prefix: str, mixer: DeltaConfig) -> DeltaRule:
        heads, to_device = mixer.value_heads, self.parts.backend.to_device
        if f"{prefix}ssm_a" in self.parts.weights:
            rate = self.parts.weights.take_vector(f"{prefix}ssm_a", heads)
        else:
            rate = -self.parts.weights.take_vector(f"{prefix}ssm_a_log.weight", heads).exp()
        norm = dequantize(self.parts.weights.take(f"{prefix}ssm_norm.weight", mixer.value_dim))
        return DeltaRule(
            mixer,
            self._convolution(f"{prefix}ssm_conv1d.weight", mixer.conv_width, mixer.taps),
            to_device(rate),
            self.parts.vector(f"{prefix}ssm_dt.bias", heads),
            Norm(to_device(norm), self.parts.config.norm.epsilon),
        )

    def _attention(self, prefix: str, mixer: AttentionConfig) -> Attention:
        return Attention(
            scale=self.parts.config.attention_scale or mixer.head_dim**-0.5,
            rotary=None if mixer.rope is None else self.tables[mixer.rope],
            norms=self._head_norms(prefix, mixer),
            softcap=self.parts.config.attention_softcap,
            window=mixer.cache.window,
            sinks=self.parts.vector(f"{prefix}attn_sinks.weight", mixer.heads) if mixer.sinks else None,
            shared=mixer.source is not None,
        )

    def _head_norms(self, prefix: str, mixer: AttentionConfig) -> HeadNorms | None:
        if (kind := self.parts.config.head_norm) is None:
            return None

        def norm(letter: str, heads: int) -> Norm:
            shape = head_norm_shape(kind, heads, mixer.head_dim)
            return self.parts.unbiased_norm(f"{prefix}attn_{letter}_norm", *shape)

        q = norm("q", mixer.heads)
        if mixer.source is not None:
            return HeadNorms(q, q)
        ones = self.parts.backend.to_device(torch.ones(mixer.head_dim))
        values = replace(q, weight=ones) if self.parts.config.value_norm else None
        return HeadNorms(q, norm("k", mixer.kv_heads), values)

    def _qkv(self, prefix: str, mixer: AttentionConfig) -> Projection:
        q, kv, config, weights = mixer.width, mixer.kv_width, self.parts.config, self.parts.weights
        if mixer.source is not None:  # some checkpoints contain the unused weights
            for name in ("k", "v", "k_norm"):
                weights.drop(f"{prefix}attn_{name}.weight")
            return self.parts.projection(prefix, config.hidden, {"attn_q": q}, config.qkv_bias)
        has_values = f"{prefix}attn_v.weight" in weights
        if mixer.values_are_keys or (mixer.values_are_keys is None and not has_values):
            query, key = self.parts.segments(prefix, config.hidden, {"attn_q": q, "attn_k": kv})
            return Projection(self.parts.backend.linear([query, key, key]), None)
        fused = f"{prefix}attn_qkv.weight" in weights
        outputs = {"attn_qkv": mixer.qkv_width} if fused else {"attn_q": q, "attn_k": kv, "attn_v": kv}
        return self.parts.projection(prefix, config.hidden, outputs, config.qkv_bias)


def head_norm_shape(kind: HeadNorm, heads: int, head_dim: int) -> tuple[int, ...]:
    """Return the shape of a head norm's weights (see `HeadNorms`)."""
    return {HeadNorm.EACH: (head_dim,), HeadNorm.OWN: (heads, head_dim), HeadNorm.ALL: (heads * head_dim,)}[kind]
