"""Softmax over scores that come piece by piece, by a running maximum (arXiv:2205.14135).

Pieces of kernels, to be called by kernels. Exponents are those of 2: scores are multiplied by log2(e) before."""

import triton
import triton.language as tl


@triton.jit
def base_of(peak: tl.tensor) -> tl.tensor:
    """What exponents are taken relative to. A row that has seen nothing yet has no peak."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def weighed(scores: tl.tensor, factor: tl.tensor, peak: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Of scores [rows, piece], each times `factor`, and of peak and total so far [rows]: weights [rows, piece], by what
    to multiply that which was weighed before [rows], and peak and total now.

    Of a row whose scores are all -inf nothing changes.
    """
    top = tl.maximum(peak, tl.max(scores, 1) * factor)
    base = base_of(top)
    weights = tl.exp2(scores * factor - base[:, None])
    kept = tl.exp2(peak - base)
    return weights, kept, top, tl.fma(total, kept, tl.sum(weights, 1))


@triton.jit
def parts_of(
    start: tl.tensor, end: tl.tensor, LENGTH: tl.constexpr, FIXED: tl.constexpr, PIECE: tl.constexpr
) -> tl.tensor:
    """Of a tile that sees its context from `start`, where a piece begins, to `end`: where the first part begins, how
    long parts are, and how many there are."""
    origin = start
    length = LENGTH
    if FIXED:
        origin = start // LENGTH * LENGTH
    else:
        length = tl.maximum(tl.cdiv(tl.cdiv(end - start, tl.num_programs(2)), PIECE) * PIECE, LENGTH)
    return origin, length, tl.cdiv(end - origin, length)


@triton.jit
def loaded(pointers: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Keys or values as they are multiplied. An e4m3 becomes a float16, but for the factor E4M3_SCALE."""
    stored = tl.load(pointers, mask=mask, other=0)
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.uint16)
        stored = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return stored


@triton.jit
def attended(
    q: tl.tensor,  # [ROWS, COLUMNS]
    sight: tl.tensor,  # [ROWS]: the last position that each row sees
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    block_stride: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    seen_from: tl.tensor,  # by any row
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,  # there may be rows that do not see everything
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Peak, total and mixture of each row, once it has attended positions low .. high as well."""
    column = tl.arange(0, COLUMNS)
    for at in range(low, high, PIECE):
        position = at + tl.arange(0, PIECE)
        valid = (position >= seen_from) & (position < high)
        block = tl.load(table + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        place = (block * block_stride + position % BLOCK_SIZE * HEAD_DIM)[:, None] + column[None, :]
        there = valid[:, None] & (column < HEAD_DIM)[None, :]
        scores = tl.dot(q, tl.trans(loaded(keys + place, there)))
        if CAPPED:  # cap * tanh(x), and tanh(x) = 1 - 2 / (1 + exp(2 * x))
            scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores * scale))
        if MASKED:
            seen = valid[None, :] & (position[None, :] <= sight[:, None])
            if WINDOWED:
                seen &= position[None, :] > sight[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        weights, kept, peak, total = weighed(scores, 1.0 if CAPPED else scale, peak, total)
        v = loaded(values + place, there)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * kept[:, None])
    return peak, total, mixed


@triton.jit
def merged(
    peak: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    next_peak: tl.tensor,
    next_total: tl.tensor,
    next_mixed: tl.tensor,
) -> tl.tensor:
    """Two parts as one. With one of which a row has seen nothing, the other's bits stay."""
    top = tl.maximum(peak, next_peak)
    kept, added = tl.exp2(peak - base_of(top)), tl.exp2(next_peak - base_of(top))
    # Spelled out, so that both kernels round in the same places.
    total = tl.fma(next_total, added, total * kept)
    mixed = tl.fma(next_mixed, tl.broadcast_to(added[:, None], mixed.shape), mixed * kept[:, None])
    return top, total, mixed


@triton.jit
def output(peak: tl.tensor, total: tl.tensor, mixed: tl.tensor, sink: tl.tensor, value_scale: tl.tensor) -> tl.tensor:
    """Of each row; `sink` takes part as a score does, -inf where there is none. A row that has seen nothing is 0."""
    top = base_of(tl.maximum(peak, sink))
    kept = tl.exp2(peak - top)
    total = total * kept + tl.exp2(sink - top)
    share = tl.where(total > 0, kept * value_scale / total, 0.0)
    return mixed * share[:, None]
