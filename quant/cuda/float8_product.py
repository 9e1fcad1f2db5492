"""Multiply tokens by a matrix of 8-bit floats, by a method chosen for the number of tokens and the card.

- At most FEW_TOKENS tokens, or any number if results must not depend on the batch: the weight is decoded in registers
  and read about once (`float8_matmul`). Activations keep 16 bits.
- More tokens, on cards that multiply 8-bit floats: each token is quantized with its own scale, and the matrix units
  multiply 8-bit floats (`float8_batch`). The weight needs scales of rows, or of blocks of at least 128 columns.
- More tokens otherwise: the weight is copied to bfloat16, and torch multiplies the copy. For 2048 tokens the copy takes
  a tenth of the time on an RTX 3090 and a sixth on an H100, estimated from the numbers of bytes and operations.
"""

import torch
from torch import Tensor

from quant.cuda.float8 import Float8Matrix
from quant.kernels import float8_batch, float8_matmul, float8_unpack
from quant.kernels.card import Card

FEW_TOKENS = 32  # up to this number, one tile holds all tokens, and the weight is read once
# two tiles: the second one finds the weight in the L2 cache, which is faster than making a copy
FEW_TOKENS_OF_A_COPY = 64


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
    """Multiply x [tokens, inputs], bfloat16 or float32, by `weight`, and add `bias` (float32 [outputs]).

    Returns [tokens, outputs] in `out_dtype`. With `add_to` (float32, the same shape), the product is added to it in
    place. With `deterministic`, a row of the result depends only on its own token.
    """
    in_float8 = card.multiplies_float8 and float8_batch.supports(weight)
    if deterministic or len(x) <= (FEW_TOKENS if in_float8 else FEW_TOKENS_OF_A_COPY):
        return float8_matmul.multiply(
            x, weight, deterministic=deterministic, out_dtype=out_dtype, bias=bias, add_to=add_to
        )
    if in_float8:
        return float8_batch.multiply(x, weight, card=card, out_dtype=out_dtype, bias=bias, add_to=add_to)
    product = x.to(torch.bfloat16) @ float8_unpack.unpacked(weight, torch.bfloat16).t()
    if bias is not None:
        product += bias
    return product.to(out_dtype) if add_to is None else add_to.add_(product)
