"""Multiply packed weights by few tokens: codes are unpacked in registers and multiplied by matrix units.

The product is transposed, so that tokens are the short side of what matrix units multiply: 16 rows of the weight by 8
tokens. Each warp of a program takes its own range of tiles (`quant.cuda.matrix`) of the same rows, and the warps' sums
are added in a fixed order. If there are too few rows to fill a GPU, several programs share the same rows in the same
way (`splits`). From the load of a word to the products of its codes, all values stay in the thread's registers: the
layout puts the codes that one shift extracts where the matrix unit expects its operands.

With one token, matrix units multiply 128 + code, and scales multiply the sums of a unit of columns, in float32. Another
product, of ones, gives the sums of x, by which the excess and the minimums are subtracted. So no weight is rounded.
With more tokens, weights are scaled, in float32, and rounded to bfloat16.
"""

import triton
import triton.language as tl

from quant.kernels.packed_scales import group_scales
from quant.kernels.packed_values import code_pairs, high_base, table_values, words_of
from quant.kernels.result_type import store_tile
from quant.kernels.token_tiles import input_rows, slots_of_tile


@triton.jit
def _token_indices(RUN: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr) -> tl.tensor:
    """Return the index in the program's tile of the token that each thread loads in `_inputs`."""
    unit = tl.arange(0, (32 // RUN) * (TOKENS // 8) * WARPS)[:, None]
    lane = tl.arange(0, 32 * RUN)[None, :]
    return unit // WARPS % (TOKENS // 8) * 8 + lane // (4 * RUN)


@triton.jit
def _inputs(
    of_tokens: tl.tensor,
    known: tl.tensor,
    columns: tl.tensor,
    tile: tl.tensor,
    tiles: tl.tensor,
    RUN: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
    RAGGED: tl.constexpr,
) -> tl.tensor:
    """Load x for the tiles `tile` + warp, [8 instructions, WARPS, 4 threads, 2 pairs, 2, TOKENS / 8, 8 tokens].

    `of_tokens`: the rows of x of the tokens in `_token_indices`, of which those in `known` exist.
    """
    PIECES: tl.constexpr = 32 // RUN
    unit = tl.arange(0, PIECES * (TOKENS // 8) * WARPS)[:, None]
    lane = tl.arange(0, 32 * RUN)[None, :]
    own_tile = tile + unit % WARPS
    column = own_tile * 128 + unit // (WARPS * (TOKENS // 8)) * (4 * RUN) + lane % (4 * RUN)
    inside = known & (column < columns if RAGGED else own_tile < tiles)
    loaded = tl.load(of_tokens + tl.max_contiguous(column, [1, RUN]), mask=inside, other=0.0)
    parts = loaded.reshape(PIECES, TOKENS // 8, WARPS, 8, 4, RUN // 4, 2, 2).permute(0, 5, 2, 4, 6, 7, 1, 3)
    return parts.reshape(8, WARPS, 4, 2, 2, TOKENS // 8, 8)


@triton.jit
def _left(values: tl.tensor, ROW_TILES: tl.constexpr, WARPS: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Order bfloat16 values [n, 32 threads, 32] as left operand of products, [units * WARPS, rows, UNIT]."""
    UNITS: tl.constexpr = 128 // UNIT
    parts = values.reshape(ROW_TILES, WARPS, 8, 4, UNITS, 8 // UNITS, 2, 2).permute(4, 1, 0, 2, 5, 3, 6, 7)
    return parts.reshape(UNITS * WARPS, 8 * ROW_TILES, UNIT)


@triton.jit
def _hidden(values: tl.tensor) -> tl.tensor:
    """Return values [n, threads, units] as sums of one value each, [n, threads, units, 1].

    Triton chooses the layout of operands by the narrowest type that they come from, and looks no further back than a
    sum.
    """
    return tl.sum(values[:, :, :, None], 3)[:, :, :, None]


@triton.jit
def _right(
    inputs: tl.tensor, WARPS: tl.constexpr, TOKENS: tl.constexpr, UNIT: tl.constexpr, ADJACENT: tl.constexpr
) -> tl.tensor:
    """Order x (see `_inputs`) as right operand, [units * WARPS, UNIT, TOKENS].

    x stays in its registers if a thread has four adjacent columns of an instruction (ADJACENT), where the left operand
    is joined, or else two pairs.
    """
    UNITS: tl.constexpr = 128 // UNIT
    parts = inputs.reshape(UNITS, 8 // UNITS, WARPS, 4, 2, 2, TOKENS)
    parts = parts.permute(0, 2, 1, 3, 4, 5, 6) if ADJACENT else parts.permute(0, 2, 1, 4, 3, 5, 6)
    return parts.reshape(UNITS * WARPS, UNIT, TOKENS)


@triton.jit
def _sums_of_inputs(inputs: tl.tensor, WARPS: tl.constexpr, TOKENS: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Return sums of x over the columns of a unit, [WARPS, 8, 4, units, TOKENS / 8, 2], in all threads of a token."""
    UNITS: tl.constexpr = 128 // UNIT
    ones = tl.full((UNITS * WARPS, 16, UNIT), 1.0, tl.float32).to(tl.bfloat16)
    zeros = tl.zeros((UNITS * WARPS, 16, TOKENS), tl.float32)
    sums = tl.dot(ones, _right(inputs, WARPS, TOKENS, UNIT, False), zeros)
    sums, _ = tl.split(sums.reshape(UNITS, WARPS, 2, 8, TOKENS // 8, 4, 2).permute(1, 3, 5, 0, 4, 6, 2))
    return sums


# Without do_not_specialize, Triton would compile separate kernels for the value 1 and for multiples of 16.
@triton.jit(
    do_not_specialize=[
        "tokens", "rows", "tiles", "groups", "chunks", "blocks", "base", "out_stride", "split_stride", "splits", "add",
        "rounded", "sharing", "out",
    ]
)  # fmt: skip
def _product_kernel(
    low: tl.tensor,
    high: tl.tensor,
    scales: tl.tensor,
    sub_scales: tl.tensor,
    zeros: tl.tensor,
    numbers: tl.tensor,
    scale_table: tl.tensor,
    scale_offset: tl.tensor,
    x: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    experts: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    sharing: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    tiles: tl.tensor,
    groups: tl.tensor,
    chunks: tl.tensor,
    blocks: tl.tensor,
    base: tl.tensor,
    out_stride: tl.tensor,
    split_stride: tl.tensor,
    splits: tl.tensor,
    add: tl.tensor,
    rounded: tl.tensor,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    RATIO: tl.constexpr,
    ZERO: tl.constexpr,
    MINIMUMS: tl.constexpr,
    SUB_SCALE_ZERO: tl.constexpr,
    NIBBLES: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
    RAGGED: tl.constexpr,
    ROW_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
    SCALES_SUMS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    UNITS: tl.constexpr = 128 // UNIT
    UNITS_TOTAL: tl.constexpr = ROW_TILES * WARPS
    RUN: tl.constexpr = 4 if UNIT == 16 else 8
    TABLE: tl.constexpr = numbers is not None
    BYTES: tl.constexpr = HIGH == 4  # codes of 8 bits
    EXCESS: tl.constexpr = 0 if TABLE else 2176 if BYTES else 128
    expert = 0
    if experts is not None:
        expert = tl.load(experts + tl.program_id(1))
        if expert < 0:
            return
    first = tl.program_id(0) * ROW_TILES
    unit = tl.arange(0, UNITS_TOTAL)[:, None]
    row_tile = tl.minimum(first + unit // WARPS, (rows + 7) // 8 - 1).to(tl.int64) + expert * (rows // 8)
    token = slots_of_tile(experts, slots, tl.program_id(1), _token_indices(RUN, WARPS, TOKENS), tokens, TOKENS)
    of_tokens = x + input_rows(experts, token, sharing).to(tl.int64) * columns
    total = tl.zeros((ROW_TILES, WARPS, 8, 4, UNITS, TOKENS // 8, 2), tl.float32)
    sums = tl.zeros((WARPS, 8 * ROW_TILES, TOKENS), tl.float32)
    steps = tl.cdiv(tiles, WARPS * splits)
    low_rows = low + (row_tile * tiles * (32 * LOW) + tl.arange(0, 32 * LOW)[None, :])
    high_rows = low_rows
    if HIGH:
        high_rows = high + (row_tile * tiles * (32 * HIGH) + tl.arange(0, 32 * HIGH)[None, :])
    for step in tl.range(steps, num_stages=STAGES):
        tile = (tl.program_id(2) * steps + step) * WARPS
        own_tile = tl.minimum(tile + unit % WARPS, tiles - 1)
        lows = tl.load(low_rows + own_tile * (32 * LOW)).reshape(UNITS_TOTAL, 32, LOW)
        lows = words_of(lows, LOW)
        highs = lows
        if HIGH:
            highs = tl.load(high_rows + own_tile * (32 * HIGH)).reshape(UNITS_TOTAL, 32, HIGH)
            highs = words_of(highs, HIGH)
        s, b = group_scales(
            scales, sub_scales, zeros, scale_table, scale_offset, row_tile, unit * 0, own_tile * 128, rows, groups,
            chunks, blocks, 32, UNITS, 0, GROUP, UNIT, RATIO, ZERO, MINIMUMS, SUB_SCALE_ZERO, NIBBLES, NESTED_BLOCK,
        )  # fmt: skip
        inputs = _inputs(of_tokens, token < tokens, columns, tile, tiles, RUN, WARPS, TOKENS, RAGGED)
        if TABLE:
            values = table_values(lows, numbers, LOW)
        else:
            values = code_pairs(lows, highs, base, LOW, 0 if BYTES else HIGH).to(tl.bfloat16, bitcast=True)
        more = values
        if BYTES:
            more = code_pairs(highs, highs, high_base(base), 4, 0).to(tl.bfloat16, bitcast=True)
        if SCALES_SUMS:
            right = _right(inputs, WARPS, TOKENS, UNIT, True)
            product = tl.zeros((UNITS * WARPS, 8 * ROW_TILES, TOKENS), tl.float32)
            product = tl.dot(_left(values, ROW_TILES, WARPS, UNIT), right, product)
            if BYTES:
                product = tl.dot(_left(more, ROW_TILES, WARPS, UNIT), right, product)
            product = product.reshape(UNITS, WARPS, ROW_TILES, 8, TOKENS // 8, 4, 2).permute(2, 1, 3, 5, 0, 4, 6)
            own_s = s.reshape(ROW_TILES, WARPS, 8, 4, UNITS, 1, 1)
            total += own_s * product
            if not TABLE:
                excess = (b + EXCESS * s).reshape(ROW_TILES, WARPS, 8, 4, UNITS, 1, 1)
                total -= excess * _sums_of_inputs(inputs, WARPS, TOKENS, UNIT)[None]
        else:
            floats = values.to(tl.float32)
            if BYTES:
                floats += more.to(tl.float32)
            floats = floats.reshape(UNITS_TOTAL, 32, UNITS, 32 // UNITS)
            weights = (_hidden(s) * floats - _hidden(b + EXCESS * s)).to(tl.bfloat16)
            left = _left(weights.reshape(UNITS_TOTAL, 32, 32), ROW_TILES, WARPS, 128)
            right = _right(inputs, WARPS, TOKENS, 128, True)
            sums = tl.dot(left, right, sums)
    if SCALES_SUMS:
        result = tl.sum(tl.sum(total, 4), 1).permute(0, 1, 3, 2, 4).reshape(8 * ROW_TILES, TOKENS)
    else:
        result = tl.sum(sums, 0)
    to_row = first * 8 + tl.arange(0, 8 * ROW_TILES)[:, None]
    store_tile(out, result, bias, to_row, rows, experts, slots, tokens, out_stride, split_stride, add, rounded, TOKENS)
