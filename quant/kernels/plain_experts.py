"""Multiply tokens by the plain matrices of their experts. Tested against `reference.expert_product`.

The lower bound is reading the experts in use once: 9.4 MB per expert of 768 columns and 2048 inputs in bfloat16, or 2.8
us on an H100. For many tokens it is the matrix units.
"""

import triton
import triton.language as tl
from torch import Tensor

from quant.kernels.token_tiles import TokenTiles, input_rows, slots_of_tile

ROWS, DEPTH, STAGES = 64, 64, 3
LEAST_TOKENS = 16  # of a tile: a dimension of a product of matrix units


@triton.jit(do_not_specialize=["count", "sharing"])
def _plain_kernel(
    x: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    experts: tl.tensor,
    slots: tl.tensor,
    count: tl.tensor,
    sharing: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    out_stride: tl.tensor,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    expert = tl.load(experts + tl.program_id(1))
    if expert < 0:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    slot = slots_of_tile(experts, slots, tl.program_id(1), tl.arange(0, TOKENS)[None, :], count, TOKENS)
    depth = tl.arange(0, DEPTH)
    of_rows = values + (tl.minimum(row, rows - 1) + expert.to(tl.int64) * rows) * columns + depth[None, :]
    of_slots = x + input_rows(experts, tl.minimum(slot, count - 1), sharing).to(tl.int64) * columns + depth[:, None]
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in tl.range(0, columns, DEPTH):
        weights = tl.load(of_rows + start, mask=depth[None, :] < columns - start, other=0.0)
        inputs = tl.load(of_slots + start, mask=depth[:, None] < columns - start, other=0.0)
        sums = tl.dot(weights, inputs, sums)
    out_at = out + slot.to(tl.int64) * out_stride + row
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=(row < rows) & (slot < count))


def plain_expert_product(values: Tensor, x: Tensor, out: Tensor, tiles: TokenTiles) -> None:
    """Write the product of each slot and its expert to `out` [slots, rows of an expert].

    `values`: the rows of all experts, bfloat16 [experts * rows, columns]. x: [tokens or slots, columns], bfloat16 and
    contiguous.
    """
    rows, columns = out.shape[1], values.shape[1]
    tokens = max(LEAST_TOKENS, tiles.tokens)
    _plain_kernel[triton.cdiv(rows, ROWS), tiles.number](
        x, values, out, tiles.experts, tiles.slots, tiles.count, tiles.count // len(x), rows, columns, out.stride(0),
        ROWS=ROWS, TOKENS=tokens, DEPTH=DEPTH, num_warps=4 if tokens < ROWS else 8, num_stages=STAGES,
    )  # fmt: skip
