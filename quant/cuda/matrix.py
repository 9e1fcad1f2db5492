"""One weight matrix in GPU memory. Each thread loads 16 bytes and unpacks them in few instructions.

Codes are packed into words of `codes_per_word` columns. Four words are a fragment of 4 * codes_per_word columns: word j
has column 4 * p + j of the fragment at bit p * bits. A tile is eight rows of four fragments, row by row: one fragment
for each thread of a warp. So the fragments that a warp loads at once are contiguous. One shift extracts codes that are
operands of a 16-bit float product, in the threads where the matrix units expect those operands
(`quant.kernels.packed_matmul`).

A word has codes_per_word * bits bits: 32 for 4-bit and 8-bit codes, 16 for 2-bit codes. For codes of 3, 5, or 6 bits
the first plane has the low 2 or 4 bits, and a second plane has the rest. In the second plane a fragment is one integer,
in which the bits of low / high words are interleaved: word w has its bits of a code (w % (low / high)) * high bits
above the bit where the first plane has that code.

Scales keep the two levels and the types of the file. Rows and columns are padded with zeros to whole tiles: 128
columns, or 64 of 8-bit codes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.cuda.float8 import Float8Matrix

WORDS = 4  # words in a fragment
TILE_ROWS = 8
TILE_FRAGMENTS = 4


@dataclass(frozen=True, slots=True)
class PackedForm:
    """The properties that all rows of a packed matrix share; matrices of equal form can be concatenated.

    value = scale * (code - zero) - minimum, or scale * table[code], where scale = block scale * (sub-scale -
    sub_scale_zero) and the minimum is a product likewise, without a zero point; see `quant.tensor`.
    """

    columns: int
    group: int  # columns that share a scale, a multiple of 16
    planes: tuple[int, ...]  # bits of a code in each plane, the low bits first
    zero: int = 0  # zero point of all groups, unless each group has one
    table: tuple[float, ...] | None = None
    sub_scale_zero: int = 0  # zero point of the sub-scales
    ratio: int = 1  # groups that share a block scale
    nibbles: bool = False  # a byte holds a sub-scale in its low half and a sub-minimum in its high half
    # nested scales that share a block scale, counted through all rows; 0 if scales are not nested
    nested_block: int = 0
    scale_offset: float = 0.0  # added to each nested scale

    @property
    def codes_per_word(self) -> int:
        """Number of columns in a word."""
        return 4 if self.planes == (8,) else 8

    @property
    def fragment(self) -> int:
        """Number of columns in a fragment."""
        return WORDS * self.codes_per_word

    @property
    def tiles(self) -> int:
        """Number of tiles that hold all columns of eight rows."""
        return -(-self.columns // (TILE_FRAGMENTS * self.fragment))

    @property
    def width(self) -> int:
        """Number of columns, padded to whole tiles."""
        return self.tiles * TILE_FRAGMENTS * self.fragment

    @property
    def groups(self) -> int:
        return -(-self.columns // self.group)

    @property
    def kind(self) -> str:
        """Key under which measured tiles are stored: the bits and the group size."""
        return f"{'+'.join(map(str, self.planes))} bits by {self.group}"

    @property
    def constants(self) -> dict[str, int | float]:
        """Compile-time constants of the kernels."""
        return {
            "COLUMNS": self.columns,
            "GROUP": self.group,
            "LOW": self.planes[0],
            "HIGH": self.planes[1] if len(self.planes) > 1 else 0,
            "CODES_PER_WORD": self.codes_per_word,
            "GROUPS": self.groups,
            "RATIO": self.ratio,
            "ZERO": self.zero,
            "SUB_SCALE_ZERO": self.sub_scale_zero,
            "NIBBLES": self.nibbles,
            "NESTED_BLOCK": self.nested_block,
        }


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Integer codes of up to 8 bits in groups of columns, with their scales, minimums, or zero points."""

    shape: tuple[int, int]  # rows (outputs), columns (inputs)
    form: PackedForm
    low: Tensor  # [rows / 8, tiles, 8, 4, 4]; int32, int16, or uint8: `codes_per_word` codes of the first plane
    high: Tensor | None  # [rows / 8, tiles, 8, 4], int32 or int64: fragments of the second plane
    scales: Tensor  # [rows, groups / ratio]; floats of 16 or 32 bits, or uint8: an exponent e for 2 ** (e - 128)
    sub_scales: Tensor | None = None  # uint8 [rows, groups]; for nested scales, their codes
    minimums: Tensor | None = None  # like `scales`
    sub_minimums: Tensor | None = None  # uint8 [rows, groups]
    zeros: Tensor | None = None  # uint8 [rows, groups]: zero points
    numbers: Tensor | None = None  # float32 [codes]: the value of each code
    scale_table: Tensor | None = (
        None  # float32 [256], for nested scales; then `scales` is float32 [all scales / nested_block]
    )
    order: Tensor | None = None  # int32 [columns]: stored column c is input order[c]

    @property
    def operands(self) -> dict[str, Tensor | float | None]:
        """Arguments of the kernels, by parameter name."""
        return {
            "low": self.low,
            "high": self.high,
            "scales": self.scales,
            "sub_scales": self.sub_scales,
            "minimums": self.minimums,
            "sub_minimums": self.sub_minimums,
            "zeros": self.zeros,
            "numbers": self.numbers,
            "scale_table": self.scale_table,
            "scale_offset": self.form.scale_offset,
        }

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the matrix."""
        return tuple(it for it in (*self.operands.values(), self.order) if isinstance(it, Tensor))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """A matrix of floats that are not packed."""

    values: Tensor  # [rows, columns]; bfloat16, or the file's type if the matrix is only used for its rows
    exact: Tensor | None = None  # the same in the file's type, if rows of `values` would be less exact

    @property
    def rows(self) -> Tensor:
        """The most exact values, [rows, columns]."""
        return self.values if self.exact is None else self.exact

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.exact is None else self.exact.nbytes)


CudaMatrix = PackedMatrix | Float8Matrix | PlainMatrix
DENSE = torch.bfloat16  # type that packed weights are unpacked to for the library's matrix product
