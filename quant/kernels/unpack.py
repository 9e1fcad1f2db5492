"""Unpack packed weights: a whole matrix, or selected rows. Tested against `reference.dequantize` and `dequantize_rows`.

Whole matrices are unpacked for long prompts, for which a library's product of plain matrices is fastest. The lower
bound is memory traffic: of a matrix of 4-bit codes, about 0.56 bytes per weight are read and 2 are written. A thread
loads the scale of a group once for all of its columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.cuda.matrix import DENSE, PackedMatrix
from quant.kernels.packed_values import code_pairs, group_scales, words_of

ROWS = 16  # rows per program
TILES = 2  # tiles of columns per program


@triton.jit(do_not_specialize=["rows", "out_rows", "tiles", "groups", "chunks", "blocks"])
def _unpack_kernel(
    low: tl.tensor,
    high: tl.tensor,
    scales: tl.tensor,
    sub_scales: tl.tensor,
    zeros: tl.tensor,
    numbers: tl.tensor,
    scale_table: tl.tensor,
    scale_offset: tl.tensor,
    order: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    out_rows: tl.tensor,
    columns: tl.tensor,
    tiles: tl.tensor,
    groups: tl.tensor,
    chunks: tl.tensor,
    blocks: tl.tensor,
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
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    UNITS: tl.constexpr = 128 // UNIT
    RUN: tl.constexpr = 4 if UNIT == 16 else 8
    N: tl.constexpr = TILES * ROWS
    unit = tl.arange(0, N)[:, None]
    to_row = tl.program_id(0).to(tl.int64) * ROWS + unit % ROWS
    row = tl.minimum(to_row, out_rows - 1)
    if ids is not None:
        row = tl.load(ids + row)
    tile = tl.program_id(1) * TILES + unit // ROWS
    own_tile = tl.minimum(tile, tiles - 1)
    start = ((row // 8 * tiles + own_tile) * 8 + row % 8) * 4
    lows = words_of(tl.load(low + (start * LOW + tl.arange(0, 4 * LOW)[None, :])).reshape(N, 4, LOW), LOW)
    highs = lows
    if HIGH:
        highs = words_of(tl.load(high + (start * HIGH + tl.arange(0, 4 * HIGH)[None, :])).reshape(N, 4, HIGH), HIGH)
    codes = code_pairs(lows, highs, 0, LOW, 0 if HIGH == 4 else HIGH).to(tl.int32)
    if HIGH == 4:
        codes |= code_pairs(highs, highs, 0, 4, 0).to(tl.int32) << 4
    s, b = group_scales(
        scales, sub_scales, zeros, scale_table, scale_offset, row // 8, row % 8, own_tile * 128, rows, groups, chunks,
        blocks, 4, UNITS, 0, GROUP, UNIT, RATIO, ZERO, MINIMUMS, SUB_SCALE_ZERO, NIBBLES, NESTED_BLOCK,
    )  # fmt: skip
    numbers_of_codes = codes.to(tl.float32) if numbers is None else tl.load(numbers + codes)
    values = s[:, :, :, None] * numbers_of_codes.reshape(N, 4, UNITS, 32 // UNITS) - b[:, :, :, None]
    thread = tl.arange(0, 4)[None, :, None, None]
    run = tl.arange(0, 32 // RUN)[None, None, :, None]
    column = tile[:, :, None, None] * 128 + run * (4 * RUN) + thread * RUN + tl.arange(0, RUN)[None, None, None, :]
    kept = (to_row < out_rows)[:, :, None, None] & (column < columns)
    to_column = column if order is None else tl.load(order + column, mask=column < columns, other=0)
    out_at = out + to_row[:, :, None, None] * columns + to_column
    tl.store(out_at, values.reshape(N, 4, 32 // RUN, RUN).to(out.dtype.element_ty), mask=kept)


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
        _unpack_kernel[triton.cdiv(rows, ROWS), triton.cdiv(form.tiles, TILES)](
            **matrix.operands,
            order=matrix.order,
            ids=ids,
            out=out,
            rows=matrix.shape[0],
            out_rows=rows,
            **form.sizes,
            **form.constants,
            ROWS=ROWS,
            TILES=TILES,
        )
    return out
