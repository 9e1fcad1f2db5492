"""One weight matrix in GPU memory, in the order in which the threads of a warp multiply.

Codes are packed into 32-bit words of 32 columns and four threads: a word has the eight codes that one thread needs for
two matrix instructions of 16 columns. Code 4 * h + 2 * k + e of the thread is at bit 16 * e + 8 * h + 4 * k, so that a
shift and a mask extract two codes, in the halves of a register (`quant.kernels.packed_values`). A tile is eight rows of
128 columns: row by row, the four threads of a row have four words each. So each thread loads 16 bytes, and the words
that a warp loads at once are contiguous.

Columns 32 * i + 8 * t + c of a tile belong to thread t and to word i. If groups have 16 columns, or an odd multiple of
16, they are columns 32 * i + 16 * h + 4 * t + c, so that a matrix instruction has columns of one group.

Codes of fewer than four bits share words: word i has its bits (i % n) * bits above those of word 0, where n words share
one. Codes of 3, 5, or 6 bits have a second plane for their high bits, and codes of 8 bits are two planes of 4 bits.

Scales keep the two levels and the types of the file. The scales of eight rows are adjacent, group by group, or tile by
tile if a tile has several groups of a row. Rows and columns are padded with zeros to whole tiles.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from quant.cuda.float8 import Float8Matrix
from quant.kernels.reference import SPAN, is_whole

TILE_ROWS = 8
TILE_COLUMNS = 128
THREADS = 4  # threads that share a row of a tile
WORDS = 4  # words of a thread in a plane of four bits
WHOLE_ROW = 1 << 30  # group size if a row has one scale


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
    minimums: bool = False  # groups have a minimum, which is stored beside the scale
    nibbles: bool = False  # a byte holds a sub-scale in its low half and a sub-minimum in its high half
    # nested scales that share a block scale, counted through all rows; 0 if scales are not nested
    nested_block: int = 0
    scale_offset: float = 0.0  # added to each nested scale

    @property
    def tiles(self) -> int:
        """Number of tiles that hold all columns of eight rows."""
        return -(-self.columns // TILE_COLUMNS)

    @property
    def width(self) -> int:
        """Number of columns, padded to whole tiles."""
        return self.tiles * TILE_COLUMNS

    @property
    def groups(self) -> int:
        return -(-self.columns // self.group)

    @property
    def unit(self) -> int:
        """Number of adjacent columns of a tile that always share a scale."""
        return math.gcd(self.group, TILE_COLUMNS)

    @property
    def run(self) -> int:
        """Number of adjacent columns of a thread."""
        return 4 if self.unit == 16 else 8

    @property
    def has_steps(self) -> bool:
        """Whether `SPAN` columns have a scale of which all values are multiples, apart from the minimum."""
        return self.unit >= SPAN and (self.table is None or is_whole(self.table))

    def chunks(self, group: int) -> tuple[int, int]:
        """Return the number of chunks in which scales of `group` columns are stored, and the scales of a row in one."""
        per_chunk = TILE_COLUMNS // group if TILE_COLUMNS % group == 0 else 1
        return -(-self.width // (group * per_chunk)), per_chunk

    @property
    def few_tokens(self) -> int:
        """Largest number of tokens for which weights are unpacked again for every 8 or 16 tokens (`packed_matmul`).

        For more tokens, and for codes that take longer to unpack, `packed_batch` unpacks them once.
        """
        if self.table is not None or self.planes[0] < 4:
            return 1
        return 16 if len(self.planes) == 1 else 8

    @property
    def bits(self) -> int:
        return sum(self.planes)

    @property
    def has_integers(self) -> bool:
        """Whether weights can be multiplied as 8-bit integers without unpacking the matrix (`integer_experts`)."""
        return self.unit > 16 or (self.table is None and self.bits < 8)

    @property
    def has_constants(self) -> bool:
        """Whether something is subtracted from products of integers: minimums, or zeros other than the half."""
        return self.unit > 16 and self.table is None and (self.minimums or self.zero != 1 << (self.bits - 1))

    @property
    def integer_table(self) -> tuple[tuple[int, ...], float]:
        """The table as 8-bit integers, and their unit. Tables of whole numbers are exact."""
        table = self.table or ()
        unit = 1.0 if is_whole(table) else max(map(abs, table)) / 127
        return tuple(round(it / unit) for it in table), unit

    @property
    def kind(self) -> str:
        """Key under which measured tiles are stored: the bits and the group size."""
        return f"{'+'.join(map(str, self.planes))} bits by {self.group}"

    @property
    def constants(self) -> dict[str, int | float]:
        """Compile-time constants of the kernels."""
        return {
            "GROUP": self.group,
            "UNIT": self.unit,
            "LOW": self.planes[0],
            "HIGH": self.planes[1] if len(self.planes) > 1 else 0,
            "RATIO": self.ratio,
            "ZERO": self.zero,
            "MINIMUMS": self.minimums,
            "SUB_SCALE_ZERO": self.sub_scale_zero,
            "NIBBLES": self.nibbles,
            "NESTED_BLOCK": self.nested_block,
        }

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that the kernels take at run time."""
        return {
            "columns": self.columns,
            "tiles": self.tiles,
            "groups": self.groups,
            "chunks": self.chunks(self.group)[0],
            "blocks": self.chunks(self.group * self.ratio)[0],
        }


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Integer codes of up to 8 bits in groups of columns, with their scales, minimums, or zero points."""

    shape: tuple[int, int]  # rows (outputs), columns (inputs)
    form: PackedForm
    low: Tensor  # int32 [rows / 8, tiles, 8, 4, bits]: words of the first plane
    high: Tensor | None  # int32 [rows / 8, tiles, 8, 4, bits]: words of the second plane
    # [rows / 8, blocks, 8, scales of a chunk, parts]; floats of 16 or 32 bits, or uint8: an exponent e for 2 ** (e -
    # 128); the second part is the minimum
    scales: Tensor
    # uint8 [rows / 8, chunks, 8, scales of a chunk, parts]; the second part is the sub-minimum, unless both share a
    # byte; for nested scales, their codes
    sub_scales: Tensor | None = None
    zeros: Tensor | None = None  # uint8, like `sub_scales` of one part: zero points
    numbers: Tensor | None = None  # float32 [codes]: the value of each code
    # int32 [256]: at a + 16 * b the values of the codes a and b, bfloat16, in the low and the high half
    number_pairs: Tensor | None = None
    number_integers: Tensor | None = None  # int16 [256]: the same of `PackedForm.integer_table`
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
            "zeros": self.zeros,
            "numbers": self.numbers,
            "scale_table": self.scale_table,
            "scale_offset": self.form.scale_offset,
        }

    @property
    def row_tensors(self) -> dict[str, Tensor]:
        """The tensors whose first dimension is the rows, by name."""
        named = {"low": self.low, "high": self.high, "scales": self.scales}
        named |= {"sub_scales": self.sub_scales, "zeros": self.zeros}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def with_rows(self, rows: int, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a matrix of `rows` rows, with `change` applied to the row tensors. Nested scales cannot change."""
        tensors: dict[str, Any] = {name: change(tensor) for name, tensor in self.row_tensors.items()}
        return replace(self, shape=(rows, self.shape[1]), **tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the matrix."""
        others = self.number_pairs, self.number_integers, self.order
        return tuple(it for it in (*self.operands.values(), *others) if isinstance(it, Tensor))

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
    def row_tensors(self) -> dict[str, Tensor]:
        """See `PackedMatrix`."""
        return {"values": self.values}

    def with_rows(self, rows: int, change: Callable[[Tensor], Tensor]) -> Self:
        """See `PackedMatrix`. The result has no exact values."""
        return replace(self, values=change(self.values), exact=None)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.exact is None else self.exact.nbytes)


CudaMatrix = PackedMatrix | Float8Matrix | PlainMatrix
DENSE = torch.bfloat16  # type that packed weights are unpacked to for the library's matrix product
