"""Multiply packed weights by many tokens: a program unpacks tiles of weights once for up to 128 tokens.

Products of few tokens (`packed_matmul`) read x once for every 16 rows, and unpack weights again for every 16 tokens.
Here a program has 64 or 128 rows. Weights are scaled in float32 and rounded to bfloat16.
"""

import triton
import triton.language as tl

from quant.kernels.packed_values import in_column_order, scaled, unpacked_tiles
from quant.kernels.result_type import store_tile
from quant.kernels.token_tiles import input_rows, slots_of_tile


# Without do_not_specialize, Triton would compile separate kernels for the value 1 and for multiples of 16.
@triton.jit(
    do_not_specialize=[
        "tokens", "rows", "tiles", "groups", "chunks", "blocks", "out_stride", "split_stride", "splits", "add",
        "rounded", "sharing", "out",
    ]
)  # fmt: skip
def _batch_kernel(
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
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    expert = 0
    if experts is not None:
        expert = tl.load(experts + tl.program_id(1))
        if expert < 0:
            return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    own_row = tl.minimum(row, rows - 1).to(tl.int64) + expert * rows
    token = slots_of_tile(experts, slots, tl.program_id(1), tl.arange(0, TOKENS)[:, None], tokens, TOKENS)
    column = tl.arange(0, 128)[None, :]
    of_tokens = x + input_rows(experts, tl.minimum(token, tokens - 1), sharing).to(tl.int64) * columns
    steps = tl.cdiv(tiles, splits)
    first = tl.program_id(2) * steps
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for tile in tl.range(first, tl.minimum(first + steps, tiles), num_stages=STAGES):
        at = of_tokens + (tile * 128 + column)
        inputs = tl.load(at, mask=tile * 128 + column < columns, other=0.0) if RAGGED else tl.load(at)
        v, s, b = unpacked_tiles(
            low, high, scales, sub_scales, zeros, numbers, scale_table, scale_offset, own_row, tile, rows, tiles,
            groups, chunks, blocks, GROUP, UNIT, LOW, HIGH, RATIO, ZERO, MINIMUMS, SUB_SCALE_ZERO, NIBBLES,
            NESTED_BLOCK,
        )  # fmt: skip
        weights = in_column_order(scaled(v, s, b).to(tl.bfloat16), UNIT)
        sums = tl.dot(weights, tl.trans(inputs), sums)
    store_tile(out, sums, bias, row, rows, experts, slots, tokens, out_stride, split_stride, add, rounded, TOKENS)
