"""RMS and layer normalization of rows on a GPU. Reference implementation: `reference.normalize`.

Lower bound: memory traffic. A token of width n reads 4 * n bytes and writes 2 * n, or moves 12 * n in all if the result
is added to the residual stream. A row stays in registers, so nothing is read twice. The tile shape depends only on the
width, so the bits of a row are the same in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model_config import NormKind
from engine.operations import Norm

TILE = 2048  # minimum number of elements per program; narrow rows share a program
LANE_ELEMENTS = 8  # elements per thread


@triton.jit(do_not_specialize=["tokens"])  # one compiled kernel for all batch sizes
def _norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    sum_scale: tl.tensor,
    CENTERED: tl.constexpr,
    BIASED: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < tokens)[:, None] & (columns < width)[None, :]
    offsets = rows.to(tl.int64)[:, None] * width + columns[None, :]
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        values = tl.where(inside, values - (tl.sum(values, 1) / width)[:, None], 0.0)
    slope = tl.load(weight + columns, mask=columns < width, other=0.0)
    result = values * tl.rsqrt(tl.sum(values * values, 1) / width + epsilon)[:, None] * slope[None, :]
    if BIASED:
        result += tl.load(bias + columns, mask=columns < width, other=0.0)[None, :]
    if ADD:
        result = (result + tl.load(out + offsets, mask=inside, other=0.0)) * sum_scale
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)


def normalize(x: Tensor, norm: Norm, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the normalized rows of x [tokens, n], which may have any float dtype."""
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    _launch(x, norm, out, add=False)
    return out


def normalize_add(x: Tensor, norm: Norm, add_to: Tensor) -> Tensor:
    """Add the normalized rows of x to `add_to`, float32 or bfloat16 [tokens, n], in place, and return it.

    If the norm is narrower than rows, each of their parts is normalized. The sum is multiplied by its `sum_scale`.
    """
    _launch(x, norm, add_to, add=True)
    return add_to


def _launch(x: Tensor, norm: Norm, out: Tensor, *, add: bool) -> None:
    width = len(norm.weight)
    count = x.numel() // width  # of rows, or of their parts
    rows, block, warps = _tile(width)
    _norm_kernel[(triton.cdiv(count, rows),)](
        x,
        norm.weight,
        norm.weight if norm.bias is None else norm.bias,
        out,
        count,
        width,
        norm.epsilon,
        norm.sum_scale,
        CENTERED=norm.kind is NormKind.LAYER,
        BIASED=norm.bias is not None,
        ADD=add,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )


def _tile(width: int) -> tuple[int, int, int]:
    """Return (rows, columns, warps) of a program, for rows of this width."""
    block = triton.next_power_of_2(width)
    rows = max(1, TILE // block)
    return rows, block, min(32, max(4, rows * block // (32 * LANE_ELEMENTS)))
