"""Gated delta rules on a GPU (arXiv:2412.06464). Reference implementation: `reference.gated_delta_rule`.

A program computes some columns of the state of one value head of one request, token by token. Whole blocks of a prompt
are computed as chunks instead: see `chunked_delta_rule`. The lower bound of a step of one token is memory traffic: each
state is read and written once, 2 MB each for 32 heads of 128 x 128, or 1.3 us per layer on an H100. A token of a prompt
takes about as long as its chain of dependent sums, and all heads are computed at the same time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.chunked_delta_rule import CHUNK, chunked_delta_rule, delta_constants, divide_request, log_decay
from engine.kernels.reference import DELTA_EPSILON
from engine.kernels.short_convolution import short_convolution
from engine.operations import DeltaRule

COLUMNS = 32  # of a program
NO_CHUNK = 1 << 30  # longer than any context, so that no request has a whole one


# One compiled kernel for both parts, so that the bits of a token do not depend on its part.
@triton.jit(do_not_specialize=["first_element", "part"])
def _delta_kernel(
    mixed: tl.tensor,
    logits: tl.tensor,
    pool: tl.tensor,
    tables: tl.tensor,
    query_starts: tl.tensor,
    context_lengths: tl.tensor,
    rate: tl.tensor,
    time_bias: tl.tensor,
    out: tl.tensor,
    logit_stride: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    first_element: tl.tensor,
    epsilon: tl.tensor,
    scale: tl.tensor,
    part: tl.tensor,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILED: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute the tokens of a request before its whole blocks (part 0), or after them (part 1)."""
    request, head = tl.program_id(0), tl.program_id(1)
    column, key = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, KEYS)
    is_column, is_key = column < VALUE_DIM, key < KEY_DIM
    key_head = head % KEY_HEADS if TILED else head // (VALUE_HEADS // KEY_HEADS)
    first, count, before, whole = divide_request(query_starts, context_lengths, request, CHUNK)
    start, stop = (before + whole) * part, tl.where(part > 0, count, before)
    if start >= stop:
        return
    element = first_element + (head * KEY_DIM + key[:, None]) * VALUE_DIM + column[None, :]
    inside = is_key[:, None] & is_column[None, :]
    source = tl.load(tables + request * table_stride + tl.where(start > 0, 1, 0)).to(tl.int64)
    target = tl.load(tables + request * table_stride + 1).to(tl.int64)
    state = tl.load(pool + source * block_stride + element, mask=inside, other=0.0)
    largest, bias = tl.load(rate + head), tl.load(time_bias + head)
    width: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    for token in range(start, stop):
        row = mixed + (first + token) * width
        query = tl.load(row + key_head * KEY_DIM + key, mask=is_key, other=0.0)
        own = tl.load(row + (KEY_HEADS + key_head) * KEY_DIM + key, mask=is_key, other=0.0)
        value = tl.load(row + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column, mask=is_column, other=0.0)
        query *= tl.rsqrt(tl.sum(query * query, 0) + epsilon) * scale
        own *= tl.rsqrt(tl.sum(own * own, 0) + epsilon)
        at = logits + (first + token) * logit_stride + head
        step = tl.sigmoid(tl.load(at))
        state *= tl.exp(log_decay(tl.load(at + VALUE_HEADS), largest, bias))
        change = (value - tl.sum(state * own[:, None], 0)) * step
        state += own[:, None] * change[None, :]
        result = tl.sum(state * query[:, None], 0)
        tl.store(out + ((first + token) * VALUE_HEADS + head) * VALUE_DIM + column, result, mask=is_column)
    # Padding requests have stale tables, and the null block must stay zero.
    if tl.load(context_lengths + request) > 0 and target != 0:
        tl.store(pool + target * block_stride + element, state, mask=inside)


@triton.jit
def _gate_kernel(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    gate_stride: tl.tensor,
    epsilon: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Normalize one head of one token, and multiply it by gate * sigmoid(gate)."""
    token, head, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside, at = column < DIM, (token * HEADS + head) * DIM + column
    values = tl.load(x + at, mask=inside, other=0.0)
    gates = tl.load(gate + token * gate_stride + head * DIM + column, mask=inside, other=0.0)
    values *= tl.rsqrt(tl.sum(values * values, 0) / DIM + epsilon) * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + at, (values * gates * tl.sigmoid(gates)).to(out.dtype.element_ty), mask=inside)


def gated_delta_rule(
    rows: Tensor,
    pool: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    delta: DeltaRule,
    *,
    chunked: bool,
) -> Tensor:
    """Compute the delta rule of every token, and update the states.

    See `short_convolution` for the arguments that are the same. rows: float32 [tokens, in_width], as in
    `Operations.delta_rule`. The target of a state is the null block for padding requests only. Returns bfloat16
    [tokens, width].

    The bits of a token never depend on the other requests of the step. With `chunked`, the tokens of a block that are
    all in one step are computed together, and others one by one, with other bits. So the bits do not depend on cuts at
    block boundaries, as those before a cached prefix, but on cuts within a block. Without `chunked`, all tokens are
    computed one by one, and the bits depend on no cuts.
    """
    shape, tokens = delta.config, len(rows)
    mixed = short_convolution(rows, pool, tables, query_starts, context_lengths, delta.conv, plain=True)
    gate, logits = rows[:, shape.conv_width :], rows[:, shape.conv_width + shape.width :]
    sums = torch.empty(tokens, shape.width, dtype=torch.float32, device=rows.device)
    states = pool, tables, query_starts, context_lengths, delta
    _delta_rule_of_part(0, mixed, logits, *states, sums, chunk=CHUNK if chunked else NO_CHUNK)
    if chunked and tokens - len(context_lengths) >= CHUNK - 1:  # otherwise, no request has a whole block
        chunked_delta_rule(mixed, logits, *states, sums)
        _delta_rule_of_part(1, mixed, logits, *states, sums, chunk=CHUNK)
    out = torch.empty(tokens, shape.width, dtype=torch.bfloat16, device=rows.device)
    _gate_kernel[tokens, shape.value_heads](
        sums, gate, delta.norm.weight, out, gate.stride(0), delta.norm.epsilon, HEADS=shape.value_heads,
        DIM=shape.value_dim, BLOCK=triton.next_power_of_2(shape.value_dim), num_warps=1,
    )  # fmt: skip
    return out


def _delta_rule_of_part(
    part: int,
    mixed: Tensor,
    logits: Tensor,
    pool: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    delta: DeltaRule,
    out: Tensor,
    *,
    chunk: int,
) -> None:
    """Compute the tokens before the whole blocks of `chunk` tokens (part 0), or after them (part 1)."""
    shape = delta.config
    _delta_kernel[len(context_lengths), shape.value_heads, triton.cdiv(shape.value_dim, COLUMNS)](
        mixed, logits, pool, tables, query_starts, context_lengths, delta.rate, delta.time_bias, out,
        logits.stride(0), pool.stride(0), tables.stride(0), (shape.taps - 1) * shape.conv_width, DELTA_EPSILON,
        shape.key_dim**-0.5, part, **delta_constants(shape), CHUNK=chunk, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
