"""Multiply packed weights by few tokens: weights are unpacked in registers and multiplied by matrix units.

The product is transposed, so that tokens are the short side of what matrix units multiply: 16 rows of the weight by 8
tokens. Each warp of a program takes its own range of tiles (`quant.cuda.matrix`) of the same rows, and the warps' sums
are added in a fixed order. If there are too few rows to fill a GPU, several programs share the same rows in the same
way (`splits`). From the load of a word to the products of its codes, all values stay in the thread's registers: the
layout puts the codes that one shift extracts where the matrix unit expects its operands.

A code is converted to a float by writing it into the upper mantissa bits of 1.0. The result is 1 + code / 2 ** n, and
the excess is included in the group's offset. One multiplication and addition in float32 then gives the weight, which is
rounded to bfloat16.

The lower bound is the memory traffic of the weights. At 3.35 TB/s and 1.75 GHz, each of 132
multiprocessors reads 25.8 weights of 4.5 bits per clock. In the time of 32 weights, its four schedulers can issue 5.0
instructions, or 6.2 at 80 % of the bandwidth. The table has the instructions of the loop for 32 weights, by the machine
code for sm_90 (Triton 3.6 and 3.7 alike; 8 tokens except in the last columns):

    rows of a program, tokens       16      32      32, 16    32, 32
    Q4_K                           4.6     4.2      4.6       5.1
    Q6_K, of 6.6 bits              6.1     5.9      6.2       7.0
    Q4_0, int4 by 128              4.0     3.6, 3.8
    Q8_0, of 8.5 bits              4.6     4.2
    Q2_K, of 2.6 bits              5.0     4.7
    Q3_K, Q5_K, of 3.4 and 5.5     6.4     6.1
    tables                         7.2; 8.6 and barriers with Triton 3.6: a look-up for each weight

So one token is bound by memory with codes of 4, 6, and 8 bits, and by both memory and instructions with Q5_K. It is
bound by instructions with Q2_K and Q3_K, at 60 % of the bandwidth, and with tables, at 65 to 70 %. 32 tokens take 1.1
times the instructions of one. Each thread loads 16 bytes of words at a time. Except for tables, the loop has neither
barriers nor shared memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from quant.cuda.matrix import TILE_FRAGMENTS, TILE_ROWS, WORDS, PackedForm, PackedMatrix
from quant.kernels.packed_values import group_scales, words_of
from quant.kernels.tiles import ProductTile

ONE = tl.constexpr(0x3F800000)  # the bits of 1.0


@triton.jit
def _code_bits(
    words: tl.tensor, POSITION: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr, AT: tl.constexpr
) -> tl.tensor:
    """Extract the codes at one position of int32 words: the low BITS of STEP bits, moved up to bit AT."""
    moved = words >> (POSITION * STEP - AT) if POSITION * STEP >= AT else words << (AT - POSITION * STEP)
    return moved & (((1 << BITS) - 1) << AT)


@triton.jit
def _own_layout(values: tl.tensor, ROW_TILES: tl.constexpr, WARPS: tl.constexpr) -> tl.tensor:
    """Reshape `values` [n, 32] for the words of fragments, as sums of one value each.

    Triton chooses the layout of operands by the narrowest type that they come from, and looks no further back than a
    sum.
    """
    return tl.sum(values[:, :, None], 2).reshape(ROW_TILES, WARPS, 8, 4, 1)


@triton.jit
def _weights(
    lows: tl.tensor,
    highs: tl.tensor,
    numbers: tl.tensor,
    s: tl.tensor,
    b: tl.tensor,
    one: tl.tensor,
    POSITION: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
) -> tl.tensor:
    """Return the values of the codes at one position, bfloat16."""
    if numbers is not None:
        codes = _code_bits(lows, POSITION, LOW, LOW, 0).to(tl.uint32).permute(0, 4, 1, 2, 3)
        return (s * tl.load(numbers + codes).permute(0, 2, 3, 4, 1)).to(tl.bfloat16)
    AT: tl.constexpr = 23 - LOW - HIGH - LOW * (1 - POSITION % 2)  # the same shift serves two codes
    SIZE: tl.constexpr = 1 << (23 - AT)
    bits = _code_bits(lows, POSITION, LOW, LOW, AT) | one
    if HIGH:
        bits ^= _code_bits(highs, POSITION, LOW, HIGH, AT + LOW)
    return ((s * SIZE) * bits.to(tl.float32, bitcast=True) - (b + s * SIZE)).to(tl.bfloat16)


# Without do_not_specialize, Triton would compile separate kernels for the value 1 and for multiples of 16.
@triton.jit(do_not_specialize=["tokens", "rows", "split_stride"])
def _product_kernel(
    low: tl.tensor,
    high: tl.tensor,
    scales: tl.tensor,
    sub_scales: tl.tensor,
    minimums: tl.tensor,
    sub_minimums: tl.tensor,
    zeros: tl.tensor,
    numbers: tl.tensor,
    scale_table: tl.tensor,
    scale_offset: tl.tensor,
    x: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    out_stride: tl.tensor,
    split_stride: tl.tensor,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    CODES_PER_WORD: tl.constexpr,
    GROUPS: tl.constexpr,
    RATIO: tl.constexpr,
    ZERO: tl.constexpr,
    SUB_SCALE_ZERO: tl.constexpr,
    NIBBLES: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    REORDERED: tl.constexpr,
    ROW_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    FRAGMENT: tl.constexpr = 4 * CODES_PER_WORD
    TILES: tl.constexpr = (COLUMNS + 4 * FRAGMENT - 1) // (4 * FRAGMENT)
    STEPS: tl.constexpr = (TILES + WARPS * SPLITS - 1) // (WARPS * SPLITS)
    HALVES: tl.constexpr = 2 if GROUP % FRAGMENT else 1  # number of groups in a fragment
    # The axes of the loaded values are: blocks of eight rows, warps, and the threads of a warp, which are eight rows by
    # four fragments. Triton gives adjacent elements of memory to one thread, and orders the axes accordingly. The hints
    # below say how many elements a thread should take: four, or one, which is expressed as two unaligned ones. Triton
    # would not see the hints in another function.
    first = tl.program_id(0) * ROW_TILES
    unit = tl.arange(0, ROW_TILES * WARPS)[:, None]
    thread = tl.arange(0, 32)[None, :]
    row_tile = tl.minimum(first + unit // WARPS, (rows + 7) // 8 - 1).to(tl.int64)
    row = tl.minimum(row_tile * 8 + thread // 4, rows - 1)
    four = tl.arange(0, 4)[None, None, None, None, :]
    # The axes of x are: blocks of eight tokens, warps, and the threads of a warp, which are eight tokens by four
    # fragments.
    x_unit = tl.arange(0, TOKENS // 8 * WARPS)[:, None]
    x_lane = tl.arange(0, 128)[None, :]
    token_tile = tl.minimum(tl.program_id(1) * (TOKENS // 8) + x_unit // WARPS, (tokens + 7) // 8 - 1).to(tl.int64)
    token = token_tile * 8 + x_lane // 16
    x_column = x_lane % 16 // 4 * FRAGMENT + x_lane % 4
    # 1.0 as a run-time value (`tl.program_id(2) // SPLITS` is 0): an instruction can hold only one constant, and the
    # mask needs it.
    one = ONE - tl.program_id(2) // SPLITS
    total = tl.zeros((WARPS, 8 * ROW_TILES, TOKENS), tl.float32)
    for step in range(STEPS):
        tile = (tl.program_id(2) * STEPS + step) * WARPS
        within = tl.minimum(tile + unit % WARPS, TILES - 1)
        start = (row_tile * TILES + within) * 32
        lows = tl.load(low + tl.max_contiguous(start * 4 + tl.arange(0, 128)[None, :], [1, 4])).to(tl.int32)
        lows = lows.reshape(ROW_TILES, WARPS, 8, 4, 4)
        highs = lows
        if HIGH:
            fragments = tl.load(high + tl.multiple_of(tl.max_contiguous(start + thread, [1, 2]), [1, 1])).reshape(
                ROW_TILES, WARPS, 8, 4, 1
            )
            highs = words_of(fragments, four, LOW, HIGH, CODES_PER_WORD)
        for half in tl.static_range(HALVES):
            group = ((within * 4 + thread % 4) * FRAGMENT + half * (FRAGMENT // 2)) // GROUP
            at = tl.multiple_of(tl.max_contiguous(row * GROUPS + group, [1, 2]), [1, 1])
            at_block = tl.multiple_of(tl.max_contiguous(row * (GROUPS // RATIO) + group // RATIO, [1, 2]), [1, 1])
            s, b = group_scales(
                scales, sub_scales, minimums, sub_minimums, zeros, scale_table, scale_offset, at, at_block,
                group < GROUPS, ZERO, SUB_SCALE_ZERO, NIBBLES, NESTED_BLOCK,
            )  # fmt: skip
            s, b = _own_layout(s, ROW_TILES, WARPS), _own_layout(b, ROW_TILES, WARPS)
            for index in tl.static_range(CODES_PER_WORD // HALVES):
                position = half * (CODES_PER_WORD // HALVES) + index
                weights = _weights(
                    lows, highs, numbers, s, b, one, half * (CODES_PER_WORD // HALVES) + index, LOW, HIGH
                )
                weights = weights.reshape(ROW_TILES, WARPS, 8, 4, 2, 2).permute(1, 0, 2, 4, 3, 5)
                x_tile = tile + x_unit % WARPS
                if REORDERED:
                    # Words after the last tile repeat it; their inputs are zeros.
                    x_at = ((token_tile * TILES + x_tile) * CODES_PER_WORD + position) * 128 + x_lane
                    inputs = tl.load(
                        x + tl.multiple_of(tl.max_contiguous(x_at, [1, 4]), [1, 4]), mask=x_tile < TILES, other=0.0
                    )
                else:
                    column = x_tile * (4 * FRAGMENT) + 4 * position + x_column
                    inside = token < tokens
                    if COLUMNS != 4 * FRAGMENT * WARPS * STEPS * SPLITS:
                        inside = inside & (column < COLUMNS)
                    x_at = token * COLUMNS + column
                    inputs = tl.load(
                        x + tl.multiple_of(tl.max_contiguous(x_at, [1, 4]), [1, 4]), mask=inside, other=0.0
                    )
                inputs = inputs.reshape(TOKENS // 8, WARPS, 8, 4, 2, 2).permute(1, 4, 3, 5, 0, 2)
                total = tl.dot(weights.reshape(WARPS, 8 * ROW_TILES, 16), inputs.reshape(WARPS, 16, TOKENS), total)
    sums = tl.sum(total, 0)
    to_row = first * 8 + tl.arange(0, 8 * ROW_TILES)[:, None]
    to_token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[None, :]
    kept = (to_row < rows) & (to_token < tokens)
    if bias is not None:
        sums += tl.load(bias + to_row, mask=to_row < rows, other=0.0)
    out_at = out + tl.program_id(2).to(tl.int64) * split_stride + to_token.to(tl.int64) * out_stride + to_row
    if ADD:
        sums += tl.load(out_at, mask=kept, other=0.0)
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _sum_kernel(
    partial: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    out_stride: tl.tensor,
    split_stride: tl.tensor,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(1).to(tl.int64)
    kept = row < rows
    sums = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        sums += tl.load(partial + split * split_stride.to(tl.int64) + token * rows + row, mask=kept, other=0.0)
    if bias is not None:
        sums += tl.load(bias + row, mask=kept, other=0.0)
    out_at = out + token * out_stride + row
    if ADD:
        sums += tl.load(out_at, mask=kept, other=0.0)
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=kept)


SUM_BLOCK = 1024  # rows per program


def packed_product(
    matrix: PackedMatrix, x: Tensor, out: Tensor, tile: ProductTile, *, bias: Tensor | None, add: bool
) -> None:
    """Write x [tokens, columns] times the matrix, plus `bias` (float32 [rows]), to `out` [tokens, rows].

    With `add`, the product is added to `out`. x is bfloat16 and contiguous, with its columns in the matrix's order.
    `out` may be a range of columns of a wider tensor.
    """
    tokens, rows = len(x), matrix.shape[0]
    split = tile.splits > 1
    sums = torch.empty(tile.splits, tokens, rows, dtype=torch.float32, device=x.device) if split else out
    reorders = tile.tokens > 8 or matrix.form.columns % 4 > 0  # otherwise a thread already loads four adjacent columns
    grid = triton.cdiv(rows, tile.rows), triton.cdiv(tokens, tile.tokens), tile.splits
    _product_kernel[grid](
        **matrix.operands,
        x=_in_thread_order(x, matrix.form) if reorders else x,
        bias=None if split else bias,
        out=sums,
        tokens=tokens,
        rows=rows,
        out_stride=sums.stride(-2),
        split_stride=sums.stride(0) if split else 0,
        **matrix.form.constants,
        ADD=add and not split,
        REORDERED=reorders,
        ROW_TILES=tile.rows // TILE_ROWS,
        WARPS=tile.warps,
        TOKENS=tile.tokens,
        SPLITS=tile.splits,
        num_warps=tile.warps,
        num_stages=1,
    )
    if split:
        _sum_kernel[triton.cdiv(rows, SUM_BLOCK), tokens](
            sums, bias, out, rows, out.stride(0), sums.stride(0), ADD=add, SPLITS=tile.splits, BLOCK=SUM_BLOCK
        )


def _in_thread_order(x: Tensor, form: PackedForm) -> Tensor:
    """Return x in the order in which threads load it, padded with zeros: bfloat16 [tokens / 8, tiles, codes_per_word,
    8, 4, 4].

    Each load of a warp is then contiguous. The extra launch pays off for more than eight tokens.
    """
    padded = F.pad(x, (0, form.width - form.columns, 0, -len(x) % 8))
    parts = padded.view(-1, 8, form.tiles, TILE_FRAGMENTS, form.codes_per_word, WORDS)
    return parts.permute(0, 2, 4, 1, 3, 5).contiguous()
