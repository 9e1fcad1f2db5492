"""Normalization on a GPU: of rows, each by its own values alone. The twins are `reference.rms_norm` and torch's
`layer_norm`.

The floor is the traffic: of a token of width n, 4 * n bytes are read and 2 * n written, or 12 * n in all where the
result is added to the residual stream. A row stays in registers, so that nothing is read twice. A tile's shape depends
on the width alone: a row's bits are the same in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements that a program has at least: narrow rows share one
LANE_ELEMENTS = 8  # of each thread


@triton.jit(do_not_specialize=["tokens"])  # one machine code for any batch
def _rms_norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < tokens)[:, None] & (columns < width)[None, :]
    places = rows.to(tl.int64)[:, None] * width + columns[None, :]
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(weight + columns, mask=columns < width, other=0.0)
    result = values * tl.rsqrt(tl.sum(values * values, 1) / width + epsilon)[:, None] * slope[None, :]
    if ADD:
        result += tl.load(out + places, mask=inside, other=0.0)
    tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])  # one machine code for any batch
def _layer_norm_kernel(
    x: tl.tensor,
    plus: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    PLUS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < tokens)[:, None] & (columns < width)[None, :]
    places = rows.to(tl.int64)[:, None] * width + columns[None, :]
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if PLUS:
        values += tl.load(plus + places, mask=inside, other=0.0).to(tl.float32)
    centered = tl.where(inside, values - (tl.sum(values, 1) / width)[:, None], 0.0)
    slope = tl.load(weight + columns, mask=columns < width, other=0.0)
    offset = tl.load(bias + columns, mask=columns < width, other=0.0)
    spread = tl.rsqrt(tl.sum(centered * centered, 1) / width + epsilon)
    result = centered * spread[:, None] * slope[None, :] + offset[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Root mean square normalization (arXiv:1910.07467): x [tokens, n] of any float type, weight float32 [n]."""
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    _launch_rms_norm(x, weight, epsilon, out, add=False)
    return out


def rms_norm_add(x: Tensor, weight: Tensor, epsilon: float, add_to: Tensor) -> Tensor:
    """The same, added to `add_to` float32 [tokens, n] in place, which is returned."""
    _launch_rms_norm(x, weight, epsilon, add_to, add=True)
    return add_to


def _launch_rms_norm(x: Tensor, weight: Tensor, epsilon: float, out: Tensor, *, add: bool) -> None:
    tokens, width = x.shape
    rows, block, warps = _tile(width)
    _rms_norm_kernel[(triton.cdiv(tokens, rows),)](
        x, weight, out, tokens, width, epsilon, ADD=add, ROWS=rows, BLOCK=block, num_warps=warps
    )


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
    *,
    plus: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Layer normalization (arXiv:1607.06450) of x, or of x + plus: both [tokens, n] of any float types; weight and bias
    float32 [n]."""
    tokens, width = x.shape
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    rows, block, warps = _tile(width)
    _layer_norm_kernel[(triton.cdiv(tokens, rows),)](
        x,
        x if plus is None else plus,
        weight,
        bias,
        out,
        tokens,
        width,
        epsilon,
        PLUS=plus is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )
    return out


def _tile(width: int) -> tuple[int, int, int]:
    """Rows and columns of a program, and its warps."""
    block = triton.next_power_of_2(width)
    rows = max(1, TILE // block)
    return rows, block, min(32, max(4, rows * block // (32 * LANE_ELEMENTS)))
