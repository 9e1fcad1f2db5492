"""Table of the tile layouts for safetensors checkpoints: integers or small floats, in scale groups.

A scale group is the columns that share a scale: one or more groups of 32 columns, up to a whole row. Its length is not
part of the layout, because it differs between files. Each tile's header stores it (`quant.cpu.group_tiles`).
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import product

import torch

from quant.bitsandbytes import FP4, NF4
from quant.cpu.ggml_formats import GGML_FORMATS, GROUP, TILE, GGMLFormat
from quant.errors import UnsupportedQuantization
from quant.tensor import Float8Tensor, GroupedTensor, Integers, NestedScale

HEADER_BYTES = 64  # size of the header at the start of a tile; keeps the codes aligned
SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32)


class Word(IntEnum):
    """Indices of the int64 words in a tile's header. All except the first are for nested scales."""

    GROUPS_PER_SCALE = 0  # number of groups that share a scale
    SHARED = 1  # offset in bytes from the tile to the data that all rows of the weight share
    FIRST = 2  # index of the first scale of the tile's first row
    PER_ROW = 3  # number of scales in a row
    SHIFT = 4  # right shift that turns the index of a scale into the index of its block scale
    OFFSET = 5  # offset that is added to every nested scale, as the bits of a float32


GroupTensor = GroupedTensor | Float8Tensor


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """A row of the table. `number` is part of the names of its kernels."""

    number: int
    codes: GGMLFormat  # bits of the codes, and the zero point if it is the same for all groups
    # type of the scales; uint8: indices into a table that all rows of a weight share
    scale: torch.dtype = torch.float32
    rows: int = TILE  # number of scales in a scale group: TILE (one per row), or 1 for all rows
    zeros: bool = False  # whether each scale has a zero point, with as many bits as a code
    numbers: tuple[float, ...] | None = None  # value of each code
    float8: torch.dtype | None = None  # type of the codes, if they are floats

    @property
    def part(self) -> str:
        """Name of the machine-code part that contains this layout's kernels."""
        return f"layout{self.number}"

    @property
    def floats(self) -> bool:
        """Whether values are multiplied as floats instead of integers."""
        return self.numbers is not None or self.float8 is not None

    @property
    def nested(self) -> bool:
        return self.scale is torch.uint8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of one scale group."""
        return self.rows * self.scale.itemsize

    @property
    def head_bytes(self) -> int:
        """Size in bytes of the scales and zero points at the start of a scale group."""
        return self.scale_bytes + (TILE * self.codes.bits // 8 if self.zeros else 0)

    @property
    def group_bytes(self) -> int:
        """Bytes of one group of one tile."""
        return self.codes.codes_bytes

    def tile_bytes(self, groups: int, groups_per_scale: int) -> int:
        return HEADER_BYTES + -(-groups // groups_per_scale) * self.head_bytes + groups * self.group_bytes


def _table() -> tuple[GroupFormat, ...]:
    rows = [
        *(
            GroupFormat(0, GGMLFormat(0, (bits,), zero=0 if zeros else 1 << (bits - 1)), scale, zeros=zeros)
            for bits, zeros, scale in product((4, 8, 2), (False, True), SCALE_TYPES)
        ),
        *(
            GroupFormat(0, GGMLFormat(0, (8,)), rows=rows, float8=kind)
            for kind, rows in product((torch.float8_e4m3fn, torch.float8_e5m2), (TILE, 1))
        ),
        *(
            GroupFormat(0, GGMLFormat(0, (4,)), scale, numbers=numbers)
            for numbers, scale in product((NF4, FP4), (torch.float32, torch.uint8))
        ),
    ]
    return tuple(replace(row, number=number) for number, row in enumerate(rows, len(GGML_FORMATS)))


GROUP_FORMATS = _table()
_BY_LAYOUT = {replace(layout, number=0): layout for layout in GROUP_FORMATS}


def _layout(weight: GroupTensor) -> GroupFormat:
    """Return the layout of a weight, with `number` set to 0, as in the keys of `_BY_LAYOUT`."""
    if isinstance(weight, Float8Tensor):
        height = weight.block[0]
        tiles_share = height % TILE == 0 or height == weight.shape[0]
        rows = 1 if tiles_share else TILE if height == 1 else 0
        return GroupFormat(0, GGMLFormat(0, (8,)), rows=rows, float8=weight.values.dtype)
    codes = GGMLFormat(0, tuple(plane.bits for plane in weight.codes.planes))
    if isinstance(weight.scale, NestedScale) and weight.scale.block_size.bit_count() != 1:
        raise _unsupported(weight, f"with nested scales in blocks of {weight.scale.block_size}, not a power of two")
    scale = torch.uint8 if isinstance(weight.scale, NestedScale) else weight.scale.factors().dtype
    if weight.table is not None:
        return GroupFormat(0, codes, scale, numbers=weight.table)
    if isinstance(weight.zero, Integers):
        fits = [plane.bits for plane in weight.zero.planes] == [codes.bits]
        return GroupFormat(0, codes, scale, zeros=fits)
    return GroupFormat(0, replace(codes, zero=weight.zero), scale)


def groups_per_scale_of(weight: GroupTensor) -> int:
    """Return the number of groups of 32 columns that share a scale.

    Raises UnsupportedQuantization if a scale does not cover whole groups.
    """
    columns = weight.shape[1]
    width = min(weight.group if isinstance(weight, GroupedTensor) else weight.block[1], columns)
    if width % GROUP:
        raise _unsupported(weight, f"in groups of {width} columns, not a multiple of {GROUP}")
    return width // GROUP


def group_format_of(weight: GroupTensor) -> GroupFormat:
    """Return the layout that holds `weight` exactly. Raises UnsupportedQuantization, naming the weight's type."""
    groups_per_scale_of(weight)
    try:
        return _BY_LAYOUT[_layout(weight)]
    except KeyError:
        raise _unsupported(weight, "of this kind") from None


def _unsupported(weight: GroupTensor, what: str) -> UnsupportedQuantization:
    return UnsupportedQuantization(
        f"The CPU kernels have no layout for {weight.type_name} weights {what}",
        "Use the reference kernels: --kernels reference.",
    )
