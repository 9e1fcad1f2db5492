"""Calls of every kernel wrapper on tensors without memory, with the arguments that the engine passes.

A new wrapper gets a function here and an entry in one of the tables of calls. A kernel that no wrapper launches fails
the check.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.config import BLOCK_SIZE
from engine.kernels import rotated_product
from engine.kernels.activations import gated
from engine.kernels.attention_tiles import query_tiles, tile_queries
from engine.kernels.delta_rule import gated_delta_rule
from engine.kernels.expert_sum import expert_sum
from engine.kernels.norms import normalize, normalize_add
from engine.kernels.paged_attention import paged_attention
from engine.kernels.pending_tokens import fill_pending_tokens
from engine.kernels.reference import ScoreRule
from engine.kernels.rope_store import rope_and_store
from engine.kernels.routing import route
from engine.kernels.sampling import sample
from engine.kernels.sampling_rows import SampleTarget, build_rows
from engine.kernels.short_convolution import short_convolution
from engine.kernels.step_logits import StepLogits
from engine.model_config import ExpertConfig, Gate, ModelConfig, NormKind, Score
from engine.operations import Attention, DeltaRule, HeadNorms, Norm
from engine.request import Request
from engine.rope import RotaryTable
from engine.sampling.masks import Masks
from engine.sampling_params import SamplingParams
from quant.cuda.experts import TILE_TOKENS, ExpertStack, stacked, tiles_of_experts
from quant.cuda.linear import CudaLinear
from quant.cuda.loading import to_device
from quant.cuda.matrix import CudaMatrix
from quant.kernels.card import Card
from quant.kernels.integer_rows import integer_gated
from quant.kernels.packed_product import VECTOR_ROWS, RowNorm, UnscaledRow
from quant.kernels.token_tiles import token_tiles
from tests.kernels.shapes import (
    DELTA_27B,
    DELTA_35B_A3B,
    GEMMA_9B,
    LLAMA_8B,
    QWEN_30B_A3B,
    SHAPES,
    SMALL_135M,
    WIDE_HEADS,
    matrices,
    mixer_of,
)
from tests.kernels.weights import KINDS, fits, weight
from tests.quant.cpu.random_group_weights import ORDERED


@dataclass(frozen=True, slots=True)
class Setting:
    """The step for which the wrappers are called."""

    card: Card
    model: ModelConfig
    tokens: int
    deterministic: bool
    thorough: bool  # all kinds of weights in all sizes; otherwise one kind per form, in the sizes of one model


def blank(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _gate(setting: Setting) -> None:
    (width,) = setting.model.mlp_widths
    gated(blank(setting.tokens, 2 * width), setting.model.gate)


def _norms(setting: Setting) -> None:
    model, shape = setting.model, (setting.tokens, setting.model.hidden)
    weight = blank(model.hidden, dtype=torch.float32)
    stream = blank(*shape, dtype=torch.float32)
    for norm in (Norm(weight, 1e-5), Norm(weight, 1e-5, NormKind.LAYER), Norm(weight, 1e-5, NormKind.LAYER, weight)):
        normalize(stream, norm)
        normalize_add(blank(*shape), norm, stream)


def _heads(setting: Setting) -> None:
    model, mixer = setting.model, mixer_of(setting.model)
    heads, kv_heads, head_dim = mixer.heads, mixer.kv_heads, mixer.head_dim
    qkv, whole = blank(setting.tokens, mixer.qkv_width), blank(setting.tokens, dtype=torch.int64)
    cos, sin, norm = (blank(64, it, dtype=torch.float32) for it in (head_dim // 2, head_dim // 2, head_dim))
    rotary = RotaryTable(cos, sin, model.ropes[0].interleaved)
    each = Norm(norm[0], 1e-5)
    own = tuple(Norm(blank(it, head_dim, dtype=torch.float32), 1e-5, NormKind.LAYER) for it in (heads, kv_heads))
    norms = (HeadNorms(each, each), HeadNorms(*own)) if model.head_norm else (None,)
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    sizes["early"] = setting.card.starts_early
    for dtype, it in itertools.product(KV_TYPES, norms):
        pool = blank(64, len(model.layers), 2, kv_heads, BLOCK_SIZE, head_dim, dtype=dtype)[:, 1]
        rope_and_store(qkv, whole, whole, pool, **sizes, attention=Attention(1.0, rotary, it))
    if model.head_norm:
        _spread_heads(setting, each)


def _rotated_products(setting: Setting) -> None:
    """Call the projection of one token that rotates and stores, with weights of one kind and of two."""
    if setting.tokens != 1 or setting.deterministic or setting.model.head_norm:
        return
    model, mixer, hidden = setting.model, mixer_of(setting.model), setting.model.hidden
    key_rows, value_rows = mixer.qkv_width - mixer.kv_heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    whole = blank(1, dtype=torch.int64)
    angles = blank(64, mixer.head_dim // 2, dtype=torch.float32)
    attention = Attention(1.0, RotaryTable(angles, angles, model.ropes[0].interleaved))
    row = UnscaledRow(blank(1, hidden), blank(-(-hidden // VECTOR_ROWS), dtype=torch.float32), 1e-5)
    for kinds, dtype in itertools.product((("Q4_K",), ("Q4_K", "Q6_K"), ("Q8_0",)), KV_TYPES):
        if not all(fits(kind, hidden) for kind in kinds):
            continue
        rows = [mixer.qkv_width] if len(kinds) == 1 else [key_rows, value_rows]
        matrices_of_heads = [_matrix(kind, count, hidden) for kind, count in zip(kinds, rows, strict=True)]
        layer = CudaLinear(matrices_of_heads, setting.card, deterministic=False)
        pool = blank(64, len(model.layers), 2, mixer.kv_heads, BLOCK_SIZE, mixer.head_dim, dtype=dtype)[:, 1]
        if rotated_product.is_supported(layer, mixer.head_dim, attention):
            rotated_product.rotated_product(
                layer, row, None, whole, whole, pool,
                heads=mixer.heads, kv_heads=mixer.kv_heads, head_dim=mixer.head_dim, attention=attention,
            )  # fmt: skip
            layer.multiply_row(row)


def _rows(setting: Setting, layer: CudaLinear) -> None:
    """Call the products of one row that do the work of norms and gates."""
    if setting.tokens != 1 or not layer.adds_rows:
        return
    norm = RowNorm(blank(layer.outputs, dtype=torch.float32), 1e-5)
    row = layer.add_row(blank(1, layer.inputs), blank(1, layer.outputs, dtype=torch.float32), norm, None)
    unscaled = UnscaledRow(blank(1, layer.inputs), row.squares, 1e-5)
    layer.multiply_row(unscaled, out_dtype=torch.float32)
    if layer.gates_rows:
        layer.gate_row(unscaled, setting.model.gate.value)


def _spread_heads(setting: Setting, norm: Norm) -> None:
    """Call the kernel of Gemma 4 with keys and values, and with queries alone."""
    mixer, tokens = WIDE_HEADS, setting.tokens
    whole = blank(tokens, dtype=torch.int64)
    cos, sin = (blank(64, mixer.head_dim // 8, dtype=torch.float32) for _ in range(2))
    rotary = RotaryTable(cos, sin, interleaved=False, span=mixer.head_dim)
    pool = blank(64, 4, 2, mixer.kv_heads, BLOCK_SIZE, mixer.head_dim)[:, 1]
    sizes: dict[str, Any] = {"heads": mixer.heads, "kv_heads": mixer.kv_heads, "head_dim": mixer.head_dim}
    sizes["early"] = setting.card.starts_early
    for width, shared in ((mixer.qkv_width, False), (mixer.width, True)):
        attention = Attention(1.0, rotary, HeadNorms(norm, norm, None if shared else norm), shared=shared)
        rope_and_store(blank(tokens, width), whole, whole, pool, **sizes, attention=attention)


def _attention(setting: Setting) -> None:
    """Call decode and prefill attention, with the windows of all layers, and with sinks for small heads.

    This is the slowest kernel to compile, so sizes that do not change its code are left out.
    """
    model, card, tokens, deterministic = setting.model, setting.card, setting.tokens, setting.deterministic
    if tokens not in (1, 512) or model not in (LLAMA_8B, GEMMA_9B, SMALL_135M):
        return
    starts, lengths, tables = (blank(*shape, dtype=torch.int32) for shape in ((2,), (1,), (1, 2048)))
    mixers = [*model.attentions, *[WIDE_HEADS] * (model is GEMMA_9B)]
    for mixer, dtype in itertools.product(mixers, KV_TYPES if model is LLAMA_8B else KV_TYPES[:1]):
        queries = tile_queries([mixer], card, deterministic=deterministic)
        tiles = query_tiles([0, tokens], [tokens + 32768], queries)
        sinks = blank(mixer.heads, dtype=torch.float32)
        paged_attention(
            blank(tokens, mixer.heads, mixer.head_dim),
            blank(64, len(model.layers), 2, mixer.kv_heads, BLOCK_SIZE, mixer.head_dim, dtype=dtype)[:, 1],
            tables,
            starts,
            lengths,
            tiles,
            ScoreRule(0.1, 0.0 if mixer is WIDE_HEADS else model.attention_softcap, mixer.cache.window),
            sinks=sinks if model is SMALL_135M else None,
            arrivals=blank(4 * card.multiprocessors, dtype=torch.int32),
            card=card,
            deterministic=deterministic,
        )


def _sampling(setting: Setting) -> None:
    vocabulary = setting.model.vocab_size
    values, ids = blank(1, vocabulary, dtype=torch.float32), blank(setting.tokens, dtype=torch.int64)
    params = SamplingParams(presence_penalty=1.0, logprobs=20)
    masks = Masks(np.zeros((1, -(-vocabulary // 32)), np.int32), {(0, 0): 0}, {})
    rows = build_rows([SampleTarget(0, Request(0, (1,), params), 0)], vocabulary, masks)
    sampled = sample(StepLogits.of(values), rows.to(values.device))
    indices = blank(setting.tokens, dtype=torch.int32)
    fill_pending_tokens(sampled.columns.token_ids, indices, indices, ids)


@cache
def _matrix(kind: str, rows: int, columns: int) -> CudaMatrix:
    return to_device(weight(kind, rows, columns, torch.device("meta")), torch.device("meta"))


def _products(setting: Setting) -> None:
    for number, kind in enumerate(KINDS if setting.thorough else FORMS):
        models = [model for model in SHAPES if fits(kind, *(columns for _, columns in matrices(model).values()))]
        if setting.model in (models if setting.thorough else [models[number % len(models)]]):
            sizes = list(matrices(setting.model).values())
            for rows, columns in sizes if setting.thorough else sizes[:3:2]:
                integers = setting.card.prefers_integers
                layer = CudaLinear(
                    [_matrix(kind, rows, columns)],
                    setting.card,
                    deterministic=setting.deterministic,
                    integer_prompts=integers,
                )
                _product(setting, layer)
                if layer.takes_integers(setting.tokens):
                    integer_gated(blank(setting.tokens, 2 * columns), setting.model.gate.value)


def _convolutions(setting: Setting) -> None:
    if setting.model is not LLAMA_8B:
        return
    rows, pool = blank(setting.tokens, 3 * 2048), blank(8, 4, 2 * 2048, dtype=torch.float32)[:, 1]
    tables, starts, lengths = (blank(*shape, dtype=torch.int32) for shape in ((1, 2048), (2,), (1,)))
    short_convolution(rows, pool, tables, starts, lengths, blank(3, 2048, dtype=torch.float32))
    for shape in (replace(DELTA_35B_A3B, tiled=False), DELTA_27B):
        heads = (shape.value_heads,)
        floats = (blank(*it, dtype=torch.float32) for it in ((4, shape.conv_width), heads, heads, (shape.value_dim,)))
        conv, rate, bias, weight = floats
        states = blank(8, 4, shape.cache.elements, dtype=torch.float32)[:, 1]
        rows = blank(setting.tokens, shape.in_width, dtype=torch.float32)
        delta = DeltaRule(shape, conv, rate, bias, Norm(weight, 1e-6))
        for chunked in (False, True):
            gated_delta_rule(rows, states, tables, starts, lengths, delta, chunked=chunked)


def _experts(setting: Setting) -> None:
    """Call the kernels of a mixture of experts, with gate and up of one kind, or of several."""
    if setting.model is not LLAMA_8B:
        return
    experts = QWEN_30B_A3B.layers[0].mlp
    assert isinstance(experts, ExpertConfig)
    hidden, width, routing = QWEN_30B_A3B.hidden, experts.hidden, replace(experts.routing, experts=EXPERTS)
    logits = blank(setting.tokens, routing.experts + 1, dtype=torch.float32)
    bias = logits[0, 1:]
    ids, weights, shared = route(logits, routing)
    route(logits[:, 1:], replace(routing, score=Score.SIGMOID, normalized=False, groups=8, active_groups=4), bias, bias)
    for kind in EXPERT_KINDS if setting.thorough else EXPERT_FORMS:
        inputs, inner = EXPERT_SIZES.get(kind, (hidden, width))
        gate_up, down = (_stack(setting, kind, *it) for it in ((2 * inner, inputs), (inputs, inner)))
        all_tiles = [tiles_of_experts(ids, (gate_up, down))]
        if setting.tokens == TOKENS_OF_EVERY_TILE:
            all_tiles = [token_tiles(ids, routing.experts, it) for it in TILE_TOKENS if it <= gate_up.most_slots]
        for tiles in all_tiles:
            for gate in Gate:
                gate_up.multiply_gated(blank(setting.tokens, inputs), tiles, gate.value)
            both = gate_up.multiply(blank(setting.tokens, inputs), tiles)
            gated(both, Gate.CLAMPED, blank(EXPERTS, 2 * inner, dtype=torch.float32), ids.flatten())
            if down.takes_integers(tiles):
                integer_gated(both, setting.model.gate.value)
            outputs = down.multiply(blank(tiles.count, inner), tiles, torch.float32)
    hidden = outputs.shape[1]
    stream = blank(setting.tokens, hidden, dtype=torch.float32)
    for added in (None, stream):
        expert_sum(outputs, weights, stream, shared, added)
        expert_sum(outputs, weights, None, None, added)
        expert_sum(outputs, weights, stream, None, added)
        expert_sum(outputs, weights, None, None, added, blank(EXPERTS, hidden, dtype=torch.float32), ids)


def _stack(setting: Setting, kind: str, rows: int, columns: int) -> ExpertStack:
    return ExpertStack(
        [_all_experts(kind, rows, columns)],
        EXPERTS,
        setting.card,
        deterministic=setting.deterministic,
        integer_prompts=setting.card.prefers_integers,
    )


@cache
def _all_experts(kind: str, rows: int, columns: int) -> CudaMatrix:
    (matrix,) = stacked([[_matrix(kind, rows, columns)]] * EXPERTS, EXPERTS)
    return matrix


def _product(setting: Setting, layer: CudaLinear) -> None:
    x, bias = blank(setting.tokens, layer.inputs), blank(layer.outputs, dtype=torch.float32)
    layer.multiply(x, bias=bias)
    layer.multiply(x, add_to=blank(setting.tokens, layer.outputs, dtype=torch.float32))
    layer.rows(blank(setting.tokens, dtype=torch.int64))
    _rows(setting, layer)
    if setting.tokens == 1:
        layer.dequantize()


FORMS = (
    "Q4_K",
    "Q6_K",
    "e4m3 channel",
    "Q8_0",
    "int4 g128 zeros",
    "Q3_K",
    "Q5_K",
    "IQ4_XS",
    "MXFP4",
    "int4 g32 zeros 1",
    "nf4 g64 nested",
    "int8 channel",
    "e4m3 128x128",
    "e5m2 channel",
    "TQ2_0",
    "Q2_K",
    "BF16",
)
EXPERTS = 16
TOKENS_OF_EVERY_TILE = 512
EXPERT_FORMS = ("Q4_K", "Q6_K", "MXFP4", "Q5_K", "int4 g128", "e4m3 channel", "e4m3 128x128", "BF16")
EXPERT_SIZES = {"MXFP4": (2880, 2880)}  # those of gpt-oss, no multiple of 128; other kinds have the sizes of Qwen3
# experts with nested scales are not supported, and those with an order of columns have the same kernels as others
EXPERT_KINDS = tuple(kind for kind in KINDS if kind not in ORDERED and "nested" not in kind)
KV_TYPES = (torch.bfloat16, torch.uint8)
Call = Callable[[Setting], None]
CALLS_OF_ALL_CARDS: tuple[Call, ...] = (
    _gate,
    _norms,
    _convolutions,
    _sampling,
)  # the same for every card
CALLS_OF_A_CARD: tuple[Call, ...] = (_heads, _attention, _products, _rotated_products, _experts)
CALLS = CALLS_OF_ALL_CARDS + CALLS_OF_A_CARD
