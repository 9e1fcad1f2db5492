"""Softmax over scores that are processed in pieces, with a running maximum (arXiv:2205.14135).

These functions are inlined into kernels. Exponentials are base 2: scores are multiplied by log2(e) first. The state of
a row is its peak (largest score), its total (sum of weights), and acc (weighted sum of values).
"""

import triton
import triton.language as tl


@triton.jit
def exponent_base(peak: tl.tensor) -> tl.tensor:
    """Return the value to subtract from scores before exp2: the peak, or 0 for a row that has seen no position yet."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def softmax_step(scores: tl.tensor, factor: tl.tensor, peak: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Add one piece of scores to a running softmax.

    `scores` [rows, piece] are multiplied by `factor` first. `peak` and `total` [rows] are the state before this piece.
    Returns the weights [rows, piece], the factor for the previously accumulated values [rows], and the new peak and
    total. A row whose scores are all -inf is unchanged.
    """
    top = tl.maximum(peak, tl.max(scores, 1) * factor)
    base = exponent_base(top)
    weights = tl.exp2(scores * factor - base[:, None])
    kept = tl.exp2(peak - base)
    return weights, kept, top, tl.fma(total, kept, tl.sum(weights, 1))


@triton.jit
def context_parts(
    start: tl.tensor, end: tl.tensor, LENGTH: tl.constexpr, FIXED: tl.constexpr, PIECE: tl.constexpr
) -> tl.tensor:
    """Divide the context of a tile, from `start` (a multiple of the piece) to `end`, into parts.

    Returns the start of the first part, the length of a part, and the number of parts.
    """
    origin = start
    length = LENGTH
    if FIXED:
        origin = start // LENGTH * LENGTH
    else:
        length = tl.maximum(tl.cdiv(tl.cdiv(end - start, tl.num_programs(2)), PIECE) * PIECE, LENGTH)
    return origin, length, tl.cdiv(end - origin, length)


@triton.jit
def load_kv(pointers: tl.tensor, mask: tl.tensor, CONVERTS: tl.constexpr) -> tl.tensor:
    """Load keys or values. e4m3 is widened to float16.

    CONVERTS: whether the GPU has an instruction for this. Without it, values are too small by the factor E4M3_SCALE.
    """
    stored = tl.load(pointers, mask=mask, other=0)
    if stored.dtype == tl.uint8 and CONVERTS:
        stored = stored.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif stored.dtype == tl.uint8:
        bits = stored.to(tl.uint16)
        stored = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return stored


@triton.jit
def attend_range(
    q: tl.tensor,  # [ROWS, COLUMNS]
    last_seen: tl.tensor,  # [ROWS]: the last position visible to each row
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    block_stride: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    seen_from: tl.tensor,  # first position visible to any row
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,  # whether some rows may not see all positions; otherwise, these are whole pieces
    CONVERTS: tl.constexpr,  # see `load_kv`
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Attend over positions low .. high. Returns the updated peak, total, and acc of each row."""
    column = tl.arange(0, COLUMNS)
    for at in range(low, high, PIECE):
        position = at + tl.arange(0, PIECE)
        unsigned = position.to(tl.uint32)  # division is then a shift
        valid = tl.full((PIECE,), True, tl.int1)
        if MASKED:
            valid = position < high
            if WINDOWED:
                valid &= position >= seen_from
        block = tl.load(table + unsigned // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        offset = (block * block_stride + unsigned % BLOCK_SIZE * HEAD_DIM)[:, None] + column[None, :]
        inside = valid[:, None] & (column < HEAD_DIM)[None, :]
        scores = tl.dot(q, tl.trans(load_kv(keys + offset, inside, CONVERTS)))
        if CAPPED:  # the soft cap: cap * tanh(x), where tanh(x) = 1 - 2 / (1 + exp(2 * x))
            scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores * scale))
        if MASKED:
            seen = valid[None, :] & (position[None, :] <= last_seen[:, None])
            if WINDOWED:
                seen &= position[None, :] > last_seen[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        weights, kept, peak, total = softmax_step(scores, 1.0 if CAPPED else scale, peak, total)
        v = load_kv(values + offset, inside, CONVERTS)
        acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None])
    return peak, total, acc


@triton.jit
def attend_part(
    q: tl.tensor,  # [ROWS, COLUMNS]
    position: tl.tensor,  # of the first token
    token: tl.tensor,  # [ROWS]: counted from the first
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    block_stride: tl.tensor,
    start: tl.tensor,  # `start` to `length`: see `context_parts`
    end: tl.tensor,
    origin: tl.tensor,
    length: tl.tensor,
    part: tl.tensor,
    seen_from: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    MANY: tl.constexpr,  # whether most pieces are visible to all rows
    CONVERTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Attend over one part of the context. Returns the peak, total, and acc of each row."""
    low = tl.maximum(start, origin + part * length)
    high = tl.minimum(end, origin + (part + 1) * length)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    if MANY and not WINDOWED:
        seen_by_all = low + tl.maximum(tl.minimum(position + 1, high) - low, 0) // PIECE * PIECE
        peak, total, acc = attend_range(
            q, position + token, keys, values, table, block_stride, low, seen_by_all, seen_from, window, scale, cap,
            peak, total, acc, CAPPED, WINDOWED, False, CONVERTS, HEAD_DIM, BLOCK_SIZE, PIECE, COLUMNS,
        )  # fmt: skip
        low = seen_by_all
    return attend_range(
        q, position + token, keys, values, table, block_stride, low, high, seen_from, window, scale, cap, peak, total,
        acc, CAPPED, WINDOWED, True, CONVERTS, HEAD_DIM, BLOCK_SIZE, PIECE, COLUMNS,
    )  # fmt: skip


@triton.jit
def merge_parts(
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    next_peak: tl.tensor,
    next_total: tl.tensor,
    next_acc: tl.tensor,
) -> tl.tensor:
    """Merge the states of two parts. If a row has seen no position in one part, it keeps the bits of the other."""
    top = tl.maximum(peak, next_peak)
    kept, added = tl.exp2(peak - exponent_base(top)), tl.exp2(next_peak - exponent_base(top))
    # An explicit fma makes both kernels round at the same points.
    total = tl.fma(next_total, added, total * kept)
    acc = tl.fma(next_acc, tl.broadcast_to(added[:, None], acc.shape), acc * kept[:, None])
    return top, total, acc


@triton.jit
def normalize_output(
    peak: tl.tensor, total: tl.tensor, acc: tl.tensor, sink: tl.tensor, value_scale: tl.tensor
) -> tl.tensor:
    """Return the attention output of each row; 0 for a row that has seen no position.

    `sink` takes part in the softmax like a score; -inf means no sink.
    """
    top = exponent_base(tl.maximum(peak, sink))
    kept = tl.exp2(peak - top)
    total = total * kept + tl.exp2(sink - top)
    share = tl.where(total > 0, kept * value_scale / total, 0.0)
    return acc * share[:, None]
