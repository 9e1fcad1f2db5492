"""Every wrapper of a kernel, called as the engine calls it, on tensors without memory.

A new wrapper gets a function here and a row in `CALLS`. A kernel that nobody launches fails the gate.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import BLOCK_SIZE, ModelConfig
from engine.kernels.gate import gated
from engine.kernels.gelu import gelu
from engine.kernels.norms import layer_norm, rms_norm, rms_norm_add
from engine.kernels.rope_store import rope_and_store
from engine.operations import Attention, HeadNorms
from engine.rope import RotaryTable
from quant.kernels.card import Card


@dataclass(frozen=True, slots=True)
class Setting:
    """What a step is like."""

    card: Card
    model: ModelConfig
    tokens: int
    deterministic: bool


def blank(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _gate(setting: Setting) -> None:
    gated(blank(setting.tokens, 2 * setting.model.mlp_hidden), setting.model.gate)


def _norms(setting: Setting) -> None:
    model, shape = setting.model, (setting.tokens, setting.model.hidden)
    weight = blank(model.hidden, dtype=torch.float32)
    stream = blank(*shape, dtype=torch.float32)
    rms_norm(stream, weight, model.norm_epsilon)
    rms_norm_add(blank(*shape), weight, model.norm_epsilon, stream)


def _heads(setting: Setting) -> None:
    model = setting.model
    heads, kv_heads, head_dim = model.heads, model.kv_heads, model.head_dim
    qkv, whole = blank(setting.tokens, (heads + 2 * kv_heads) * head_dim), blank(setting.tokens, dtype=torch.int64)
    cos, sin, norm = (blank(64, it, dtype=torch.float32) for it in (head_dim // 2, head_dim // 2, head_dim))
    norms = HeadNorms(norm[0], norm[0], model.norm_epsilon) if model.head_norm else None
    attention = Attention(1.0, RotaryTable(cos, sin, model.ropes[0].interleaved), norms)
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    for dtype in KV_TYPES:
        pool = blank(64, model.layers, 2, kv_heads, BLOCK_SIZE, head_dim, dtype=dtype)[:, 1]
        rope_and_store(qkv, whole, whole, pool, **sizes, attention=attention)


def _encoder(setting: Setting) -> None:
    for hidden in ENCODER_WIDTHS:
        stream, mixed = blank(setting.tokens, hidden, dtype=torch.float32), blank(setting.tokens, hidden)
        weight, bias = blank(2, hidden, dtype=torch.float32)
        layer_norm(stream, weight, bias, 1e-12, plus=mixed)
        layer_norm(stream, weight, bias, 1e-12)
        gelu(blank(setting.tokens, 4 * hidden))


KV_TYPES = (torch.bfloat16, torch.uint8)
ENCODER_WIDTHS = (384, 1024)
CALLS: tuple[Callable[[Setting], None], ...] = (_gate, _norms, _heads, _encoder)
