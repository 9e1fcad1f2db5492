"""Quantize rows to 8-bit integers with a scale for each 32 columns, for products in integer matrix units.

A value is code * scale, where the largest code of 32 columns is 127. A packed matrix is unpacked and rounded again. The
32 columns of all rows are adjacent in memory, so that a tile of the product is one contiguous piece.

The lower bound is memory traffic: for each packed weight of 4 bits, about 0.56 bytes are read and 1.13 written.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.cuda.matrix import PackedMatrix
from quant.kernels.gating import gated_values
from quant.kernels.packed_values import in_column_order, unpacked_tiles

SPAN = 32  # columns that share a scale
ROWS = 32  # rows per program
STEPS, STAGES = 8, 3  # tiles of a program for weights, and those in flight


@dataclass(frozen=True, slots=True)
class IntegerRows:
    """Rows of 8-bit integers."""

    codes: Tensor  # int8 [spans, rows, SPAN]
    scales: Tensor  # float32 [spans, rows]

    @classmethod
    def blank(cls, rows: int, spans: int, device: torch.device) -> "IntegerRows":
        codes = torch.empty(spans, rows, SPAN, dtype=torch.int8, device=device)
        return cls(codes, torch.empty(spans, rows, dtype=torch.float32, device=device))

    @property
    def spans(self) -> int:
        return self.codes.shape[0]

    @property
    def count(self) -> int:
        return self.codes.shape[1]


@triton.jit
def _store_spans(
    values: tl.tensor, codes: tl.tensor, scales: tl.tensor, row: tl.tensor, tile: tl.tensor, rows: tl.tensor
) -> None:
    """Quantize and store values, float32 [n, 128], of the rows `row`, [n], in a tile of 128 columns.

    A span with NaN or infinity gets the scale NaN.
    """
    N: tl.constexpr = values.shape[0]
    ROUNDING: tl.constexpr = 12582912.0  # 1.5 * 2 ** 23: after its addition, the low bits of a float32 are an integer
    SMALLEST: tl.constexpr = 2.0**-100  # spans whose magnitudes are all smaller become zeros
    spans = values.reshape(N, 4, 32)
    peak = tl.max(tl.abs(spans), 2)
    factor = 127.0 / tl.maximum(peak, SMALLEST)
    whole = (spans * factor[:, :, None] + ROUNDING).to(tl.int32, bitcast=True)
    span = tile * 4 + tl.arange(0, 4)[None, :]
    at = span.to(tl.int64) * rows + row[:, None]
    kept = (row < rows)[:, None] & (span >= 0)
    tl.store(scales + at, tl.maximum(peak, SMALLEST) / 127.0 + tl.sum(spans * 0.0, 2), mask=kept)
    codes_at = codes + at[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    tl.store(codes_at, (whole & 0xFF).to(tl.int8), mask=kept[:, :, None])


@triton.jit(do_not_specialize=["rows", "columns", "tiles", "groups", "chunks", "blocks"])
def _integer_weights_kernel(
    low: tl.tensor,
    high: tl.tensor,
    scales: tl.tensor,
    sub_scales: tl.tensor,
    zeros: tl.tensor,
    numbers: tl.tensor,
    scale_table: tl.tensor,
    scale_offset: tl.tensor,
    out: tl.tensor,
    out_scales: tl.tensor,
    rows: tl.tensor,
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
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    own_row = tl.minimum(row, rows - 1).to(tl.int64)[:, None]
    first = tl.program_id(0) * STEPS
    for tile in tl.range(first, tl.minimum(first + STEPS, tiles), num_stages=STAGES):
        values = unpacked_tiles(
            low, high, scales, sub_scales, zeros, numbers, scale_table, scale_offset, own_row, tile, rows, tiles,
            groups, chunks, blocks, GROUP, UNIT, LOW, HIGH, RATIO, ZERO, MINIMUMS, SUB_SCALE_ZERO, NIBBLES,
            NESTED_BLOCK,
        )  # fmt: skip
        # codes in the padding are zeros, but their values may not be
        inside = (tile * 128 + tl.arange(0, 128) < columns)[None, :]
        _store_spans(tl.where(inside, in_column_order(values, UNIT), 0.0), out, out_scales, row, tile, rows)


@triton.jit(do_not_specialize=["tokens", "columns"])
def _integer_inputs_kernel(
    x: tl.tensor, codes: tl.tensor, scales: tl.tensor, tokens: tl.tensor, columns: tl.tensor, ROWS: tl.constexpr
) -> None:
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * 128 + tl.arange(0, 128)
    kept = (token < tokens)[:, None] & (column < columns)[None, :]
    values = tl.load(x + token[:, None].to(tl.int64) * columns + column[None, :], mask=kept, other=0.0)
    _store_spans(values.to(tl.float32), codes, scales, token, tl.program_id(0), tokens)


@triton.jit(do_not_specialize=["tokens", "width"])
def _integer_gate_kernel(
    gate_up: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * 128 + tl.arange(0, 128)
    kept = (token < tokens)[:, None] & (column < width)[None, :]
    at = gate_up + token[:, None].to(tl.int64) * (2 * width) + column[None, :]
    first = tl.load(at, mask=kept, other=0.0).to(tl.float32)
    second = tl.load(at + width, mask=kept, other=0.0).to(tl.float32)
    _store_spans(gated_values(first, second, GATE), codes, scales, token, tl.program_id(0), tokens)


def integer_weights(matrix: PackedMatrix) -> IntegerRows:
    """Return all rows of a packed matrix as 8-bit integers."""
    form, rows = matrix.form, matrix.shape[0]
    found = IntegerRows.blank(rows, form.tiles * 4, matrix.low.device)
    stages = STAGES if form.table is None else 1  # loads from the table would be pipelined as well
    _integer_weights_kernel[triton.cdiv(form.tiles, STEPS), triton.cdiv(rows, ROWS)](
        **matrix.operands,
        out=found.codes,
        out_scales=found.scales,
        rows=rows,
        **form.sizes,
        **form.constants,
        ROWS=ROWS,
        STEPS=STEPS,
        STAGES=stages,
        num_stages=stages,
    )
    return found


def integer_inputs(x: Tensor) -> IntegerRows:
    """Return x, bfloat16 [tokens, columns], as 8-bit integers. Columns are padded with zeros to a multiple of 128."""
    tokens, columns = x.shape
    tiles = triton.cdiv(columns, 128)
    found = IntegerRows.blank(tokens, tiles * 4, x.device)
    _integer_inputs_kernel[tiles, triton.cdiv(tokens, ROWS)](x, found.codes, found.scales, tokens, columns, ROWS=ROWS)
    return found


def integer_gated(gate_up: Tensor, gate: str) -> IntegerRows:
    """Return gate(first half) * second half of each row, as `integer_inputs` does. `gate` is the value of a `Gate`."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    tiles = triton.cdiv(width, 128)
    found = IntegerRows.blank(tokens, tiles * 4, gate_up.device)
    _integer_gate_kernel[tiles, triton.cdiv(tokens, ROWS)](
        gate_up, found.codes, found.scales, tokens, width, GATE=gate, ROWS=ROWS
    )
    return found
