"""Tokens times a matrix of 8-bit floats: which way for how many tokens, on which card.

- A few tokens, and any number where results must not depend on it: the weight is decoded in registers and read about
  once (`float8_matmul`). Activations keep 16 bits.
- More, on cards that multiply 8-bit floats: tokens are quantized, each with its own scale, and torch multiplies. Scales
  of weights must be those of rows: matrix units know no others that all such cards have.
- Else a copy of the weight in bfloat16 is made, and torch multiplies that. Of 2048 tokens' time the copy takes a tenth
  on an RTX 3090 and a sixth on an H100, in the counts of bytes and operations.

Refuses to know how a weight is laid out (`float8`) and how a kernel works.
"""

import torch
from torch import Tensor

from quant.cuda.float8 import Float8Matrix
from quant.kernels import float8_matmul, float8_rows, float8_unpack
from quant.kernels.card import Card

FEW_TOKENS = 32  # one tile: the weight is read once
FEW_TOKENS_OF_A_COPY = 64  # two, of which the second finds the weight in the L2 cache: less than making a copy
LIBRARY_ALIGNMENT = 16  # outputs, of a product of 8-bit floats in torch


def multiply(
    x: Tensor,
    weight: Float8Matrix,
    *,
    card: Card,
    deterministic: bool,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """x [tokens, inputs] bfloat16 or float32 times `weight`, plus `bias` (float32 [outputs]).

    -> [tokens, outputs] in `out_dtype`; or `add_to` (float32, the same shape), to which it is added in place. With
    `deterministic`, a row of the result depends on its own token alone.
    """
    in_float8 = card.multiplies_float8 and _library_multiplies(weight)
    if deterministic or len(x) <= (FEW_TOKENS if in_float8 else FEW_TOKENS_OF_A_COPY):
        return float8_matmul.multiply(
            x, weight, deterministic=deterministic, out_dtype=out_dtype, bias=bias, add_to=add_to
        )
    product = _product_in_float8(x, weight) if in_float8 else _product_of_copy(x, weight)
    if bias is not None:
        product += bias
    return product.to(out_dtype) if add_to is None else add_to.add_(product)


def _library_multiplies(weight: Float8Matrix) -> bool:
    return weight.scaled_by_row and weight.exponent_bits == 4 and weight.shape[0] % LIBRARY_ALIGNMENT == 0


def _product_in_float8(x: Tensor, weight: Float8Matrix) -> Tensor:
    """bfloat16: the only type of a result that the library has for scales by row."""
    codes, scales = float8_rows.quantized(x)
    e4m3 = torch.float8_e4m3fn
    return torch._scaled_mm(
        codes.view(e4m3),
        weight.codes.view(e4m3).t(),
        scale_a=scales,
        scale_b=weight.scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _product_of_copy(x: Tensor, weight: Float8Matrix) -> Tensor:
    return x.to(torch.bfloat16) @ float8_unpack.unpacked(weight, torch.bfloat16).t()
