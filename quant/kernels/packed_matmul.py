"""Packed weights times few tokens: weights are unpacked in registers and multiplied by matrix units.

The product is transposed, so that tokens are the short side of what matrix units multiply: 16 rows of the weight by 8
tokens. A warp takes a run of tiles (`quant.cuda.matrix`) of some rows, and the warps of a program other runs of the
same rows; their sums are added in a fixed order, and where rows alone are too few to fill a GPU, programs share them in
the same way (`splits`). Between the load of a word and the products of its codes nothing leaves a thread's registers:
the layout puts the codes that one shift brings down where operands are expected.

A code becomes a float by its bits: placed below the exponent of 1.0 it is 1 + code / 2 ** n, and what is too much goes
into the group's offset. One multiplication and addition in float32 then gives the weight, which is rounded to bfloat16.

The floor is the traffic of the weights. A card of 3.35 TB/s, 132 multiprocessors and 1.75 GHz reads 25.8 weights of 4.5
bits in a clock of each, in which its four schedulers have 5.0 instructions for 32 of them; 6.2 at 80 % of it. What the
loop takes for 32 weights, by the machine code for sm_90 (Triton 3.6 and 3.7 alike; 8 tokens, but for the last columns):

    rows of a program, tokens       16      32      32, 16    32, 32
    Q4_K                           4.6     4.2      4.6       5.1
    Q6_K, of 6.6 bits              6.1     5.9      6.2       7.0
    Q4_0, int4 by 128              4.0     3.6, 3.8
    Q8_0, of 8.5 bits              4.6     4.2
    Q2_K, of 2.6 bits              5.0     4.7
    Q3_K, Q5_K, of 3.4 and 5.5     6.4     6.1
    tables                         7.2; 8.6 and barriers with Triton 3.6: a look-up for each weight

So one token is bound by memory with codes of 4, 6 and 8 bits, and by both with Q5_K; by instructions with Q2_K and
Q3_K, at 60 % of the traffic, and with tables, at 65 to 70 %. 32 tokens take 1.1 times the instructions of one. Words
are loaded 16 bytes a thread; but for tables, the loop has neither barriers nor shared memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from quant.cuda.matrix import TILE_ROWS, TILE_STRIPS, WORDS, PackedForm, PackedMatrix
from quant.kernels.packed_values import group_scales, words_of
from quant.kernels.tiles import ProductTile

ONE = tl.constexpr(0x3F800000)  # the bits of 1.0


@triton.jit
def _placed(
    words: tl.tensor, PHASE: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr, AT: tl.constexpr
) -> tl.tensor:
    """The bits of one phase, BITS of every STEP, at bit AT of int32."""
    moved = words >> (PHASE * STEP - AT) if PHASE * STEP >= AT else words << (AT - PHASE * STEP)
    return moved & (((1 << BITS) - 1) << AT)


@triton.jit
def _apart(values: tl.tensor, EIGHTS: tl.constexpr, WARPS: tl.constexpr) -> tl.tensor:
    """`values` [n, 32], as sums of one each, for the words of strips.

    Triton lays operands out by the narrowest type that they come from, and looks no further than sums for it.
    """
    return tl.sum(values[:, :, None], 2).reshape(EIGHTS, WARPS, 8, 4, 1)


@triton.jit
def _weights(
    lows: tl.tensor,
    highs: tl.tensor,
    numbers: tl.tensor,
    s: tl.tensor,
    b: tl.tensor,
    one: tl.tensor,
    PHASE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
) -> tl.tensor:
    """The values of the codes of one phase, bfloat16."""
    if numbers is not None:
        codes = _placed(lows, PHASE, LOW, LOW, 0).to(tl.uint32).permute(0, 4, 1, 2, 3)
        return (s * tl.load(numbers + codes).permute(0, 2, 3, 4, 1)).to(tl.bfloat16)
    AT: tl.constexpr = 23 - LOW - HIGH - LOW * (1 - PHASE % 2)  # one shift for two codes
    SIZE: tl.constexpr = 1 << (23 - AT)
    bits = _placed(lows, PHASE, LOW, LOW, AT) | one
    if HIGH:
        bits ^= _placed(highs, PHASE, LOW, HIGH, AT + LOW)
    return ((s * SIZE) * bits.to(tl.float32, bitcast=True) - (b + s * SIZE)).to(tl.bfloat16)


@triton.jit
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
    PHASES: tl.constexpr,
    GROUPS: tl.constexpr,
    RATIO: tl.constexpr,
    ZERO: tl.constexpr,
    SUB_SCALE_ZERO: tl.constexpr,
    NIBBLES: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    ARRANGED: tl.constexpr,
    EIGHTS: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    STRIP: tl.constexpr = 4 * PHASES
    TILES: tl.constexpr = (COLUMNS + 4 * STRIP - 1) // (4 * STRIP)
    STEPS: tl.constexpr = (TILES + WARPS * SPLITS - 1) // (WARPS * SPLITS)
    HALVES: tl.constexpr = 2 if GROUP % STRIP else 1  # groups of a strip
    # What is loaded is for each eight of rows, in that for each warp, and for its threads: eight rows by four strips.
    # Triton gives neighbours in memory to one thread, as many as it takes for such, and orders axes by that. It is told
    # how many are wanted, here and not in a function, where it would not see it: four, or one, which two unaligned ones
    # stand for.
    first = tl.program_id(0) * EIGHTS
    unit = tl.arange(0, EIGHTS * WARPS)[:, None]
    thread = tl.arange(0, 32)[None, :]
    eight = tl.minimum(first + unit // WARPS, (rows + 7) // 8 - 1).to(tl.int64)
    row = tl.minimum(eight * 8 + thread // 4, rows - 1)
    four = tl.arange(0, 4)[None, None, None, None, :]
    # Of x it is for each eight of tokens, for each warp, and for its threads: eight tokens by four strips.
    x_unit = tl.arange(0, TOKENS // 8 * WARPS)[:, None]
    x_four = tl.arange(0, 128)[None, :]
    token_eight = tl.minimum(tl.program_id(1) * (TOKENS // 8) + x_unit // WARPS, (tokens + 7) // 8 - 1).to(tl.int64)
    token = token_eight * 8 + x_four // 16
    x_column = x_four % 16 // 4 * STRIP + x_four % 4
    one = ONE - tl.program_id(2) // SPLITS  # not a constant to compilers: an instruction holds one, and has the mask
    total = tl.zeros((WARPS, 8 * EIGHTS, TOKENS), tl.float32)
    for step in range(STEPS):
        tile = (tl.program_id(2) * STEPS + step) * WARPS
        within = tl.minimum(tile + unit % WARPS, TILES - 1)
        start = (eight * TILES + within) * 32
        lows = tl.load(low + tl.max_contiguous(start * 4 + tl.arange(0, 128)[None, :], [1, 4])).to(tl.int32)
        lows = lows.reshape(EIGHTS, WARPS, 8, 4, 4)
        highs = lows
        if HIGH:
            strips = tl.load(high + tl.multiple_of(tl.max_contiguous(start + thread, [1, 2]), [1, 1])).reshape(
                EIGHTS, WARPS, 8, 4, 1
            )
            highs = words_of(strips, four, LOW, HIGH, PHASES)
        for half in tl.static_range(HALVES):
            group = ((within * 4 + thread % 4) * STRIP + half * (STRIP // 2)) // GROUP
            at = tl.multiple_of(tl.max_contiguous(row * GROUPS + group, [1, 2]), [1, 1])
            above = tl.multiple_of(tl.max_contiguous(row * (GROUPS // RATIO) + group // RATIO, [1, 2]), [1, 1])
            s, b = group_scales(
                scales, sub_scales, minimums, sub_minimums, zeros, scale_table, scale_offset, at, above, group < GROUPS,
                ZERO, SUB_SCALE_ZERO, NIBBLES, NESTED_BLOCK,
            )  # fmt: skip
            s, b = _apart(s, EIGHTS, WARPS), _apart(b, EIGHTS, WARPS)
            for place in tl.static_range(PHASES // HALVES):
                phase = half * (PHASES // HALVES) + place
                weights = _weights(lows, highs, numbers, s, b, one, half * (PHASES // HALVES) + place, LOW, HIGH)
                weights = weights.reshape(EIGHTS, WARPS, 8, 4, 2, 2).permute(1, 0, 2, 4, 3, 5)
                x_tile = tile + x_unit % WARPS
                if ARRANGED:
                    # Beyond the last tile its weights are multiplied by zeros.
                    x_at = ((token_eight * TILES + x_tile) * PHASES + phase) * 128 + x_four
                    inputs = tl.load(
                        x + tl.multiple_of(tl.max_contiguous(x_at, [1, 4]), [1, 4]), mask=x_tile < TILES, other=0.0
                    )
                else:
                    column = x_tile * (4 * STRIP) + 4 * phase + x_column
                    inside = token < tokens
                    if COLUMNS != 4 * STRIP * WARPS * STEPS * SPLITS:
                        inside = inside & (column < COLUMNS)
                    x_at = token * COLUMNS + column
                    inputs = tl.load(
                        x + tl.multiple_of(tl.max_contiguous(x_at, [1, 4]), [1, 4]), mask=inside, other=0.0
                    )
                inputs = inputs.reshape(TOKENS // 8, WARPS, 8, 4, 2, 2).permute(1, 4, 3, 5, 0, 2)
                total = tl.dot(weights.reshape(WARPS, 8 * EIGHTS, 16), inputs.reshape(WARPS, 16, TOKENS), total)
    sums = tl.sum(total, 0)
    to_row = first * 8 + tl.arange(0, 8 * EIGHTS)[:, None]
    to_token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[None, :]
    kept = (to_row < rows) & (to_token < tokens)
    if bias is not None:
        sums += tl.load(bias + to_row, mask=to_row < rows, other=0.0)
    place = out + tl.program_id(2).to(tl.int64) * split_stride + to_token.to(tl.int64) * out_stride + to_row
    if ADD:
        sums += tl.load(place, mask=kept, other=0.0)
    tl.store(place, sums.to(out.dtype.element_ty), mask=kept)


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
    place = out + token * out_stride + row
    if ADD:
        sums += tl.load(place, mask=kept, other=0.0)
    tl.store(place, sums.to(out.dtype.element_ty), mask=kept)


SUM_BLOCK = 1024  # rows


def packed_product(
    matrix: PackedMatrix, x: Tensor, out: Tensor, tile: ProductTile, *, bias: Tensor | None, add: bool
) -> None:
    """out [tokens, rows] = x [tokens, columns] times the matrix, plus bias (float32 [rows]), plus `out` where `add`.

    x is bfloat16 and contiguous, its columns in the matrix's order; `out` may be columns of a wider tensor.
    """
    tokens, rows = len(x), matrix.shape[0]
    split = tile.splits > 1
    sums = torch.empty(tile.splits, tokens, rows, dtype=torch.float32, device=x.device) if split else out
    arranged = tile.tokens > 8 or matrix.form.columns % 4 > 0  # else four columns are loaded at once
    grid = triton.cdiv(rows, tile.rows), triton.cdiv(tokens, tile.tokens), tile.splits
    _product_kernel[grid](
        **matrix.operands,
        x=_arranged(x, matrix.form) if arranged else x,
        bias=None if split else bias,
        out=sums,
        tokens=tokens,
        rows=rows,
        out_stride=sums.stride(-2),
        split_stride=sums.stride(0) if split else 0,
        **matrix.form.constants,
        ADD=add and not split,
        ARRANGED=arranged,
        EIGHTS=tile.rows // TILE_ROWS,
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


def _arranged(x: Tensor, form: PackedForm) -> Tensor:
    """x in the order in which threads take it, bfloat16 [tokens / 8, tiles, phases, 8, 4, 4], filled up with zeros.

    So each load of a warp is one piece of memory. It costs a launch, which pays from a second eight of tokens on.
    """
    padded = F.pad(x, (0, form.width - form.columns, 0, -len(x) % 8))
    parts = padded.view(-1, 8, form.tiles, TILE_STRIPS, form.phases, WORDS)
    return parts.permute(0, 2, 4, 1, 3, 5).contiguous()
