"""QTensor: one weight in canonical form, for all file formats.

A format's decoder may move bits, but never multiplies scales out and never rounds. The value of every element is
defined exactly by the formula of its class, in float32, in the order written there. A packed tensor takes at most 1.03
times its bytes in the file.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A tensor of 16-bit or 32-bit floats, of any shape. value = float32(values)."""

    shape: tuple[int, ...]
    type_name: str  # name of the type in the file format, for listings
    values: Tensor  # `shape`; float32, float16, or bfloat16

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def rows(self, index: Tensor) -> "PlainTensor":
        """Return the rows `index` (int64 [n]) of a matrix."""
        return PlainTensor((len(index), *self.shape[1:]), self.type_name, self.values[index])


@dataclass(frozen=True, slots=True)
class Plane:
    """One plane: `bits` (1, 2, 4, or 8) bits of every integer of a row, in words of four bytes.

    A word holds 32 / bits integers: its byte k has integer 4 * j + k at bit bits * j. So a kernel finds four adjacent
    columns in the four bytes of a word, after one shift of a whole vector.
    """

    bits: int
    data: Tensor  # uint8 [rows, integers * bits / 8]


@dataclass(frozen=True, slots=True)
class Integers:
    """Unsigned integers of up to 8 bits, [rows, count], divided into bit planes, the low bits first."""

    planes: tuple[Plane, ...]

    @property
    def bits(self) -> int:
        return sum(plane.bits for plane in self.planes)

    @property
    def shape(self) -> tuple[int, int]:
        rows, size = self.planes[0].data.shape
        return rows, size * 8 // self.planes[0].bits

    @property
    def nbytes(self) -> int:
        return sum(plane.data.nbytes for plane in self.planes)

    def values(self) -> Tensor:
        """Return the integers, uint8 [rows, count]."""
        values, shift = torch.zeros(self.shape, dtype=torch.uint8), 0
        for plane in self.planes:
            words = plane.data.view(len(plane.data), -1, 1, 4)
            shifts = torch.arange(0, 8, plane.bits, dtype=torch.uint8).view(-1, 1)
            part = (words >> shifts) & ((1 << plane.bits) - 1)
            values |= part.reshape(self.shape) << shift
            shift += plane.bits
        return values

    def rows(self, index: Tensor) -> "Integers":
        return Integers(tuple(Plane(plane.bits, plane.data[index]) for plane in self.planes))


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of each group of columns: block scale * unit, or block scale * unit * (sub-scale - sub_scale_zero).

    In ggml's super-blocks the block scale is `d`, or `dmin` for minimums.
    """

    block_scales: Tensor  # [rows, n]; float16, or uint8: an exponent e for 2 ** (e - 128)
    sub_scales: Integers | None = None  # [rows, groups]
    sub_scale_zero: int = 0
    unit: float = 1.0  # factor of all scales; a power of two, so that the product is exact

    @property
    def nbytes(self) -> int:
        return self.block_scales.nbytes + (self.sub_scales.nbytes if self.sub_scales else 0)

    def values(self) -> Tensor:
        """Return the scales, float32 [rows, groups]."""
        scales = _powers(self.block_scales) if self.block_scales.dtype == torch.uint8 else self.block_scales.float()
        scales = scales * self.unit
        if self.sub_scales is None:
            return scales
        sub_scales = self.sub_scales.values().float() - self.sub_scale_zero
        return (scales.unsqueeze(-1) * sub_scales.view(*scales.shape, -1)).flatten(1)

    def rows(self, index: Tensor) -> "Scale":
        sub_scales = self.sub_scales.rows(index) if self.sub_scales else None
        return replace(self, block_scales=self.block_scales[index], sub_scales=sub_scales)

    def block_factors(self) -> Tensor:
        """Return the block scales times the unit, [rows, n]: in the stored type, or in float32 if the unit is not 1."""
        return self.block_scales if self.unit == 1.0 else replace(self, sub_scales=None).values()


def _powers(exponents: Tensor) -> Tensor:
    """Return 2 ** (e - 128), float32; the two smallest results are subnormal."""
    e = exponents.int()
    return torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1).clamp(min=0) << 23).view(torch.float32)


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """A matrix of integer codes with a scale, and optionally a minimum, for each group of consecutive columns.

    value = scale * (code - zero) - minimum, or scale * table[code]. The scale and minimum are float32 values of the
    group.
    """

    shape: tuple[int, int]  # rows (outputs), columns (inputs); columns are a multiple of the group
    type_name: str
    group: int  # columns that share a scale
    codes: Integers  # [rows, columns]
    scale: Scale
    zero: int = 0
    minimum: Scale | None = None
    table: tuple[int, ...] | None = None  # value of each code, instead of code - zero

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + (self.minimum.nbytes if self.minimum else 0)

    def rows(self, index: Tensor) -> "CodedTensor":
        """Return the rows `index` (int64 [n])."""
        minimum = self.minimum.rows(index) if self.minimum else None
        shape, codes, scale = (len(index), self.shape[1]), self.codes.rows(index), self.scale.rows(index)
        return CodedTensor(shape, self.type_name, self.group, codes, scale, self.zero, minimum, self.table)

    def __post_init__(self) -> None:
        rows, columns = self.shape
        scales = [scale for scale in (self.scale, self.minimum) if scale]
        groups = (rows, columns // self.group)
        fits = columns % self.group == 0 and self.codes.shape == self.shape
        fits = fits and (self.minimum is None or self.minimum.unit == 1.0)
        for scale in scales:
            count = scale.sub_scales.shape if scale.sub_scales else tuple(scale.block_scales.shape)
            fits = fits and count == groups and (groups[1] % max(1, scale.block_scales.shape[1]) == 0)
        if not fits or (self.table is not None and len(self.table) != 1 << self.codes.bits):
            raise ValueError(f"the parts of a {self.type_name} tensor of shape {self.shape} do not fit together")


@dataclass(frozen=True, slots=True)
class Float8Tensor:
    """A matrix of 8-bit floats with a scale for each block. value = float32(values) * float32(scale).

    Blocks start at row 0 and column 0; the last ones may be partial. With a block of the matrix's shape there is one
    scale per tensor, and with blocks of one row there is one per channel.
    """

    shape: tuple[int, int]
    type_name: str
    values: Tensor  # `shape`; float8_e4m3fn or float8_e5m2
    scale: Tensor  # [blocks of rows, blocks of columns]; float32, bfloat16, float16, or float8_e8m0fnu
    block: tuple[int, int]  # rows, columns; at most `shape`

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def rows(self, index: Tensor) -> "Float8Tensor":
        """Return the rows `index` (int64 [n], n > 0)."""
        height, width = self.block
        shape, scale = (len(index), self.shape[1]), self.scale[index // height]
        return Float8Tensor(shape, self.type_name, self.values[index], scale, (1, width))

    def __post_init__(self) -> None:
        fits = tuple(self.values.shape) == self.shape and all(
            0 < block <= extent for block, extent in zip(self.block, self.shape, strict=True)
        )
        if not fits or tuple(self.scale.shape) != blocks(self.shape, self.block):
            raise ValueError(f"the parts of a {self.type_name} tensor of shape {self.shape} do not fit together")


def blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Return the number of blocks that cover a matrix, down and across."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


@dataclass(frozen=True, slots=True)
class GroupScale:
    """The scale of each group of columns, in the file's type. value = float32(stored) * float32(unit)."""

    stored: Tensor  # [rows, groups]; float32, float16, or bfloat16
    unit: float = 1.0  # factor of all scales

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.shape)

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    def values(self) -> Tensor:
        """Return the scales, float32 [rows, groups]."""
        return self.stored.float() * self.unit

    def factors(self) -> Tensor:
        """Return the scales in the stored type, or in float32 if the unit is not 1."""
        return self.stored if self.unit == 1.0 else self.values()

    def rows(self, index: Tensor) -> "GroupScale":
        return GroupScale(self.stored[index], self.unit)


@dataclass(frozen=True, slots=True)
class NestedScale:
    """Scales that are quantized themselves, with a block scale for every `block_size` of them, counted through all
    rows.

    value = table[code] * block_scales[n // block_size] + offset, in float32, where scale i of row r has the index n = r
    * groups + i.
    """

    codes: Tensor  # uint8 [rows, groups]
    table: Tensor  # float32 [256]
    block_scales: Tensor  # float32 [rows * groups / block_size, rounded up]
    block_size: int
    offset: float

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.table.nbytes + self.block_scales.nbytes

    def values(self) -> Tensor:
        """Return the scales, float32 [rows, groups]."""
        return self.rows(torch.arange(len(self.codes))).values()

    def rows(self, index: Tensor) -> GroupScale:
        """Return the scales of the rows `index`, multiplied out, because selected rows cannot share block scales."""
        groups = self.codes.shape[1]
        numbers = index.unsqueeze(-1) * groups + torch.arange(groups)
        factors = self.table[self.codes[index].int()]
        return GroupScale(factors * self.block_scales[numbers // self.block_size] + self.offset)


@dataclass(frozen=True, slots=True)
class GroupedTensor:
    """A matrix of codes with a scale, and optionally a zero point, for each group of columns, which may be in any
    order.

    value = scale * (code - zero), or scale * table[code], in float32. Columns are stored by group: the first `group`
    columns are group 0, and so on; the last group may be shorter. If there is an order, stored column c is input
    order[c], so that a product is computed over x[:, order].
    """

    shape: tuple[int, int]  # rows (outputs), columns (inputs)
    type_name: str
    group: int  # columns that share a scale
    codes: Integers  # [rows, columns, rounded up to whole words]
    scale: GroupScale | NestedScale  # [rows, groups]
    zero: int | Integers = 0  # one zero point for all groups, or [rows, groups, rounded up to whole words]
    table: tuple[float, ...] | None = None  # value of each code, instead of code - zero
    order: Tensor | None = None  # int32 [columns], a permutation

    @property
    def groups(self) -> int:
        return -(-self.shape[1] // self.group)

    @property
    def nbytes(self) -> int:
        zeros = self.zero.nbytes if isinstance(self.zero, Integers) else 0
        return self.codes.nbytes + self.scale.nbytes + zeros + (0 if self.order is None else self.order.nbytes)

    def rows(self, index: Tensor) -> "GroupedTensor":
        """Return the rows `index` (int64 [n])."""
        zero = self.zero.rows(index) if isinstance(self.zero, Integers) else self.zero
        shape, codes, scale = (len(index), self.shape[1]), self.codes.rows(index), self.scale.rows(index)
        return GroupedTensor(shape, self.type_name, self.group, codes, scale, zero, self.table, self.order)

    def __post_init__(self) -> None:
        rows, columns = self.shape
        fits = _holds(self.codes, rows, columns) and self.scale.shape == (rows, self.groups)
        if isinstance(self.zero, Integers):
            fits = fits and _holds(self.zero, rows, self.groups) and self.table is None
        if isinstance(self.scale, NestedScale):
            fits = fits and len(self.scale.block_scales) == -(-rows * self.groups // self.scale.block_size)
        if self.order is not None:
            fits = fits and torch.equal(self.order.sort().values, torch.arange(columns, dtype=torch.int32))
        if not fits or (self.table is not None and len(self.table) != 1 << self.codes.bits):
            raise ValueError(f"the parts of a {self.type_name} tensor of shape {self.shape} do not fit together")


def _holds(integers: Integers, rows: int, count: int) -> bool:
    """Whether each row has `count` integers, with no padding or padding to whole words."""
    per_word = 32 // min(plane.bits for plane in integers.planes)
    return integers.shape[0] == rows and 0 <= integers.shape[1] - count < per_word


BlockTensor = PlainTensor | CodedTensor  # the forms of GGUF files
QTensor = BlockTensor | Float8Tensor | GroupedTensor
