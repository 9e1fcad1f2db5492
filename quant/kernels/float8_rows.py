"""Quantize activations to 8-bit floats (e4m3), one scale per token, for the matrix units of sm_89 and newer.

The lower bound is memory traffic: a row is read once, and one byte per element is written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.cuda.float8 import ALIGNMENT

LARGEST = 448.0  # largest finite e4m3 value
SMALLEST = 2.0**-100  # rows whose magnitudes are all smaller become zeros, because their scale would be subnormal


@triton.jit
def _quantize_rows_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    width: tl.tensor,
    row_codes: tl.tensor,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(values), 0), SMALLEST)
    # The conversion rounds to nearest, ties to even; NaN stays NaN.
    bits = (values * (LARGEST / peak)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes + row * row_codes + columns, bits, mask=columns < row_codes)
    tl.store(scales + row, peak / LARGEST)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [tokens, inputs], bfloat16 or float32. A value is code * scale.

    Returns the codes, e4m3 as uint8 [tokens, inputs padded with zeros to `ALIGNMENT`], and the scales, float32 [tokens,
    1]. A row with NaN or infinity becomes NaN or zeros.
    """
    tokens, width = x.shape
    row_codes = triton.cdiv(width, ALIGNMENT) * ALIGNMENT
    codes = torch.empty(tokens, row_codes, dtype=torch.uint8, device=x.device)
    scales = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(row_codes)
    _quantize_rows_kernel[tokens,](
        x,
        codes,
        scales,
        width,
        row_codes,
        LARGEST=LARGEST,
        SMALLEST=SMALLEST,
        BLOCK=block,
        num_warps=min(16, max(4, block // 1024)),
    )
    return codes, scales
