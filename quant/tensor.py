"""QTensor: one weight in canonical form, whatever file it came from.

A format's decoder may move bits about, but never multiplies scales out and never rounds: the value of every element is
given exactly by the formula of its form, in float32, in the order written there. A packed tensor takes at most 1.03
times the bytes it takes in its file.

Knows tensors. Refuses to know file formats (decoders do) and how to multiply (kernels do).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A tensor of 16- or 32-bit floats, of any shape. value = float32(values)."""

    shape: tuple[int, ...]
    type_name: str  # the file format's name of the type, for listings
    values: Tensor  # `shape`; float32, float16 or bfloat16

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


@dataclass(frozen=True, slots=True)
class AffineTensor:
    """Integer codes with a scale, and an integer zero point or a minimum, for each group of consecutive columns.

    value = scale * (code - zero) - minimum, where scale and minimum are the group's, widened to float32.
    """

    shape: tuple[int, int]  # rows (outputs), columns (inputs); columns divide into groups
    type_name: str
    bits: int  # 4: two codes a byte, the even column in the low half; 8: signed
    group: int  # columns that share a scale
    codes: Tensor  # [rows, columns * bits / 8]; uint8, or int8 when bits == 8
    scales: Tensor  # [rows, columns / group]; float16
    zero: int = 0
    minimums: Tensor | None = None  # [rows, columns / group]; float16

    @property
    def nbytes(self) -> int:
        minimums = 0 if self.minimums is None else self.minimums.nbytes
        return self.codes.nbytes + self.scales.nbytes + minimums

    def __post_init__(self) -> None:
        rows, columns = self.shape
        groups = (rows, columns // self.group)
        consistent = (
            columns % self.group == 0
            and self.codes.shape == (rows, columns * self.bits // 8)
            and self.codes.dtype == (torch.int8 if self.bits == 8 else torch.uint8)
            and self.scales.shape == groups
            and (self.minimums is None or self.minimums.shape == groups)
        )
        if not consistent:
            raise ValueError(f"the parts of a {self.type_name} tensor of shape {self.shape} do not fit together")


QTensor = PlainTensor | AffineTensor
