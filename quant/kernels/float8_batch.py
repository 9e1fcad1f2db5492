"""Multiply matrices of 8-bit floats (e4m3) by many tokens, on the matrix units for 8-bit floats of sm_89 and newer.

Activations are quantized once, with a scale for each token. A program multiplies tiles of codes. Every 128 columns, it
adds the matrix unit's sum to a float32 total: the units of Ada and Hopper keep only about 14 bits of a sum. A scale of
128 columns multiplies the sum at that point. Scales of rows and tokens multiply the total.

Source: "Increasing accumulation precision" in section 3.3.2 of the DeepSeek-V3 technical report.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.cuda.float8 import Float8Matrix
from quant.kernels import float8_rows
from quant.kernels.card import Card

CODES = torch.float8_e4m3fn
DEPTH = 128  # columns of a step; scale blocks must be a multiple of this wide
# Least number of programs per multiprocessor, so that at most a quarter of the time of the last turns is lost. A larger
# tile of a matrix takes at least twice the tokens, so that numbers of tokens that double meet all tiles.
TURNS = 1.5


@dataclass(frozen=True, slots=True)
class Tile:
    """The size of the tile that one program computes, and the program's warps and pipeline stages."""

    rows: int
    tokens: int
    warps: int
    stages: int  # number of steps whose codes are being loaded or multiplied at the same time


# From large to small: a large tile loads fewer bytes for each product. Larger ones than these spill registers.
TILES = (Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 64, 4, 3))


# Without do_not_specialize, Triton would compile separate kernels for the value 1 and for multiples of 16.
@triton.jit(do_not_specialize=["tokens", "height", "row_scales"])
def _float8_batch_kernel(
    x: tl.tensor,
    x_scales: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_scales: tl.tensor,
    height: tl.tensor,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    # rows and tokens after the last ones repeat them, and their results are not stored
    own_row, own_token = tl.minimum(row, rows - 1), tl.minimum(token, tokens - 1)
    column = tl.arange(0, DEPTH)
    codes_at = codes + own_row[:, None].to(tl.int64) * columns + column[None, :]
    x_at = x + own_token[:, None].to(tl.int64) * columns + column[None, :]
    own_scales = own_row // height * row_scales  # 32 bits are enough: a scale is that of at least 128 weights
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in tl.range(0, columns, DEPTH):
        if EVEN:
            weights, inputs = tl.load(codes_at + start), tl.load(x_at + start)
        else:
            inside = column[None, :] < columns - start
            weights = tl.load(codes_at + start, mask=inside, other=0.0)
            inputs = tl.load(x_at + start, mask=inside, other=0.0)
        scale = tl.load(scales + (own_scales + start // WIDTH))[:, None] if WIDTH > 0 else 1.0
        # The compiler would replace `total + sums` by sums of the matrix unit.
        total = tl.fma(tl.dot(weights, tl.trans(inputs)), scale, total)
    if WIDTH == 0:
        total *= tl.load(scales + own_scales)[:, None]
    total *= tl.load(x_scales + own_token)[None, :]
    if bias is not None:
        total += tl.load(bias + own_row)[:, None]
    out_at = out + token[None, :].to(tl.int64) * rows + row[:, None]
    stored = (row < rows)[:, None] & (token < tokens)[None, :]
    if ADD:
        total += tl.load(out_at, mask=stored, other=0.0)
    tl.store(out_at, total.to(out.dtype.element_ty), mask=stored)


def supports(weight: Float8Matrix) -> bool:
    """Return whether `multiply` supports a weight: e4m3, with scales of rows or of multiples of 128 columns."""
    return weight.exponent_bits == 4 and (weight.scaled_by_row or weight.block[1] % DEPTH == 0)


def tile_of(rows: int, tokens: int, card: Card) -> Tile:
    """Return the largest tile whose programs keep the multiprocessors of a card busy, else the smallest."""
    for tile in TILES:
        programs = triton.cdiv(rows, tile.rows) * triton.cdiv(tokens, tile.tokens)
        if tile.tokens < 2 * tokens and programs >= TURNS * card.multiprocessors:
            return tile
    return TILES[-1]


def multiply(
    x: Tensor,
    weight: Float8Matrix,
    *,
    card: Card,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """Multiply x [tokens, inputs], bfloat16 or float32, by `weight`, and add `bias` (float32 [outputs]).

    Returns [tokens, outputs] in `out_dtype`. With `add_to` (float32, the same shape), the product is added to it in
    place. Requires `supports`, and a card that multiplies 8-bit floats.
    """
    (tokens, _), (rows, columns) = x.shape, weight.codes.shape
    out = torch.empty(tokens, rows, dtype=out_dtype, device=x.device) if add_to is None else add_to
    codes, x_scales = float8_rows.quantized(x)
    tile = tile_of(rows, tokens, card)
    # token tiles are the fast axis: programs that run at the same time share rows of the weight
    _float8_batch_kernel[triton.cdiv(tokens, tile.tokens), triton.cdiv(rows, tile.rows)](
        codes.view(CODES),
        x_scales,
        weight.codes.view(CODES),
        weight.scales,
        bias,
        out,
        tokens,
        rows,
        columns,
        row_scales=weight.scales.shape[1],
        height=weight.block[0],
        WIDTH=0 if weight.scaled_by_row else weight.block[1],
        EVEN=columns % DEPTH == 0,
        ADD=add_to is not None,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        DEPTH=DEPTH,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
