"""The layouts of weights of safetensors checkpoints, as a table: integers or small floats, and scales of spans.

A span is as many groups of 32 columns as share a scale, up to a whole row. How many is no part of a layout: files have
any number, and so each tile says it (`quant.cpu.group_tiles`). Knows sizes. Refuses to know how bytes get into their
places, and what is computed with them.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import product

import torch

from quant.bitsandbytes import FP4, NF4
from quant.cpu.ggml_formats import GGML_FORMATS, GROUP, TILE, GGMLFormat
from quant.errors import UnsupportedQuantization
from quant.tensor import Float8Tensor, GroupedTensor, Integers, NestedScale

HEADER_BYTES = 64  # at the beginning of a tile; the codes of whole rows stay aligned
SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32)


class Word(IntEnum):
    """The words of a tile's header, int64, by their places; all but the first are for nested scales."""

    GROUPS_PER_SCALE = 0  # groups that share a scale
    SHARED = 1  # bytes from the tile to what all rows of the weight share
    FIRST = 2  # number of the first scale of the tile's first row
    PER_ROW = 3  # scales of a row
    SHIFT = 4  # of the number of a scale, which gives that of its whole one
    OFFSET = 5  # bits of a float32


GroupTensor = GroupedTensor | Float8Tensor


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """A row of the table. `number` is part of the names of its kernels."""

    number: int
    codes: GGMLFormat  # their bits, and the code of 0 where it is the same everywhere
    scale: torch.dtype = torch.float32  # uint8: the number of a float in a table that the rows of a weight share
    rows: int = TILE  # scales of a span: one for each row, or 1 for all of them
    zeros: bool = False  # a zero point for each scale, in as many bits as a code
    numbers: tuple[float, ...] | None = None  # what is looked up for a code
    float8: torch.dtype | None = None  # what a code is

    @property
    def part(self) -> str:
        """The part of the machine code that its kernels are in."""
        return f"layout{self.number}"

    @property
    def floats(self) -> bool:
        """Whether elements are multiplied as floats."""
        return self.numbers is not None or self.float8 is not None

    @property
    def nested(self) -> bool:
        return self.scale is torch.uint8

    @property
    def scale_bytes(self) -> int:
        """Bytes of one span's scales."""
        return self.rows * self.scale.itemsize

    @property
    def head_bytes(self) -> int:
        """Bytes before the groups of a span."""
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
    """What a weight would be stored as, but for the number."""
    if isinstance(weight, Float8Tensor):
        height = weight.block[0]
        tiles_share = height % TILE == 0 or height == weight.shape[0]
        rows = 1 if tiles_share else TILE if height == 1 else 0
        return GroupFormat(0, GGMLFormat(0, (8,)), rows=rows, float8=weight.values.dtype)
    codes = GGMLFormat(0, tuple(plane.bits for plane in weight.codes.planes))
    if isinstance(weight.scale, NestedScale) and weight.scale.block_size.bit_count() != 1:
        raise _unsupported(weight, f"whose scales share one for {weight.scale.block_size}, not a power of two")
    scale = torch.uint8 if isinstance(weight.scale, NestedScale) else weight.scale.factors().dtype
    if weight.table is not None:
        return GroupFormat(0, codes, scale, numbers=weight.table)
    if isinstance(weight.zero, Integers):
        fits = [plane.bits for plane in weight.zero.planes] == [codes.bits]
        return GroupFormat(0, codes, scale, zeros=fits)
    return GroupFormat(0, replace(codes, zero=weight.zero), scale)


def groups_per_scale_of(weight: GroupTensor) -> int:
    """Groups of 32 columns that share a scale. Raises UnsupportedQuantization where they are no whole groups."""
    columns = weight.shape[1]
    width = min(weight.group if isinstance(weight, GroupedTensor) else weight.block[1], columns)
    if width % GROUP:
        raise _unsupported(weight, f"in groups of {width} columns, not a multiple of {GROUP}")
    return width // GROUP


def group_format_of(weight: GroupTensor) -> GroupFormat:
    """The layout that holds `weight` exactly. Raises UnsupportedQuantization, naming what does not fit."""
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
