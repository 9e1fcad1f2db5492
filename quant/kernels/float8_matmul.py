"""Multiply few tokens by a matrix of 8-bit floats, on any card: bytes are converted exactly to bfloat16 in registers.

The lower bound is reading the weight once: `outputs * inputs` bytes. An H100 delivers 14.5 bytes per clock to each
multiprocessor, which issues 4 instructions of 32 threads in that time: 8.8 instructions for every 32 weights. This
kernel takes 3.2 (on sm_90, 7 instructions decode 4 weights; the rest is for addresses, activations, and the product).

Four bytes are decoded at a time, as two pairs of bfloat16 that take over the byte's fields. Their exponents are too
small by 120 (e4m3) or 112 (e5m2). Two powers of two compensate: one multiplies the activations, so that no product is
subnormal, and one multiplies the sum. The order of a word's bytes does not matter to a matrix unit as long as the
activations have the same order.

A program computes `ROWS` outputs of `TOKENS` tokens. Its warps divide the inputs among them and add their sums at the
end. So one launch has enough programs for a whole card, without a second matrix of partial sums.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.cuda.float8 import Float8Matrix
from quant.kernels.result_type import result_operands, store_result
from quant.kernels.token_tiles import TokenTiles, input_rows, slots_of_tile

DEPTH = 128  # number of inputs that a warp multiplies at a time
AFTER = 2.0**56  # factor that is applied to the sum


@dataclass(frozen=True, slots=True)
class Tile:
    """The size of the tile that one program computes, and the program's warps and pipeline stages."""

    rows: int
    tokens: int
    warps: int
    stages: int  # pipeline stages: number of weight tiles that are being loaded or multiplied at the same time


FEW = Tile(rows=16, tokens=8, warps=4, stages=4)
FIXED = Tile(rows=32, tokens=16, warps=4, stages=3)
MORE = Tile(rows=32, tokens=32, warps=4, stages=3)
# tile for scale blocks narrower than DEPTH, where each element needs its own scale
NARROW = Tile(rows=16, tokens=16, warps=4, stages=1)


@triton.jit
def _decoded(pairs: tl.tensor, EXPONENT: tl.constexpr) -> tl.tensor:
    """Decode the upper byte of each half of uint32 words to bfloat16 [..., 2], the lower half first."""
    fields = (pairs >> 3) & 0x0FE00FE0 if EXPONENT == 5 else (pairs >> 4) & 0x07F007F0
    halves = (pairs & 0x80008000) | fields
    return tl.join((halves & 0xFFFF).to(tl.uint16), (halves >> 16).to(tl.uint16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def _scaled(
    values: tl.tensor, scales: tl.tensor, columns: tl.tensor, WIDTH: tl.constexpr, EXPONENT: tl.constexpr
) -> tl.tensor:
    """Multiply each value by the scale of its block, for blocks narrower than DEPTH."""
    power: tl.constexpr = 2.0**112 if EXPONENT == 5 else 2.0**120
    return (values.to(tl.float32) * power * tl.load(scales + columns // WIDTH)).to(tl.bfloat16)


# Without do_not_specialize, Triton would compile separate kernels for the value 1 and for multiples of 16.
@triton.jit(do_not_specialize=["tokens", "height", "row_scales", "sharing", "add", "rounded"])
def _float8_matmul_kernel(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    experts: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    sharing: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    row_words: tl.tensor,
    row_scales: tl.tensor,
    height: tl.tensor,
    add: tl.tensor,
    rounded: tl.tensor,
    WIDTH: tl.constexpr,
    NARROW: tl.constexpr,
    EXPONENT: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    words_deep: tl.constexpr = DEPTH // 4
    expert = 0
    if experts is not None:
        expert = tl.load(experts + tl.program_id(0))
        if expert < 0:
            return
    token = slots_of_tile(experts, slots, tl.program_id(0), tl.arange(0, TOKENS), tokens, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # rows after the last one repeat it, and their results are not stored
    inside = tl.minimum(row, outputs - 1) + expert * outputs
    slices = tl.arange(0, SLICES)
    word = slices[:, None, None] * words_deep + tl.arange(0, words_deep)[None, None, :]
    column = slices[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None, :]
    x_at = x + input_rows(experts, token, sharing)[None, :, None].to(tl.int64) * inputs + column
    words_at = words + inside[None, :, None].to(tl.int64) * row_words + word
    scales_at = scales + (inside // height)[None, :, None] * row_scales
    known = (token < tokens)[None, :, None]
    total = tl.zeros((SLICES, ROWS, TOKENS), tl.float32)
    for start in tl.range(0, inputs, SLICES * DEPTH):
        if EVEN:
            four = tl.load(words_at + start // 4)
            acts = tl.load(x_at + start, mask=known, other=0.0)
        else:
            four = tl.load(words_at + start // 4, mask=word < row_words - start // 4, other=0)
            acts = tl.load(x_at + start, mask=known & (column < inputs - start), other=0.0)
        four = four.to(tl.uint32, bitcast=True)
        acts = (acts.to(tl.float32) * BEFORE).to(tl.bfloat16)
        acts_even, acts_odd = tl.split(tl.reshape(acts, (SLICES, TOKENS, 2 * words_deep, 2)))
        even, odd = _decoded(four << 8, EXPONENT), _decoded(four, EXPONENT)
        if NARROW:
            first = (start + 4 * word)[:, :, :, None] + 2 * tl.arange(0, 2)[None, None, None, :]
            even = _scaled(even, scales_at[:, :, :, None], tl.minimum(first, inputs - 1), WIDTH, EXPONENT)
            odd = _scaled(odd, scales_at[:, :, :, None], tl.minimum(first + 1, inputs - 1), WIDTH, EXPONENT)
        even = tl.reshape(even, (SLICES, ROWS, 2 * words_deep))
        odd = tl.reshape(odd, (SLICES, ROWS, 2 * words_deep))
        if WIDTH > 0 and not NARROW:
            sums = tl.dot(even, tl.permute(acts_even, (0, 2, 1)))
            sums = tl.dot(odd, tl.permute(acts_odd, (0, 2, 1)), sums)
            block = tl.minimum(start + slices * DEPTH, inputs - 1) // WIDTH
            total += sums * tl.load(scales_at + block[:, None, None])
        else:
            total = tl.dot(even, tl.permute(acts_even, (0, 2, 1)), total)
            total = tl.dot(odd, tl.permute(acts_odd, (0, 2, 1)), total)
    result = tl.sum(total, 0) * AFTER
    if WIDTH == 0:
        result *= tl.load(scales + inside)[:, None]
    if bias is not None:
        result += tl.load(bias + inside)[:, None]
    at = token[None, :].to(tl.int64) * outputs + row[:, None]
    stored = (token < tokens)[None, :] & (row < outputs)[:, None]
    store_result(out, 0, at, result, stored, add, rounded)


def _tile(tokens: int) -> Tile:
    """Return the smallest tile that takes all tokens, so that the weight is read once, else the largest."""
    return next((tile for tile in (FEW, FIXED) if tokens <= tile.tokens), MORE)


def multiply(
    x: Tensor,
    weight: Float8Matrix,
    *,
    deterministic: bool,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """Multiply x [tokens, inputs], bfloat16 or float32, by `weight`, and add `bias` (float32 [outputs]).

    Returns [tokens, outputs] in `out_dtype`. With `add_to` (float32, the same shape), the product is added to it in
    place. With `deterministic`, a row of the result depends only on its own token: the tile is the same for any number
    of tokens.
    """
    tile = NARROW if _is_narrow(weight) else FIXED if deterministic else _tile(len(x))
    shape = len(x), weight.shape[0]
    out = torch.empty(shape, dtype=out_dtype, device=x.device) if add_to is None else add_to
    _launch(x, weight, out, tile, bias, add=add_to is not None)
    return out


def multiply_experts(
    x: Tensor, weight: Float8Matrix, tiles: TokenTiles, outputs: int, *, out_dtype: torch.dtype
) -> Tensor:
    """Return the product of each slot and its expert, [slots, outputs] in `out_dtype`.

    `weight` has `outputs` rows of each expert. x is [tokens or slots, inputs]. A tile has at most `most_slots` slots.
    """
    tile = _expert_tile(weight, tiles.tokens)
    out = torch.empty(tiles.count, outputs, dtype=out_dtype, device=x.device)
    _launch(x, weight, out, tile, None, tiles)
    return out


def most_slots(weight: Float8Matrix) -> int:
    """Return the largest number of slots in a tile of `multiply_experts`."""
    return NARROW.tokens if _is_narrow(weight) else MORE.tokens


def _is_narrow(weight: Float8Matrix) -> bool:
    return not weight.scaled_by_row and weight.block[1] % DEPTH != 0


def _expert_tile(weight: Float8Matrix, slots: int) -> Tile:
    return NARROW if _is_narrow(weight) else next(tile for tile in (FEW, FIXED, MORE) if slots <= tile.tokens)


def _launch(
    x: Tensor,
    weight: Float8Matrix,
    out: Tensor,
    tile: Tile,
    bias: Tensor | None,
    routed: TokenTiles | None = None,
    *,
    add: bool = False,
) -> None:
    (tokens, outputs), inputs, (height, width) = out.shape, weight.shape[1], weight.block
    tiles = routed.number if routed else triton.cdiv(tokens, tile.tokens)
    narrow = _is_narrow(weight)
    _float8_matmul_kernel[tiles, triton.cdiv(outputs, tile.rows)](
        x,
        weight.codes.view(torch.int32),
        weight.scales,
        bias=bias,
        experts=routed and routed.experts,
        slots=routed and routed.slots,
        tokens=tokens,
        sharing=tokens // len(x) if routed else 1,
        outputs=outputs,
        inputs=inputs,
        row_words=weight.codes.shape[1] // 4,
        row_scales=weight.scales.shape[1],
        height=height,
        **result_operands(out, add=add),
        WIDTH=0 if weight.scaled_by_row else width,
        NARROW=narrow,
        EXPONENT=weight.exponent_bits,
        BEFORE=1.0 if narrow else 2.0**56 if weight.exponent_bits == 5 else 2.0**64,
        AFTER=1.0 if narrow else AFTER,
        EVEN=inputs % (tile.warps * DEPTH) == 0,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        SLICES=tile.warps,
        DEPTH=DEPTH,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
