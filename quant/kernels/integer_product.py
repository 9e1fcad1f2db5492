"""Multiply rows of 8-bit integers (`integer_rows`) in integer matrix units, for prompts on GeForce cards.

These cards multiply 8-bit integers four times as fast as bfloat16 with float32 sums. A step multiplies 32 columns,
whose sums are exact integers, and adds them times both scales to float32 sums.

Lower bound: 2 * rows * tokens * columns operations of the matrix units. A warp takes 17 instructions for each matrix
instruction, which occupies the matrix unit for 16 clocks: three for each of its four results, and loads.
"""

import triton
import triton.language as tl
from torch import Tensor

from quant.kernels.integer_rows import IntegerRows
from quant.kernels.reference import SPAN
from quant.kernels.result_type import result_operands, store_result

ROWS, TOKENS, WARPS, STAGES = 128, 128, 8, 3  # of a program


@triton.jit(do_not_specialize=["rows", "tokens", "spans", "out", "out_stride", "add", "rounded"])
def _integer_product_kernel(
    codes: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    x_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    spans: tl.tensor,
    out_stride: tl.tensor,
    add: tl.tensor,
    rounded: tl.tensor,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    # programs with adjacent numbers share rows, whose codes take more memory than those of the tokens
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    own_row, own_token = tl.minimum(row, rows - 1), tl.minimum(token, tokens - 1)
    column = tl.arange(0, SPAN)[None, :]
    codes_at = codes + own_row[:, None].to(tl.int64) * SPAN + column
    x_at = x + own_token[:, None].to(tl.int64) * SPAN + column
    scales_at, x_scales_at = scales + own_row, x_scales + own_token
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for _ in tl.range(spans, num_stages=STAGES):
        own_scales, of_tokens = tl.load(scales_at), tl.load(x_scales_at)
        whole = tl.dot(tl.load(codes_at), tl.trans(tl.load(x_at)), out_dtype=tl.int32)
        sums += whole.to(tl.float32) * (own_scales[:, None] * of_tokens[None, :])
        codes_at += rows * SPAN
        x_at += tokens * SPAN
        scales_at += rows
        x_scales_at += tokens
    kept = (row < rows)[:, None] & (token < tokens)[None, :]
    if bias is not None:
        sums += tl.load(bias + row, mask=row < rows, other=0.0)[:, None]
    first = (tl.program_id(0) * TOKENS).to(tl.int64) * out_stride
    at = tl.arange(0, TOKENS)[None, :] * out_stride + row[:, None]
    store_result(out, first, at, sums, kept, add, rounded)


def integer_product(weights: IntegerRows, x: IntegerRows, out: Tensor, *, bias: Tensor | None, add: bool) -> None:
    """Write x times the weights, plus `bias` (float32 [rows]), to `out` [tokens, rows].

    With `add`, the product is added to `out`. `out` may be a range of columns of a wider tensor.
    """
    rows, tokens = weights.count, x.count
    _integer_product_kernel[triton.cdiv(tokens, TOKENS), triton.cdiv(rows, ROWS)](
        weights.codes,
        weights.scales,
        x.codes,
        x.scales,
        bias,
        rows=rows,
        tokens=tokens,
        spans=weights.spans,
        out_stride=out.stride(0),
        **result_operands(out, add=add),
        SPAN=SPAN,
        ROWS=ROWS,
        TOKENS=TOKENS,
        STAGES=STAGES,
        num_warps=WARPS,
    )
