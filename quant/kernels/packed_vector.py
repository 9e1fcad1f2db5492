"""Multiply packed weights in groups of 16 or 32 columns by one token.

Matrix units multiply 16 rows by 8 tokens. With one token, the eight columns of the result are eight groups instead: in
the right operand, column n has the x of group n and zeros elsewhere. So one chain of products sums eight groups, and
scales multiply the sums of groups, of which a thread has four for eight groups. Weights are never rounded.

With GATED, the first half of the rows is the gate of an MLP and the second half is up. A program has eight rows of
each, and writes the gated values.

A product can do the work of the norms before and after it. If x is a row that is not yet divided by its root mean
square (`squares`), the sums are divided by it. If a norm reads the result next (`slope`), the result times the weight
of the norm is also written, and each program writes the sum of its squares, so that the next product can do the rest.
"""

import triton
import triton.language as tl

from quant.kernels.early_start import prefetch, wait_for_inputs
from quant.kernels.gating import gated_values
from quant.kernels.packed_scales import group_scales, prefetch_scales
from quant.kernels.packed_values import code_pairs, high_base, table_values, words_of


@triton.jit
def _left(values: tl.tensor, PARTS: tl.constexpr, WARPS: tl.constexpr) -> tl.tensor:
    """Order bfloat16 values [PARTS * 2 * WARPS, 32 threads, 32] as left operand, [WARPS, 16, PARTS * 128]."""
    parts = values.reshape(PARTS, 2, WARPS, 8, 4, 8, 2, 2).permute(2, 1, 3, 0, 5, 4, 6, 7)
    return parts.reshape(WARPS, 16, PARTS * 128)


@triton.jit
def _halves(pairs: tl.tensor) -> tl.tensor:
    """Return both bfloat16 numbers of int32 pairs, along a new last axis."""
    return tl.join((pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def _sums_of_inputs(pairs: tl.tensor, WARPS: tl.constexpr, RUN: tl.constexpr) -> tl.tensor:
    """Return sums of x over each group, [WARPS, 8 rows, 4 threads, 2 groups], the same in all rows."""
    GROUP: tl.constexpr = 4 * RUN
    inputs = _halves(pairs).reshape(WARPS, 8, 4, RUN // 4, 2, 2).permute(0, 3, 2, 4, 5, 1).reshape(WARPS, GROUP, 8)
    ones = tl.full((WARPS, 16, GROUP), 1.0, tl.float32).to(tl.bfloat16)
    sums = tl.dot(ones, inputs, tl.zeros((WARPS, 16, 8), tl.float32))
    sums, _ = tl.split(sums.reshape(WARPS, 2, 8, 4, 2).permute(0, 2, 3, 4, 1))
    return sums


@triton.jit
def _own_tile(
    unit: tl.tensor,
    block: tl.tensor,
    blocks_of_groups: tl.tensor,
    tiles: tl.tensor,
    PARTS: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tensor:
    """Return the tile of each unit in the step that starts at `block`."""
    own_block = tl.minimum(block + unit % WARPS, blocks_of_groups - 1)
    return tl.minimum(own_block * PARTS + unit // (2 * WARPS), tiles - 1)


@triton.jit
def vector_sums(
    low: tl.tensor,
    high: tl.tensor,
    scales: tl.tensor,
    sub_scales: tl.tensor,
    zeros: tl.tensor,
    numbers: tl.tensor,
    scale_table: tl.tensor,
    scale_offset: tl.tensor,
    x: tl.tensor,
    squares: tl.tensor,
    square_count: tl.tensor,
    epsilon: tl.tensor,
    first: tl.tensor,
    other: tl.tensor,
    expert: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    tiles: tl.tensor,
    groups: tl.tensor,
    chunks: tl.tensor,
    blocks: tl.tensor,
    base: tl.tensor,
    splits: tl.tensor,
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
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    SQUARES: tl.constexpr,
    EARLY: tl.constexpr,
) -> tl.tensor:
    """Return the products of x and two tiles of eight rows, float32 [2, 8].

    `first` is the first tile, and `other` the distance to the second one. With EARLY, waits for x (see `early_start`),
    and prefetches the weights of the first step before.
    """
    tl.static_assert(GROUP == UNIT and GROUP <= 32)
    RUN: tl.constexpr = GROUP // 4
    PARTS: tl.constexpr = GROUP // 16  # tiles of eight groups
    BYTES: tl.constexpr = HIGH == 4
    TABLE: tl.constexpr = numbers is not None
    EXCESS: tl.constexpr = 0 if TABLE else 2176 if BYTES else 128
    last = (rows + 7) // 8 - 1
    unit = tl.arange(0, PARTS * 2 * WARPS)[:, None]
    scale_unit = tl.arange(0, 2 * WARPS)[:, None]
    row_tile = tl.minimum(first + unit // WARPS % 2 * other, last).to(tl.int64) + expert * (rows // 8)
    scale_row_tile = tl.minimum(first + scale_unit // WARPS * other, last).to(tl.int64) + expert * (rows // 8)
    warp = tl.arange(0, WARPS)[:, None]
    pair = tl.arange(0, 16 * RUN)[None, :]
    x_pairs = x.to(tl.pointer_type(tl.int32), bitcast=True)
    own_group = tl.arange(0, 8)[None, :, None, None, None]
    group = tl.arange(0, 8)[None, None, None, :, None]
    total = tl.zeros((2, WARPS, 8, 4, 2), tl.float32)
    blocks_of_groups = tl.cdiv(tiles, PARTS)
    steps = tl.cdiv(blocks_of_groups, WARPS * splits)
    low_rows = low + (row_tile * tiles * (32 * LOW) + tl.arange(0, 32 * LOW)[None, :])
    high_rows = low_rows
    if HIGH:
        high_rows = high + (row_tile * tiles * (32 * HIGH) + tl.arange(0, 32 * HIGH)[None, :])
    if EARLY:
        block = tl.program_id(1) * steps * WARPS
        tile = row_tile * tiles + _own_tile(unit, block, blocks_of_groups, tiles, PARTS, WARPS)
        prefetch(low + tile * (32 * LOW) + tl.arange(0, LOW)[None, :] * 32)
        if HIGH:
            prefetch(high + tile * (32 * HIGH) + tl.arange(0, HIGH)[None, :] * 32)
        scale_column = (block + scale_unit % WARPS) * (8 * GROUP)
        prefetch_scales(
            scales, sub_scales, zeros, scale_row_tile, scale_column, chunks, blocks, GROUP, RATIO, MINIMUMS, NIBBLES,
            NESTED_BLOCK,
        )  # fmt: skip
        wait_for_inputs(EARLY)
    if squares is not None:  # loaded early, because nothing else waits for it
        number = tl.arange(0, SQUARES)
        row_squares = tl.load(squares + number, mask=number < square_count, other=0.0)
    for step in tl.range(steps, num_stages=STAGES):
        block = (tl.program_id(1) * steps + step) * WARPS
        own_tile = _own_tile(unit, block, blocks_of_groups, tiles, PARTS, WARPS)
        lows = tl.load(low_rows + own_tile * (32 * LOW))
        lows = words_of(lows.reshape(PARTS * 2 * WARPS, 32, LOW), LOW)
        highs = lows
        if HIGH:
            highs = tl.load(high_rows + own_tile * (32 * HIGH))
            highs = words_of(highs.reshape(PARTS * 2 * WARPS, 32, HIGH), HIGH)
        scale_column = tl.minimum(block + scale_unit % WARPS, blocks_of_groups - 1) * (8 * GROUP)
        s, b = group_scales(
            scales, sub_scales, zeros, scale_table, scale_offset, scale_row_tile, scale_unit * 0, scale_column, rows,
            groups, chunks, blocks, 32, 2, 2 * UNIT, GROUP, UNIT, RATIO, ZERO, MINIMUMS, SUB_SCALE_ZERO, NIBBLES,
            NESTED_BLOCK,
        )  # fmt: skip
        at = (block + warp) * (16 * RUN) + pair
        # two numbers at a time: single ones would be selected singly
        inputs = tl.load(x_pairs + at, mask=at < columns // 2, other=0)
        own = inputs.reshape(WARPS, 8, 4, 1, RUN // 2)
        right = _halves(tl.where(own_group == group, own, 0)).reshape(WARPS, 8, 4, 8, RUN // 4, 2, 2)
        right = right.permute(0, 3, 4, 2, 5, 6, 1).reshape(WARPS, 8 * GROUP, 8)
        if TABLE:
            values = table_values(lows, numbers, LOW)
        else:
            values = code_pairs(lows, highs, base, LOW, 0 if BYTES else HIGH).to(tl.bfloat16, bitcast=True)
        product = tl.dot(_left(values, PARTS, WARPS), right, tl.zeros((WARPS, 16, 8), tl.float32))
        if BYTES:
            values = code_pairs(highs, highs, high_base(base), 4, 0).to(tl.bfloat16, bitcast=True)
            product = tl.dot(_left(values, PARTS, WARPS), right, product)
        total += s.reshape(2, WARPS, 8, 4, 2) * product.reshape(WARPS, 2, 8, 4, 2).permute(1, 0, 2, 3, 4)
        if not TABLE:
            excess = (b + EXCESS * s).reshape(2, WARPS, 8, 4, 2)
            total -= excess * _sums_of_inputs(inputs, WARPS, RUN)[None]
    result = tl.sum(tl.sum(tl.sum(total, 4), 3), 1)
    if squares is not None:
        result *= tl.rsqrt(tl.sum(row_squares) / columns + epsilon)
    return result


@triton.jit(
    do_not_specialize=[
        "rows", "columns", "tiles", "groups", "chunks", "blocks", "base", "split_stride", "splits", "add",
        "sharing", "out_stride", "square_count",
    ]
)  # fmt: skip
def _vector_kernel(
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
    squares: tl.tensor,
    slope: tl.tensor,
    next_row: tl.tensor,
    next_squares: tl.tensor,
    sharing: tl.tensor,
    square_count: tl.tensor,
    epsilon: tl.tensor,
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
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    SQUARES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    expert = 0
    if experts is not None:  # the third number of a program is its slot
        wait_for_inputs(EARLY)
        slot = tl.program_id(2)
        expert = tl.load(experts + slot)
        x += (slot // sharing).to(tl.int64) * columns
        out += slot.to(tl.int64) * out_stride
    # the first of the program's two tiles of rows, and the distance to the second
    first = tl.program_id(0) if GATED else tl.program_id(0) * 2
    other = rows // 16 if GATED else 1
    result = vector_sums(
        low, high, scales, sub_scales, zeros, numbers, scale_table, scale_offset, x, squares, square_count, epsilon,
        first, other, expert, rows, columns, tiles, groups, chunks, blocks, base, splits, GROUP, UNIT, LOW, HIGH,
        RATIO, ZERO, MINIMUMS, SUB_SCALE_ZERO, NIBBLES, NESTED_BLOCK, WARPS, STAGES, SQUARES,
        EARLY and experts is None,
    )  # fmt: skip
    if GATED:
        gate, up = tl.split(tl.trans(result))
        own_row = tl.program_id(0) * 8 + tl.arange(0, 8)
        tl.store(out + own_row, gated_values(gate, up, GATE).to(out.dtype.element_ty), mask=own_row < rows // 2)
        return
    row = tl.program_id(0) * 16 + tl.arange(0, 2)[:, None] * 8 + tl.arange(0, 8)[None, :]
    if bias is not None:
        result += tl.load(bias + row, mask=row < rows, other=0.0)
    out_at = out + tl.program_id(1).to(tl.int64) * split_stride + row
    if add:
        result += tl.load(out_at, mask=row < rows, other=0.0)
    tl.store(out_at, result.to(out.dtype.element_ty), mask=row < rows)
    if slope is not None:
        scaled = result * tl.load(slope + row, mask=row < rows, other=0.0)
        tl.store(next_row + row, scaled.to(next_row.dtype.element_ty), mask=row < rows)
        kept = tl.where(row < rows, result, 0.0)
        tl.store(next_squares + tl.program_id(0), tl.sum(tl.sum(kept * kept, 1)))
