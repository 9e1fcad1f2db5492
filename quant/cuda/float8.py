"""Float8Matrix: a matrix of 8-bit floats on a GPU.

The bytes are stored row by row as in the file, and are decoded in registers. Rows are padded with zeros to a multiple
of 16 columns; real models need no padding. Scales become float32. A scale that is shared by whole rows is repeated for
each row, so that the rows of several matrices can be concatenated.

The codes of NaN and infinity do not occur in weights. They are decoded as if they were ordinary numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from quant.tensor import Float8Tensor

ALIGNMENT = 16  # columns; also the number of bytes that a thread loads at once


@dataclass(frozen=True, slots=True)
class Float8Matrix:
    """value = float8(codes) * scales[row // height, column // width]."""

    shape: tuple[int, int]  # outputs, inputs
    codes: Tensor  # uint8 [outputs, inputs rounded up to `ALIGNMENT`]
    scales: Tensor  # float32 [outputs / height, inputs / width], both rounded up
    block: tuple[int, int]  # height, width; (1, inputs): one scale for each row
    exponent_bits: int  # 4 for e4m3, 5 for e5m2

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def scaled_by_row(self) -> bool:
        return self.block[1] == self.shape[1]

    @property
    def row_tensors(self) -> dict[str, Tensor]:
        """See `quant.cuda.matrix.PackedMatrix`."""
        return {"codes": self.codes, "scales": self.scales}

    def with_rows(self, rows: int, change: Callable[[Tensor], Tensor]) -> Self:
        """See `quant.cuda.matrix.PackedMatrix`. `rows` must be a multiple of the height of scale blocks."""
        return replace(self, shape=(rows, self.shape[1]), codes=change(self.codes), scales=change(self.scales))

    @property
    def form(self) -> tuple[int, ...]:
        """A key for concatenation: matrices with equal keys can be concatenated."""
        return self.shape[1], self.block[1], self.exponent_bits


def to_device(weight: Float8Tensor, device: torch.device) -> Float8Matrix:
    """Return `weight` in the layout that kernels read, in the memory of `device`."""
    (rows, columns), (height, width) = weight.shape, weight.block
    codes = F.pad(weight.values.view(torch.uint8).to(device), (0, -columns % ALIGNMENT)).contiguous()
    scales = weight.scale.float().to(device)
    if width == columns:
        scales, height = _by_row(scales, height, rows), 1
    bits = 5 if weight.values.dtype == torch.float8_e5m2 else 4
    return Float8Matrix(weight.shape, codes, scales.contiguous(), (height, width), bits)


def with_whole_blocks(matrix: Float8Matrix) -> Float8Matrix:
    """Return a matrix whose number of rows is a multiple of the height of its scale blocks."""
    (rows, _), (height, width) = matrix.shape, matrix.block
    if rows % height == 0:
        return matrix
    return replace(matrix, scales=_by_row(matrix.scales, height, rows), block=(1, width))


def joined(parts: Sequence[Float8Matrix]) -> Float8Matrix:
    """Concatenate the rows of matrices of equal `form`.

    If a block of rows would straddle two matrices, the scales are repeated for each row.
    """
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
