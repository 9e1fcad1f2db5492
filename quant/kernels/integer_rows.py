"""Quantize rows to 8-bit integers with a scale for each 32 columns, for products in integer matrix units.

A value is code * scale. The 32 columns of all rows are adjacent in memory, so that a tile of the product is one
contiguous piece. The codes of inputs are rounded, and the largest of 32 is 127.

Most packed matrices have values code * s - b, where s and b are the same for 32 columns. Here, such a code becomes k *
code, with a whole number k, so that only k * b / s is rounded. Four numbers k, the largest for which all codes fit into
8 bits, are compared with rounding, and the most exact is used. The values of other matrices (groups of 16 columns,
tables of fractions) are rounded as inputs.

The lower bound is memory traffic: for each packed weight of 4 bits, about 0.56 bytes are read and 1.13 written.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.cuda.matrix import PackedMatrix
from quant.kernels.gating import gated_values
from quant.kernels.packed_scales import of_spans
from quant.kernels.packed_values import in_column_order, packed_columns, scaled, unpacked_tiles
from quant.kernels.reference import SPAN

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
def peak_factor(peak: tl.tensor) -> tl.tensor:
    """Return codes per unit of the values of spans, given their largest magnitudes."""
    SMALLEST: tl.constexpr = 2.0**-100  # spans whose magnitudes are all smaller become zeros
    return 127.0 / tl.maximum(peak, SMALLEST)


@triton.jit
def rounded(values: tl.tensor) -> tl.tensor:
    """Return float32 values rounded to whole numbers below 2 ** 22 in magnitude, whose low bits are the integers."""
    return values + 12582912.0  # 1.5 * 2 ** 23


@triton.jit
def step_factor(peak: tl.tensor, step: tl.tensor, minimum: tl.tensor) -> tl.tensor:
    """Return codes per unit of spans whose values are multiples of `step` minus `minimum`.

    If no multiple has a smaller error, this is `peak_factor`.
    """
    CHOICES: tl.constexpr = 4
    MEAN_ERROR: tl.constexpr = 0.28867513 / 127  # of codes by peaks, relative to the largest value
    BY_PEAK: tl.constexpr = 0.5  # means codes by peaks; a number of codes per step is at least 1
    by_peak = peak_factor(peak)
    per_unit = 1.0 / tl.abs(step)  # may be infinite, and then the number of steps NaN; no comparison accepts these
    steps = minimum * per_unit
    most = tl.floor(by_peak / per_unit + 1e-3)
    least, found = BY_PEAK * MEAN_ERROR * peak * per_unit, tl.full(peak.shape, BY_PEAK, tl.float32)
    for less in tl.static_range(CHOICES):
        codes = most - less  # per step
        multiple = steps * codes
        error = tl.abs(multiple - (rounded(multiple) - 12582912.0))
        better = (codes >= 1) & (error * found < least * codes)  # error / codes is less than least / found
        least, found = tl.where(better, error, least), tl.where(better, codes, found)
    return tl.where(found > BY_PEAK, found * per_unit, by_peak)


@triton.jit
def integer_codes(
    values: tl.tensor, s: tl.tensor, b: tl.tensor, MINIMUMS: tl.constexpr, HAS_STEPS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the codes, int8 [n, 4, 32], and scales, [n, 4], of the spans of weights as `scaled` orders them.

    `s` and `b` are those of `unpacked_tiles`; HAS_STEPS: see `PackedForm.has_steps`.
    """
    N: tl.constexpr = values.shape[0]
    spans = values.reshape(N, 4, 4, 8)
    peak = tl.max(tl.max(tl.abs(spans), 3), 1)
    if HAS_STEPS:  # all threads of a row have the same s and b
        minimum = of_spans(tl.max(b, 1)) if MINIMUMS else peak * 0.0
        factor = step_factor(peak, of_spans(tl.max(s, 1)), minimum)
    else:
        factor = peak_factor(peak)
    whole = rounded(spans * factor[:, None, :, None]).to(tl.int32, bitcast=True)
    scale = 1.0 / factor + tl.sum(tl.sum(spans * 0.0, 3), 1)
    return (whole & 0xFF).to(tl.int8).reshape(N, 4, 32), scale


@triton.jit
def _store_codes(
    whole: tl.tensor,
    scale: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    tile: tl.tensor,
    rows: tl.tensor,
) -> None:
    """Store codes, int8 [n, 128], and scales, [n, 4], of the rows `row`, [n], in a tile of 128 columns."""
    N: tl.constexpr = whole.shape[0]
    span = tile * 4 + tl.arange(0, 4)[None, :]
    at = span.to(tl.int64) * rows + row[:, None]
    kept = (row < rows)[:, None] & (span >= 0)
    tl.store(scales + at, scale, mask=kept)
    codes_at = codes + at[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    tl.store(codes_at, whole.reshape(N, 4, 32), mask=kept[:, :, None])


@triton.jit
def _store_rounded(
    values: tl.tensor, codes: tl.tensor, scales: tl.tensor, row: tl.tensor, tile: tl.tensor, rows: tl.tensor
) -> None:
    """Round values, float32 [n, 128], of the rows `row`, [n], in a tile of 128 columns, and store them.

    A span with NaN or infinity gets the scale NaN.
    """
    N: tl.constexpr = values.shape[0]
    spans = values.reshape(N, 4, 32)
    factor = peak_factor(tl.max(tl.abs(spans), 2))
    whole = rounded(spans * factor[:, :, None]).to(tl.int32, bitcast=True)
    scale = 1.0 / factor + tl.sum(spans * 0.0, 2)
    _store_codes((whole & 0xFF).to(tl.int8).reshape(N, 128), scale, codes, scales, row, tile, rows)


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
    HAS_STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    own_row = tl.minimum(row, rows - 1).to(tl.int64)[:, None]
    first = tl.program_id(0) * STEPS
    for tile in tl.range(first, tl.minimum(first + STEPS, tiles), num_stages=STAGES):
        v, s, b = unpacked_tiles(
            low, high, scales, sub_scales, zeros, numbers, scale_table, scale_offset, own_row, tile, rows, tiles,
            groups, chunks, blocks, GROUP, UNIT, LOW, HIGH, RATIO, ZERO, MINIMUMS, SUB_SCALE_ZERO, NIBBLES,
            NESTED_BLOCK,
        )  # fmt: skip
        # codes in the padding are zeros, but their values may not be
        values = tl.where(tile * 128 + packed_columns(UNIT) < columns, scaled(v, s, b), 0.0)
        whole, scale = integer_codes(values, s, b, MINIMUMS, HAS_STEPS)
        _store_codes(in_column_order(whole, UNIT), scale, out, out_scales, row, tile, rows)


@triton.jit(do_not_specialize=["tokens", "columns"])
def _integer_inputs_kernel(
    x: tl.tensor, codes: tl.tensor, scales: tl.tensor, tokens: tl.tensor, columns: tl.tensor, ROWS: tl.constexpr
) -> None:
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * 128 + tl.arange(0, 128)
    kept = (token < tokens)[:, None] & (column < columns)[None, :]
    values = tl.load(x + token[:, None].to(tl.int64) * columns + column[None, :], mask=kept, other=0.0)
    _store_rounded(values.to(tl.float32), codes, scales, token, tl.program_id(0), tokens)


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
    _store_rounded(gated_values(first, second, GATE), codes, scales, token, tl.program_id(0), tokens)


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
        HAS_STEPS=form.has_steps,
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
