"""One weight matrix on a GPU: plain data, laid out to be loaded 16 bytes a thread and unpacked in few instructions.

Codes lie in words of `phases` columns each. Four words hold a strip of 4 * phases columns: word j has column 4 * p + j
of its strip at bit p * bits. Eight rows of four strips are a tile, row by row: a strip for each thread of a warp. So
what a warp loads at once is one piece of memory, and the codes that one shift brings down are operands of a product of
16-bit floats by matrix units, in the very threads that those units want them in (`quant.kernels.packed_matmul`).

A word is phases * bits wide: 32 bits of 4-bit or 8-bit codes, 16 of 2-bit. Of codes of 3, 5 and 6 bits it has the lower
2 or 4; the rest lies in a second plane, where a strip is one number. There as many words as find place in a code's bits
share those, each with its own where the first plane's codes begin, from bit 0 on.

Scales stay at the two levels and widths that their file has. Rows and columns are filled up to whole tiles with zeros:
128 columns, or 64 of 8-bit codes.

Knows the layout. Refuses to know how weights get there (`quant.cuda.loading`) and what is computed with them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.cuda.float8 import Float8Matrix

WORDS = 4  # of a strip
TILE_ROWS = 8
TILE_STRIPS = 4


@dataclass(frozen=True, slots=True)
class PackedForm:
    """What all rows of a packed matrix have in common; matrices of equal form can lie one behind another.

    value = scale * (code - zero) - minimum, or scale * table[code], where scale = whole * (part - offset) and minimum
    likewise without an offset; as in `quant.tensor`.
    """

    columns: int
    group: int  # columns that share a scale, a multiple of 16
    planes: tuple[int, ...]  # bits of a code in each plane, the lowest first
    zero: int = 0  # where there are no zero points
    table: tuple[float, ...] | None = None
    sub_scale_zero: int = 0  # of a scale's parts
    ratio: int = 1  # groups that share a whole scale
    nibbles: bool = False  # a part's low half is the scale's, its high half the minimum's
    nested_block: int = 0  # scales that share a whole one, counted through all rows, where they are nested; else 0
    scale_offset: float = 0.0  # added to a nested scale

    @property
    def phases(self) -> int:
        """Columns of a word."""
        return 4 if self.planes == (8,) else 8

    @property
    def strip(self) -> int:
        """Columns of four words."""
        return WORDS * self.phases

    @property
    def tiles(self) -> int:
        """Of eight rows."""
        return -(-self.columns // (TILE_STRIPS * self.strip))

    @property
    def width(self) -> int:
        """Columns of whole tiles."""
        return self.tiles * TILE_STRIPS * self.strip

    @property
    def groups(self) -> int:
        return -(-self.columns // self.group)

    @property
    def kind(self) -> str:
        """What measured tiles are kept by."""
        return f"{'+'.join(map(str, self.planes))} bits by {self.group}"

    @property
    def constants(self) -> dict[str, int | float]:
        """What kernels are compiled for."""
        return {
            "COLUMNS": self.columns,
            "GROUP": self.group,
            "LOW": self.planes[0],
            "HIGH": self.planes[1] if len(self.planes) > 1 else 0,
            "PHASES": self.phases,
            "GROUPS": self.groups,
            "RATIO": self.ratio,
            "ZERO": self.zero,
            "SUB_SCALE_ZERO": self.sub_scale_zero,
            "NIBBLES": self.nibbles,
            "NESTED_BLOCK": self.nested_block,
        }


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Integer codes of up to 8 bits in groups of columns, with all that gives them values."""

    shape: tuple[int, int]  # rows (outputs), columns (inputs)
    form: PackedForm
    low: Tensor  # [rows / 8, tiles, 8, 4, 4]; int32, int16 or uint8, as wide as `phases` codes of the first plane
    high: Tensor | None  # [rows / 8, tiles, 8, 4], int32 or int64: strips of the second plane
    scales: Tensor  # [rows, groups / ratio]; floats of 16 or 32 bits, or uint8: an exponent e, for 2 ** (e - 128)
    sub_scales: Tensor | None = None  # uint8 [rows, groups]; of a nested scale, the codes
    minimums: Tensor | None = None  # as `scales`
    sub_minimums: Tensor | None = None  # uint8 [rows, groups]
    zeros: Tensor | None = None  # uint8 [rows, groups]: zero points
    numbers: Tensor | None = None  # float32 [codes]: the table
    scale_table: Tensor | None = (
        None  # float32 [256], of a nested scale; `scales` is float32 [all scales / nested_block]
    )
    order: Tensor | None = None  # int32 [columns]: stored column c is input order[c]

    @property
    def operands(self) -> dict[str, Tensor | float | None]:
        """What kernels read, by the names of their parameters."""
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
        """All that it holds."""
        return tuple(it for it in (*self.operands.values(), self.order) if isinstance(it, Tensor))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """Floats as they are."""

    values: Tensor  # [rows, columns]; float32, float16 or bfloat16

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


CudaMatrix = PackedMatrix | Float8Matrix | PlainMatrix
DENSE = torch.bfloat16  # what packed weights are unpacked to where many tokens share the work
