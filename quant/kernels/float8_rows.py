"""Activations as 8-bit floats (e4m3), each token with a scale of its own, for matrix units of sm_89 and newer.

The floor is the traffic: a row is read once and a byte is written for each element.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.cuda.float8 import ALIGNMENT

LARGEST = 448.0  # of e4m3
SMALLEST = 2.0**-100  # a row of smaller numbers is one of zeros: its scale would not be a normal number


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
    """x [tokens, inputs] bfloat16 or float32 -> e4m3 as uint8 [tokens, inputs, zeros up to `ALIGNMENT`], and the scale
    of each token, float32 [tokens, 1]. Value = code * scale. A row with NaN or infinity gives NaN or zeros."""
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
