"""Unpack packed weights: a whole matrix, or selected rows. Tested against `reference.dequantize` and `dequantize_rows`.

Whole matrices are unpacked for long prompts, for which a library's product of plain matrices is fastest. The lower
bound is memory traffic: of a matrix of 4-bit codes, about 0.56 bytes per weight are read and 2 are written. For
16 weights of a thread and results in bfloat16, the kernel has 225 (int4 by 128), 293 (Q4_K), or 336 (Q6_K)
instructions on sm_90.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.cuda.matrix import DENSE, TILE_FRAGMENTS, PackedMatrix
from quant.kernels.packed_values import codes_of, group_scales, words_of

ROWS = 16  # rows per program
FRAGMENTS = 4  # fragments per program; with 8, compilers for some cards run out of registers


@triton.jit(do_not_specialize=["rows"])  # one compiled kernel for any number of rows
def _unpack_kernel(
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
    order: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
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
    ROWS: tl.constexpr,
    FRAGMENTS: tl.constexpr,
) -> None:
    FRAGMENT: tl.constexpr = 4 * CODES_PER_WORD
    TILES: tl.constexpr = (COLUMNS + 4 * FRAGMENT - 1) // (4 * FRAGMENT)
    to_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None, None]
    fragment = tl.program_id(1) * FRAGMENTS + tl.arange(0, FRAGMENTS)[None, :, None, None]
    position = tl.arange(0, CODES_PER_WORD)[None, None, :, None]
    word = tl.arange(0, 4)[None, None, None, :]
    row = to_row if ids is None else tl.load(ids + to_row, mask=to_row < rows, other=0)
    inside = (to_row < rows) & (fragment < 4 * TILES)
    at = (row // 8 * TILES + fragment // 4) * 32 + row % 8 * 4 + fragment % 4
    lows = tl.load(low + at * 4 + word, mask=inside, other=0).to(tl.int32)
    highs = lows
    if HIGH:
        highs = words_of(tl.load(high + at, mask=inside, other=0), word, LOW, HIGH, CODES_PER_WORD)
    codes = codes_of(lows, highs, position, LOW, HIGH)
    # Codes at one position of four words share a scale, so a thread loads it once for them.
    group = (fragment * FRAGMENT + 4 * position) // GROUP
    at, at_block = row * GROUPS + group, row * (GROUPS // RATIO) + group // RATIO
    s, b = group_scales(
        scales, sub_scales, minimums, sub_minimums, zeros, scale_table, scale_offset, at, at_block,
        inside & (group < GROUPS), ZERO, SUB_SCALE_ZERO, NIBBLES, NESTED_BLOCK,
    )  # fmt: skip
    values = s * (codes.to(tl.float32) if numbers is None else tl.load(numbers + codes)) - b
    column = fragment * FRAGMENT + 4 * position + word
    kept = inside & (column < COLUMNS)
    to_column = column if order is None else tl.load(order + column, mask=column < COLUMNS, other=0)
    tl.store(out + to_row * COLUMNS + to_column, values.to(out.dtype.element_ty), mask=kept)


def unpack(matrix: PackedMatrix, *, out_dtype: torch.dtype = DENSE) -> Tensor:
    """Return all rows, unpacked, [rows, columns]."""
    return _unpacked(matrix, None, matrix.shape[0], out_dtype)


def unpack_rows(matrix: PackedMatrix, ids: Tensor, *, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """Unpack the rows `ids`, int64 [n], which must be in range. Return [n, columns]."""
    return _unpacked(matrix, ids, len(ids), out_dtype)


def _unpacked(matrix: PackedMatrix, ids: Tensor | None, rows: int, out_dtype: torch.dtype) -> Tensor:
    form = matrix.form
    out = torch.empty(rows, form.columns, dtype=out_dtype, device=matrix.low.device)
    if rows:
        grid = triton.cdiv(rows, ROWS), triton.cdiv(TILE_FRAGMENTS * form.tiles, FRAGMENTS)
        _unpack_kernel[grid](
            **matrix.operands,
            order=matrix.order,
            ids=ids,
            out=out,
            rows=rows,
            **form.constants,
            ROWS=ROWS,
            FRAGMENTS=FRAGMENTS,
        )
    return out
