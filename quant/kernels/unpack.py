"""Unpack packed weights: a whole matrix, or selected rows. Tested against `reference.dequantize` and `dequantize_rows`.

Whole matrices are unpacked for long prompts, for which a library's product of plain matrices is fastest. The lower
bound is memory traffic: of a matrix of 4-bit codes, about 0.56 bytes per weight are read and 2 are written. On an H200,
Q4_K takes 1.15 times that bound, and tables take 1.4 times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.cuda.matrix import DENSE, PackedMatrix
from quant.kernels.packed_values import in_column_order, scaled, unpacked_tiles

# rows of a program, and its steps of one tile each: for a whole matrix, and for rows of an embedding
WHOLE, SELECTED = (32, 8), (16, 1)
STAGES = 3  # steps in flight; loads from a table would be pipelined as well


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
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    to_row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row = tl.minimum(to_row, out_rows - 1)
    if ids is not None:
        row = tl.load(ids + row)
    # Programs with adjacent numbers write adjacent columns, so that memory is written in order.
    first = tl.program_id(0) * STEPS
    for tile in tl.range(first, tl.minimum(first + STEPS, tiles), num_stages=STAGES):
        v, s, b = unpacked_tiles(
            low, high, scales, sub_scales, zeros, numbers, scale_table, scale_offset, row, tile, rows, tiles, groups,
            chunks, blocks, GROUP, UNIT, LOW, HIGH, RATIO, ZERO, MINIMUMS, SUB_SCALE_ZERO, NIBBLES, NESTED_BLOCK,
        )  # fmt: skip
        weights = in_column_order(scaled(v, s, b).to(out.dtype.element_ty), UNIT)
        column = tile * 128 + tl.arange(0, 128)[None, :]
        to_column = column if order is None else tl.load(order + column, mask=column < columns, other=0)
        tl.store(out + to_row * columns + to_column, weights, mask=(to_row < out_rows) & (column < columns))


def unpack(matrix: PackedMatrix, *, out_dtype: torch.dtype = DENSE) -> Tensor:
    """Return all rows, unpacked, [rows, columns]."""
    return _unpacked(matrix, None, matrix.shape[0], out_dtype)


def unpack_rows(matrix: PackedMatrix, ids: Tensor, *, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """Unpack the rows `ids`, int64 [n], which must be in range. Return [n, columns]."""
    return _unpacked(matrix, ids, len(ids), out_dtype)


def _unpacked(matrix: PackedMatrix, ids: Tensor | None, rows: int, out_dtype: torch.dtype) -> Tensor:
    form = matrix.form
    device = matrix.low.device if ids is None else ids.device  # the matrix may be in pinned memory of the host
    out = torch.empty(rows, form.columns, dtype=out_dtype, device=device)
    if rows:
        rows_of_program, steps = WHOLE if ids is None else SELECTED
        stages = STAGES if form.table is None and steps > 1 else 1
        _unpack_kernel[triton.cdiv(form.tiles, steps), triton.cdiv(rows, rows_of_program)](
            **matrix.operands,
            order=matrix.order,
            ids=ids,
            out=out,
            rows=matrix.shape[0],
            out_rows=rows,
            **form.sizes,
            **form.constants,
            ROWS=rows_of_program,
            STEPS=steps,
            STAGES=stages,
            num_stages=stages,
        )
    return out


GATHERED = 1024  # columns per program


@triton.jit
def _gather_kernel(values: tl.tensor, ids: tl.tensor, out: tl.tensor, columns: tl.tensor, BLOCK: tl.constexpr) -> None:
    to_row = tl.program_id(1).to(tl.int64)
    row = tl.load(ids + to_row)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    found = tl.load(values + row * columns + column, mask=inside, other=0.0)
    tl.store(out + to_row * columns + column, found.to(tl.float32), mask=inside)


def gather_rows(values: Tensor, ids: Tensor) -> Tensor:
    """Return the rows `ids`, int64 [n], which must be in range, of floats [rows, columns], as float32 [n, columns].

    `values` may be in pinned memory of the host, which torch's own indexing does not read from a GPU. The lower bound
    is memory traffic, which is then that of the bus: 4 KB for a row of 2048 bfloat16.
    """
    columns = values.shape[1]
    out = torch.empty(len(ids), columns, dtype=torch.float32, device=ids.device)
    if len(ids):
        _gather_kernel[triton.cdiv(columns, GATHERED), len(ids)](values, ids, out, columns, BLOCK=GATHERED)
    return out
