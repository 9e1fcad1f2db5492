"""Multiply slots and their packed experts in integer matrix units, for prompts on GeForce cards.

A program unpacks 128 columns of its rows to 8-bit integers (`integer_spans`), which stay in the registers in which
matrix units take them, and multiplies each span of 32 columns. Sums of a span are exact integers, and are added times
both scales to float32 sums. Inputs are rounded before (`integer_rows`).

Lower bound: 2 * rows * slots * columns operations of the matrix units. A warp takes 20 instructions for each matrix
instruction, which occupies the matrix unit for 16 clocks: three for each of its four results, loads, and unpacking.
With minimums, zero points, a table, or groups of 16 columns, it takes 27 to 29. In bfloat16, the same products occupy
the matrix unit for 64 clocks (`python -m tests.kernels.expert_products`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.cuda.matrix import PackedMatrix
from quant.kernels.integer_rows import IntegerRows
from quant.kernels.integer_spans import columns_of_integers, four_columns, four_parts, integer_spans
from quant.kernels.reference import SPAN
from quant.kernels.result_type import result_operands, store_tile
from quant.kernels.token_tiles import TokenTiles, input_rows, slots_of_tile

SLOTS = 64  # of a tile; for more, as many slots are empty as unpacking saves
ROWS, WARPS, STAGES = 128, 4, 3  # of a program
# for codes of 8 bits, and for tables, whose values move through shared memory: two programs fit a multiprocessor
FEWER_STAGES = 2
SUM_ROWS = 128  # rows of a program that adds spans


@triton.jit
def _add_span(
    sums: tl.tensor,
    integers: tl.tensor,
    scale: tl.tensor,
    constant: tl.tensor,
    x: tl.tensor,
    x_scales: tl.tensor,
    x_sums: tl.tensor,
    at: tl.tensor,
    own_token: tl.tensor,
    UNIT: tl.constexpr,
) -> tl.tensor:
    """Add the product of a span. `at`: the index of its first row of x among the rows of all spans."""
    x_at = x + (at + own_token)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inputs = columns_of_integers(tl.load(x_at), UNIT)
    whole = tl.dot(integers, tl.trans(inputs), out_dtype=tl.int32)
    sums += whole.to(tl.float32) * (scale[:, None] * tl.load(x_scales + at + own_token)[None, :])
    if x_sums is not None:
        sums -= constant[:, None] * tl.load(x_sums + at + own_token)[None, :]
    return sums


@triton.jit(
    do_not_specialize=[
        "unit",
        "tokens",
        "sharing",
        "x_rows",
        "rows",
        "columns",
        "tiles",
        "groups",
        "chunks",
        "blocks",
        "out_stride",
        "add",
        "rounded",
    ]
)
def _integer_experts_kernel(
    low: tl.tensor,
    high: tl.tensor,
    scales: tl.tensor,
    sub_scales: tl.tensor,
    zeros: tl.tensor,
    numbers: tl.tensor,
    scale_table: tl.tensor,
    scale_offset: tl.tensor,
    unit: tl.tensor,
    x: tl.tensor,
    x_scales: tl.tensor,
    x_sums: tl.tensor,
    out: tl.tensor,
    experts: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    sharing: tl.tensor,
    x_rows: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    tiles: tl.tensor,
    groups: tl.tensor,
    chunks: tl.tensor,
    blocks: tl.tensor,
    out_stride: tl.tensor,
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
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    expert = tl.load(experts + tl.program_id(1))
    if expert < 0:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    own_row = tl.minimum(row, rows - 1).to(tl.int64) + expert * rows
    token = slots_of_tile(experts, slots, tl.program_id(1), tl.arange(0, TOKENS), tokens, TOKENS)
    own_token = input_rows(experts, tl.minimum(token, tokens - 1), sharing)
    step = x_rows.to(tl.int64)
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for tile in tl.range(tiles, num_stages=STAGES):
        integers, scale, constant = integer_spans(
            low, high, scales, sub_scales, zeros, numbers, scale_table, scale_offset, unit, own_row, tile, rows, tiles,
            groups, chunks, blocks, GROUP, UNIT, LOW, HIGH, RATIO, ZERO, MINIMUMS, SUB_SCALE_ZERO, NIBBLES,
            NESTED_BLOCK,
        )  # fmt: skip
        i0, i1, i2, i3 = four_parts(integers)
        s0, s1, s2, s3 = four_columns(scale)
        c0, c1, c2, c3 = four_columns(constant)
        at = step * (4 * tile)
        sums = _add_span(sums, i0, s0, c0, x, x_scales, x_sums, at, own_token, UNIT)
        sums = _add_span(sums, i1, s1, c1, x, x_scales, x_sums, at + step, own_token, UNIT)
        sums = _add_span(sums, i2, s2, c2, x, x_scales, x_sums, at + 2 * step, own_token, UNIT)
        sums = _add_span(sums, i3, s3, c3, x, x_scales, x_sums, at + 3 * step, own_token, UNIT)
    store_tile(out, sums, None, row, rows, experts, slots, tokens, out_stride, 0, add, rounded, TOKENS)


@triton.jit(do_not_specialize=["count"])
def _span_sums_kernel(
    codes: tl.tensor, scales: tl.tensor, sums: tl.tensor, count: tl.tensor, SPAN: tl.constexpr, ROWS: tl.constexpr
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = row < count
    at = codes + row[:, None].to(tl.int64) * SPAN + tl.arange(0, SPAN)[None, :]
    total = tl.sum(tl.load(at, mask=kept[:, None], other=0).to(tl.int32), 1)
    tl.store(sums + row, total.to(tl.float32) * tl.load(scales + row, mask=kept, other=0.0), mask=kept)


def span_sums(x: IntegerRows) -> Tensor:
    """Return the sums of the values of each span, float32 [spans, rows]."""
    sums = torch.empty_like(x.scales)
    _span_sums_kernel[triton.cdiv(sums.numel(), SUM_ROWS),](
        x.codes, x.scales, sums, sums.numel(), SPAN=SPAN, ROWS=SUM_ROWS
    )
    return sums


def integer_expert_product(matrix: PackedMatrix, x: IntegerRows, out: Tensor, tiles: TokenTiles) -> None:
    """Write the product of each slot and its expert to `out` [slots, rows of an expert].

    The matrix has the rows of all experts, no order of columns, and `PackedForm.has_integers`. x has a row for each
    slot or token. Tiles have SLOTS slots. `out` may be a range of columns of a wider tensor.
    """
    form, count = matrix.form, out.shape[1]
    stages = STAGES if form.table is None and form.bits < 8 else FEWER_STAGES
    _integer_experts_kernel[triton.cdiv(count, ROWS), tiles.number](
        **matrix.operands | {"numbers": matrix.number_integers},
        unit=form.integer_table[1],
        x=x.codes,
        x_scales=x.scales,
        x_sums=span_sums(x) if form.has_constants else None,
        **result_operands(out, routed=True),
        experts=tiles.experts,
        slots=tiles.slots,
        tokens=tiles.count,
        sharing=tiles.count // x.count,
        x_rows=x.count,
        rows=count,
        **form.sizes,
        out_stride=out.stride(0),
        **form.constants,
        ROWS=ROWS,
        TOKENS=SLOTS,
        STAGES=stages,
        num_warps=WARPS,
        num_stages=stages,
    )
