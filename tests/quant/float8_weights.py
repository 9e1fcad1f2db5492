"""Random weights of 8-bit floats."""

import torch

from quant.tensor import Float8Tensor, blocks


def float8_weight(
    shape: tuple[int, int], block: tuple[int | None, int | None], dtype: torch.dtype = torch.float8_e4m3fn
) -> Float8Tensor:
    """Return a weight of random finite numbers, some of them subnormal. A block extent of None covers the matrix."""
    size = (min(block[0] or shape[0], shape[0]), min(block[1] or shape[1], shape[1]))
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    values = codes.view(dtype)
    finite = torch.where(values.float().isfinite(), codes, codes & 0x83).view(dtype)
    scale = torch.rand(blocks(shape, size)) * 0.01 + 0.001
    return Float8Tensor(shape, "F8", finite, scale, size)
