"""Convert rows of a matrix of 8-bit floats to bfloat16 or float32.

Used for embedding look-ups, and for prompts that are long enough to be worth a copy of the weight in 16 bits. The lower
bound is memory traffic: one byte per element is read, and two or four are written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.cuda.float8 import Float8Matrix

ROWS, COLUMNS = 8, 512  # rows and columns per program


@triton.jit(do_not_specialize=["count", "row_scales", "height", "width"])
def _unpack_float8_kernel(
    codes: tl.tensor,
    scales: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    columns: tl.tensor,
    row_codes: tl.tensor,
    row_scales: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    EXPONENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = tl.load(ids + index, mask=index < count, other=0) if ids is not None else tl.minimum(index, count - 1)
    row = row[:, None].to(tl.int64)
    inside = (index < count)[:, None] & (column < columns)
    code = tl.load(codes + row * row_codes + column, mask=inside, other=0).to(tl.uint32)
    # The byte's fields move to the fields of a float32, whose exponent is then too small by 120, or by 112 for e5m2.
    bits = (code & 0x80) << 24 | (code & 0x7F) << (20 if EXPONENT == 4 else 21)
    power: tl.constexpr = 2.0**120 if EXPONENT == 4 else 2.0**112
    scale = tl.load(scales + row // height * row_scales + column // width, mask=inside, other=0.0)
    values = bits.to(tl.float32, bitcast=True) * power * scale
    tl.store(out + index[:, None].to(tl.int64) * columns + column, values.to(out.dtype.element_ty), mask=inside)


def unpacked(weight: Float8Matrix, out_dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """Return the rows `ids` (int64 [n], in range; None for all) in `out_dtype`, [n, inputs]."""
    (rows, columns), (height, width) = weight.shape, weight.block
    count = rows if ids is None else len(ids)
    out = torch.empty(count, columns, dtype=out_dtype, device=weight.codes.device)
    _unpack_float8_kernel[triton.cdiv(count, ROWS), triton.cdiv(columns, COLUMNS)](
        weight.codes,
        weight.scales,
        ids,
        out,
        count,
        columns,
        weight.codes.shape[1],
        weight.scales.shape[1],
        height,
        width,
        EXPONENT=weight.exponent_bits,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
    return out
