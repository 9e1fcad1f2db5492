"""Plain torch: every canonical form dequantized and multiplied so that reading it shows it is right.

The oracle of the fast kernels, and the last resort of a machine that none of them supports. A row of a product depends
on that row alone, bit for bit: rows are multiplied in tiles of a fixed height, so that the matrix library always sees
the same shape and therefore sums in the same order, whatever else is in the batch.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from quant.tensor import AffineTensor, PlainTensor, QTensor

ROW_TILE = 8  # rows per library call: more would speed prompts up and slow single tokens down


def dequantize(weight: QTensor) -> Tensor:
    """The values of `weight`, float32, in its shape."""
    if isinstance(weight, PlainTensor):
        return weight.values.float()
    rows, columns = weight.shape
    codes = unpack_codes(weight).float().reshape(rows, columns // weight.group, weight.group)
    values = weight.scales.float().unsqueeze(-1) * (codes - weight.zero)
    if weight.minimums is not None:
        values -= weight.minimums.float().unsqueeze(-1)
    return values.reshape(rows, columns)


def dequantize_rows(weight: QTensor, rows: Tensor) -> Tensor:
    """The rows `rows` (int64 [n]) of a matrix, float32 [n, columns]."""
    if isinstance(weight, PlainTensor):
        return weight.values[rows].float()
    picked = replace(
        weight,
        shape=(len(rows), weight.shape[1]),
        codes=weight.codes[rows],
        scales=weight.scales[rows],
        minimums=None if weight.minimums is None else weight.minimums[rows],
    )
    return dequantize(picked)


def unpack_codes(weight: AffineTensor) -> Tensor:
    """The integer codes of `weight`, [rows, columns]: int8 as stored for 8 bits, uint8 for 4."""
    if weight.bits == 8:
        return weight.codes
    return torch.stack((weight.codes & 0x0F, weight.codes >> 4), dim=-1).flatten(1)


def matmul(x: Tensor, values: Tensor) -> Tensor:
    """x [rows, inputs] times values [outputs, inputs] transposed, float32 -> [rows, outputs].

    2 * rows * outputs * inputs operations, rounded up to tiles of `ROW_TILE` rows.
    """
    rows = len(x)
    if rows == 0:
        return x.new_empty(0, len(values))
    padded = F.pad(x, (0, 0, 0, -rows % ROW_TILE))
    return torch.cat([padded[at : at + ROW_TILE] @ values.T for at in range(0, rows, ROW_TILE)])[:rows]
