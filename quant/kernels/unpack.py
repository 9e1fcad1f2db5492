"""Packed weights unpacked: a whole matrix, or chosen rows. The twin of `reference.dequantize` and `dequantize_rows`.

Whole matrices are unpacked for large prompts, which a library's product of plain matrices serves best. The floor is the
traffic: a matrix of 4-bit codes is read at about 0.56 bytes a weight and written at two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.cuda.matrix import DENSE, TILE_STRIPS, PackedMatrix
from quant.kernels.packed_values import codes_of, group_scales, words_of

ROWS = 16  # of one program
STRIPS = 4  # at 8, compilers for some cards run out of registers


@triton.jit
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
    PHASES: tl.constexpr,
    GROUPS: tl.constexpr,
    RATIO: tl.constexpr,
    ZERO: tl.constexpr,
    SUB_SCALE_ZERO: tl.constexpr,
    NIBBLES: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STRIPS: tl.constexpr,
) -> None:
    STRIP: tl.constexpr = 4 * PHASES
    TILES: tl.constexpr = (COLUMNS + 4 * STRIP - 1) // (4 * STRIP)
    to = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None, None]
    strip = tl.program_id(1) * STRIPS + tl.arange(0, STRIPS)[None, :, None, None]
    phase = tl.arange(0, PHASES)[None, None, :, None]
    word = tl.arange(0, 4)[None, None, None, :]
    row = to if ids is None else tl.load(ids + to, mask=to < rows, other=0)
    inside = (to < rows) & (strip < 4 * TILES)
    at = (row // 8 * TILES + strip // 4) * 32 + row % 8 * 4 + strip % 4
    lows = tl.load(low + at * 4 + word, mask=inside, other=0).to(tl.int32)
    highs = lows
    if HIGH:
        highs = words_of(tl.load(high + at, mask=inside, other=0), word, LOW, HIGH, PHASES)
    codes = codes_of(lows, highs, phase, LOW, HIGH)
    column = strip * STRIP + 4 * phase + word
    kept = inside & (column < COLUMNS)
    group = column // GROUP
    at, above = row * GROUPS + group, row * (GROUPS // RATIO) + group // RATIO
    s, b = group_scales(
        scales, sub_scales, minimums, sub_minimums, zeros, scale_table, scale_offset, at, above, kept,
        ZERO, SUB_SCALE_ZERO, NIBBLES, NESTED_BLOCK,
    )  # fmt: skip
    values = s * (codes.to(tl.float32) if numbers is None else tl.load(numbers + codes)) - b
    place = column if order is None else tl.load(order + column, mask=column < COLUMNS, other=0)
    tl.store(out + to * COLUMNS + place, values.to(out.dtype.element_ty), mask=kept)


def unpack(matrix: PackedMatrix, *, out_dtype: torch.dtype = DENSE) -> Tensor:
    """All rows, [rows, columns]."""
    return _unpacked(matrix, None, matrix.shape[0], out_dtype)


def unpack_rows(matrix: PackedMatrix, ids: Tensor, *, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """The rows `ids` (int64 [n], in range), [n, columns]."""
    return _unpacked(matrix, ids, len(ids), out_dtype)


def _unpacked(matrix: PackedMatrix, ids: Tensor | None, rows: int, out_dtype: torch.dtype) -> Tensor:
    form = matrix.form
    out = torch.empty(rows, form.columns, dtype=out_dtype, device=matrix.low.device)
    if rows:
        grid = triton.cdiv(rows, ROWS), triton.cdiv(TILE_STRIPS * form.tiles, STRIPS)
        _unpack_kernel[grid](
            **matrix.operands,
            order=matrix.order,
            ids=ids,
            out=out,
            rows=rows,
            **form.constants,
            ROWS=ROWS,
            STRIPS=STRIPS,
        )
    return out
