"""Gated delta rules of whole blocks of tokens on a GPU, in the WY form (arXiv:2406.06484 and arXiv:2412.06464).

A chunk is a block of the KV cache, so a step that starts at any block boundary divides its tokens into the same chunks.
Let K, Q, and V be the keys, queries, and values of a chunk, one row per token, S the state before it, b the step sizes,
and G the sums of the logarithms of the decays of a chunk's tokens, up to and including each. The changes D of the state
are the solution of a unit lower triangular system, and all tokens are computed by matrix products:

    D = T (V - exp(G) K S)     where T = (1 + lower(b K K^T exp(G_t - G_i)))^-1 b
    O = exp(G) Q S + P D       where P = lower or diagonal(Q K^T exp(G_t - G_i))
    S = exp(G_last) S + (exp(G_last - G) K)^T D

The first kernel computes T and P of all chunks at the same time, in float32. The second one computes the chunks of a
request one after another, for some columns of the state of one value head. Its products have three terms of TF32, whose
sum is nearly as exact as float32.

Lower bound for 1000 tokens of 48 value heads and 16 key heads of 128 x 128: 5.1 GFLOP, or 15 GFLOP with the three terms
of each product, 31 us on an H100; and 120 MB of memory traffic, 36 us, most of it for queries, keys, and values, which
both kernels read. The chunks of a request are a chain of three dependent products each, which takes longer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.config import BLOCK_SIZE
from engine.kernels.reference import DELTA_EPSILON
from engine.mixer_config import DeltaConfig
from engine.operations import DeltaRule

CHUNK = BLOCK_SIZE
COLUMNS = 16  # of a program
WARPS = 4
PRECISION = "tf32x3"


@triton.jit
def divide_request(
    query_starts: tl.tensor, context_lengths: tl.tensor, request: tl.tensor, CHUNK: tl.constexpr
) -> tl.tensor:
    """Return the first row of a request, the number of its tokens, of those before the first whole block, and of those
    in whole blocks. Without a whole block, all tokens are before it.
    """
    first = tl.load(query_starts + request).to(tl.int64)
    count = tl.load(query_starts + request + 1) - first
    position = tl.load(context_lengths + request) - count
    before = (CHUNK - position % CHUNK) % CHUNK
    whole = tl.maximum(count - before, 0) // CHUNK * CHUNK
    return first, count, tl.where(whole > 0, before, count), whole


@triton.jit
def log_decay(logit: tl.tensor, rate: tl.tensor, bias: tl.tensor) -> tl.tensor:
    """Return rate * softplus(logit + bias)."""
    raw = logit + bias
    return rate * (tl.maximum(raw, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(raw))))


@triton.jit
def _inverse(lower: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """Return the inverse of 1 + lower, where `lower` is strictly lower triangular, by forward substitution."""
    row = tl.arange(0, CHUNK)
    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    for solved in range(1, CHUNK):
        is_solved = row[:, None] == solved
        coefficients = tl.sum(tl.where(is_solved, lower, 0.0), 0)
        inverse -= tl.where(is_solved, tl.sum(coefficients[:, None] * inverse, 0)[None, :], 0.0)
    return inverse


@triton.jit(do_not_specialize=["tokens"])
def _chunk_kernel(
    mixed: tl.tensor,
    logits: tl.tensor,
    query_starts: tl.tensor,
    context_lengths: tl.tensor,
    rate: tl.tensor,
    time_bias: tl.tensor,
    matrices: tl.tensor,
    factors: tl.tensor,
    tokens: tl.tensor,
    logit_stride: tl.tensor,
    epsilon: tl.tensor,
    scale: tl.tensor,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILED: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Compute the matrices and factors of one chunk, for the value heads of one key head (see `_Chunks`)."""
    first, _, before, whole = divide_request(query_starts, context_lengths, tl.program_id(0), CHUNK)
    start = tl.program_id(1) * CHUNK
    if start >= whole:
        return
    key_head, row, key = tl.program_id(2), tl.arange(0, CHUNK), tl.arange(0, KEYS)
    token = first + before + start + row
    width: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    at, is_key = mixed + token[:, None] * width + key_head * KEY_DIM + key[None, :], (key < KEY_DIM)[None, :]
    query = tl.load(at, mask=is_key, other=0.0)
    own = tl.load(at + KEY_HEADS * KEY_DIM, mask=is_key, other=0.0)
    query_norm = tl.rsqrt(tl.sum(query * query, 1) + epsilon) * scale
    own_norm = tl.rsqrt(tl.sum(own * own, 1) + epsilon)
    own *= own_norm[:, None]
    similar = tl.dot(own, tl.trans(own), input_precision="ieee")
    attended = tl.dot(query * query_norm[:, None], tl.trans(own), input_precision="ieee")
    plane = tokens.to(tl.int64) * VALUE_HEADS
    for number in range(VALUE_HEADS // KEY_HEADS):
        head = key_head + number * KEY_HEADS if TILED else key_head * (VALUE_HEADS // KEY_HEADS) + number
        logit = logits + token * logit_stride + head
        step = tl.sigmoid(tl.load(logit))
        total = tl.cumsum(log_decay(tl.load(logit + VALUE_HEADS), tl.load(rate + head), tl.load(time_bias + head)), 0)
        last = tl.sum(tl.where(row == CHUNK - 1, total, 0.0), 0)
        above = row[:, None] < row[None, :]
        decay = tl.exp(tl.where(above, float("-inf"), total[:, None] - total[None, :]))
        is_below = row[:, None] > row[None, :]
        inverse = _inverse(tl.where(is_below, similar * decay * step[:, None], 0.0), CHUNK)
        entry = token * VALUE_HEADS + head
        matrix = matrices + entry[:, None] * CHUNK + row[None, :]
        tl.store(matrix, inverse * step[None, :])
        tl.store(matrix + plane * CHUNK, attended * decay)
        tl.store(factors + entry, tl.exp(total) * own_norm)
        tl.store(factors + plane + entry, tl.exp(total) * query_norm)
        tl.store(factors + 2 * plane + entry, tl.exp(last - total) * own_norm)
        tl.store(factors + 3 * plane + entry, tl.exp(total))


@triton.jit(do_not_specialize=["tokens", "first_element"])
def _chunked_delta_kernel(
    mixed: tl.tensor,
    matrices: tl.tensor,
    factors: tl.tensor,
    pool: tl.tensor,
    tables: tl.tensor,
    query_starts: tl.tensor,
    context_lengths: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    first_element: tl.tensor,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILED: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    request, head = tl.program_id(0), tl.program_id(1)
    first, _, before, whole = divide_request(query_starts, context_lengths, request, CHUNK)
    if whole == 0:
        return
    column, row = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    # Each warp has some keys: [parts, keys of a part, columns] of the state, and [parts, tokens, keys] of the rows.
    key = tl.arange(0, PARTS)[:, None] * (KEYS // PARTS) + tl.arange(0, KEYS // PARTS)[None, :]
    is_column, is_key = (column < VALUE_DIM)[None, :], (key < KEY_DIM)[:, None, :]
    key_head = head % KEY_HEADS if TILED else head // (VALUE_HEADS // KEY_HEADS)
    element = first_element + (head * KEY_DIM + key[:, :, None]) * VALUE_DIM + column[None, None, :]
    inside = (key < KEY_DIM)[:, :, None] & is_column[None, :, :]
    # The tokens before the first whole block have already written the state.
    source = tl.load(tables + request * table_stride + tl.where(before > 0, 1, 0)).to(tl.int64)
    target = tl.load(tables + request * table_stride + 1).to(tl.int64)
    state = tl.load(pool + source * block_stride + element, mask=inside, other=0.0)
    width: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    plane = tokens.to(tl.int64) * VALUE_HEADS
    for start in range(0, whole, CHUNK):
        token = first + before + start + row
        line, entry = mixed + token * width, token * VALUE_HEADS + head
        at = line[None, :, None] + key_head * KEY_DIM + key[:, None, :]
        query, own = (tl.load(at, mask=is_key, other=0.0), tl.load(at + KEY_HEADS * KEY_DIM, mask=is_key, other=0.0))
        value_at = line[:, None] + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column[None, :]
        value = tl.load(value_at, mask=is_column, other=0.0)
        matrix, factor = matrices + entry[:, None] * CHUNK + row[None, :], factors + entry
        solution, attended = tl.load(matrix), tl.load(matrix + plane * CHUNK)
        read, shown, written = tl.load(factor), tl.load(factor + plane), tl.load(factor + 2 * plane)
        kept = tl.load(factors + 3 * plane + (first + before + start + CHUNK - 1) * VALUE_HEADS + head)
        known = tl.sum(tl.dot(own, state, input_precision=PRECISION), 0) * read[:, None]
        change = tl.dot(solution, value - known, input_precision=PRECISION)
        result = tl.sum(tl.dot(query, state, input_precision=PRECISION), 0) * shown[:, None]
        result += tl.dot(attended, change, input_precision=PRECISION)
        keys = tl.permute(own * written[None, :, None], (0, 2, 1))
        changes = tl.broadcast_to(change[None, :, :], (PARTS, CHUNK, COLUMNS))
        state = state * kept + tl.dot(keys, changes, input_precision=PRECISION)
        tl.store(out + entry[:, None] * VALUE_DIM + column[None, :], result, mask=is_column)
    tl.store(pool + target * block_stride + element, state, mask=inside)


def chunked_delta_rule(
    mixed: Tensor,
    logits: Tensor,
    pool: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    delta: DeltaRule,
    out: Tensor,
) -> None:
    """Write the outputs of all tokens in whole blocks to `out`, and the states after them to their targets.

    The states are read from the targets if the step has tokens before the first whole block, and otherwise from the
    sources. The bits of a block depend only on its tokens and on the state before it.

    - mixed: float32 [tokens, conv_width]: queries, keys, and values after the convolution
    - logits: float32 [tokens, 2 * value_heads]: logits of step sizes, and of decays. Rows may be any distance apart
    - out: float32 [tokens, width]

    See `engine.kernels.short_convolution.short_convolution` for the other arguments.
    """
    shape, tokens, requests = delta.config, len(mixed), len(context_lengths)
    keys, values, heads = shape.key_dim, shape.value_dim, shape.value_heads
    matrices = torch.empty(2, tokens, heads, CHUNK, dtype=torch.float32, device=mixed.device)
    factors = torch.empty(4, tokens, heads, dtype=torch.float32, device=mixed.device)
    constants = {**delta_constants(shape), "CHUNK": CHUNK}
    _chunk_kernel[requests, triton.cdiv(tokens, CHUNK), shape.key_heads](
        mixed, logits, query_starts, context_lengths, delta.rate, delta.time_bias, matrices, factors, tokens,
        logits.stride(0), DELTA_EPSILON, keys**-0.5, **constants, num_warps=WARPS,
    )  # fmt: skip
    _chunked_delta_kernel[requests, heads, triton.cdiv(values, COLUMNS)](
        mixed, matrices, factors, pool, tables, query_starts, context_lengths, out, tokens, pool.stride(0),
        tables.stride(0), (shape.taps - 1) * shape.conv_width, **constants, COLUMNS=COLUMNS,
        PARTS=min(WARPS, constants["KEYS"] // 16), PRECISION=PRECISION, num_warps=WARPS,
    )  # fmt: skip


def delta_constants(shape: DeltaConfig) -> dict[str, int]:
    """Return the constants that all kernels of delta rules have."""
    return {
        "KEY_HEADS": shape.key_heads,
        "VALUE_HEADS": shape.value_heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "TILED": shape.tiled,
        "KEYS": max(16, triton.next_power_of_2(shape.key_dim)),
    }
