"""A matrix of 8-bit floats on a GPU: plain data.

The bytes stay as they are in the file, row by row, and are decoded in registers; rows are lengthened by zeros to a
multiple of 16 columns, which real ones are. Scales become float32, and those of whole rows one for each row, so that
rows of several matrices can stand below each other.

The codes of NaN and infinity, which no weight has, count as the numbers that their bits would be.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from quant.tensor import Float8Tensor

ALIGNMENT = 16  # columns: the bytes that a thread loads at once


@dataclass(frozen=True, slots=True)
class Float8Matrix:
    """value = float8(codes) * scales[row // height, column // width]."""

    shape: tuple[int, int]  # outputs, inputs
    codes: Tensor  # uint8 [outputs, inputs rounded up to `ALIGNMENT`]
    scales: Tensor  # float32 [outputs / height, inputs / width], rounded up
    block: tuple[int, int]  # height, width; (1, inputs): a scale for each row
    exponent_bits: int  # 4: e4m3, 5: e5m2

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def scaled_by_row(self) -> bool:
        return self.block[1] == self.shape[1]

    @property
    def form(self) -> tuple[int, ...]:
        """Matrices of equal forms can be joined."""
        return self.shape[1], self.block[1], self.exponent_bits


def to_device(weight: Float8Tensor, device: torch.device) -> Float8Matrix:
    """`weight` as kernels read it, in the memory of `device`."""
    (rows, columns), (height, width) = weight.shape, weight.block
    codes = F.pad(weight.values.view(torch.uint8).to(device), (0, -columns % ALIGNMENT)).contiguous()
    scales = weight.scale.float().to(device)
    if width == columns:
        scales, height = _by_row(scales, height, rows), 1
    bits = 5 if weight.values.dtype == torch.float8_e5m2 else 4
    return Float8Matrix(weight.shape, codes, scales.contiguous(), (height, width), bits)


def joined(parts: Sequence[Float8Matrix]) -> Float8Matrix:
    """Matrices of one form, one below the other. Where blocks of rows do not meet, each row gets scales of its own."""
    if len(parts) == 1:
        return parts[0]
    height = parts[0].block[0]
    meet = all(part.block[0] == height for part in parts) and all(part.shape[0] % height == 0 for part in parts[:-1])
    scales = [part.scales if meet else _by_row(part.scales, part.block[0], part.shape[0]) for part in parts]
    rows, (columns, width, bits) = sum(part.shape[0] for part in parts), parts[0].form
    codes = torch.cat([part.codes for part in parts])
    return Float8Matrix((rows, columns), codes, torch.cat(scales), (height if meet else 1, width), bits)


def _by_row(scales: Tensor, height: int, rows: int) -> Tensor:
    return scales.repeat_interleave(height, 0)[:rows]
