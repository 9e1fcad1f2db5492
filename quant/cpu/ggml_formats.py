"""Table of the tile layouts for GGML formats: the bit planes of a code, and the structure of the scales.

To add a format, add a row here and one in `quant.ggml_blocks`. Kernels are generated from the row.
`quant.cpu.ggml_tiles` packs weights in these layouts.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

from quant.errors import UnsupportedQuantization
from quant.ggml_blocks import E2M1_NUMBERS, IQ4_NUMBERS
from quant.tensor import BlockTensor, CodedTensor, PlainTensor, Scale

TILE = 16  # rows in a tile
PAIR = 2 * TILE
GROUP = 32  # columns in a group
SUPER_BLOCK_GROUPS = 8  # groups in a super-block
HALF_BYTES = 2 * TILE  # one float16 for each row


@dataclass(frozen=True, slots=True)
class SubScales:
    """Storage of sub-scales: small integers that block scales are multiplied by, one or two for each 32 columns.

    `planes` are the bits of each plane, the low bits first. A plane of 8 bits has a byte for each row. A plane of 4
    bits has one byte for two sub-scales, the first in the low half. A plane of 2 bits has a word of 32 bits for each
    sub-scale, with row r at bit 2 r.
    """

    planes: tuple[int, ...] = (8,)
    zero: int = 0

    @property
    def signed(self) -> bool:
        """Whether sub-scales are stored as signed bytes, with the zero point already subtracted."""
        return self.planes == (8,) and self.zero == 128


@dataclass(frozen=True, slots=True)
class Scales:
    """The structure of a format's scales."""

    columns: int = GROUP  # columns that share a scale: 16 or 32; 256 in super-blocks without sub-scales
    exponent: bool = False  # scales are a byte e for each row instead of a float16, with the value 2 ** (e - 128)
    minimum: bool = False  # each scale has a minimum; sub-minimums are stored after the block scales
    sub_scales: SubScales | None = None
    block_groups: int = 1  # groups in a block; the block scales are stored before the first group
    unit: float = 1.0  # factor of the block scales; minimums are not multiplied by it

    @property
    def halves(self) -> int:
        """Number of scales for each 32 columns."""
        return 2 if self.columns == GROUP // 2 else 1

    @property
    def block_scale_bytes(self) -> int:
        """Bytes of the block scales and block minimums."""
        return (TILE if self.exponent else HALF_BYTES) * (1 + self.minimum)

    @property
    def sub_scale_bytes(self) -> int:
        """Bytes of the sub-scales of one group. The sub-minimums of a group take the same number of bytes."""
        return TILE * sum(self.sub_scales.planes) // 8 * self.halves if self.sub_scales else 0


@dataclass(frozen=True, slots=True)
class GGMLFormat:
    """A row of the table. `number` is part of the names of its kernels."""

    number: int
    planes: tuple[int, ...] = ()  # bits of a code in each plane, the low bits first
    zero: int = 0  # zero point, if there is no minimum
    table: tuple[int, ...] | None = None  # value of each code, plus `zero`
    scales: Scales = Scales()
    plain: torch.dtype | None = None

    @property
    def part(self) -> str:
        """Name of the machine-code part that contains this layout's kernels."""
        return f"layout{self.number}"

    @property
    def bits(self) -> int:
        """Bits of one code, or of one float."""
        return 8 * self.plain.itemsize if self.plain else sum(self.planes)

    @property
    def dot_bits(self) -> int:
        """Bits of the values that are multiplied: codes, or table values."""
        return max(self.table).bit_length() if self.table else self.bits

    @property
    def is_packed6(self) -> bool:
        """Whether 6-bit codes are packed without planes: three vectors hold four vectors of codes."""
        return self.planes == (4, 2)

    @property
    def codes_bytes(self) -> int:
        """Bytes of one group's codes."""
        return TILE * GROUP * self.bits // 8

    @property
    def head_bytes(self) -> int:
        """Bytes of block scales and sub-minimums before the groups of a block."""
        scales = self.scales
        return (
            scales.block_scale_bytes + scales.minimum * scales.block_groups * scales.sub_scale_bytes
            if scales.block_groups > 1
            else 0
        )

    @property
    def group_bytes(self) -> int:
        """Size of one group of one tile in bytes, without the block scales."""
        if self.plain:
            return self.codes_bytes
        return self.codes_bytes + (
            self.scales.block_scale_bytes if self.scales.block_groups == 1 else self.scales.sub_scale_bytes
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one tile."""
        return self.head_bytes + self.scales.block_groups * self.group_bytes

    @property
    def super_blocks(self) -> bool:
        """Whether a block is a super-block, whose products are computed in integers."""
        return self.scales.block_groups == SUPER_BLOCK_GROUPS

    def tile_bytes(self, groups: int) -> int:
        return groups // self.scales.block_groups * self.block_bytes


def _lifted(table: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Return the table with an offset added that makes all values nonnegative, and the offset."""
    return tuple(number - min(table) for number in table), -min(table)


_IQ4, _IQ4_ZERO = _lifted(IQ4_NUMBERS)
_E2M1, _E2M1_ZERO = _lifted(E2M1_NUMBERS)
_MINIMUM = Scales(minimum=True)
_super_block = partial(Scales, block_groups=SUPER_BLOCK_GROUPS)
_BYTES_MINIMUM = _super_block(minimum=True, sub_scales=SubScales())

HALF = GGMLFormat(3, plain=torch.float16)
SINGLE = GGMLFormat(5, plain=torch.float32)
GGML_FORMATS = (
    GGMLFormat(0, (4,), scales=_MINIMUM),  # Q4_1
    GGMLFormat(1, (4,), zero=8),  # Q4_0
    GGMLFormat(2, (8,), zero=128),  # Q8_0
    HALF,
    GGMLFormat(4, plain=torch.bfloat16),
    SINGLE,
    GGMLFormat(6, (4, 1), zero=16),  # Q5_0
    GGMLFormat(7, (4, 1), scales=_MINIMUM),  # Q5_1
    GGMLFormat(8, (2,), scales=_super_block(16, minimum=True, sub_scales=SubScales((4,)))),  # Q2_K
    GGMLFormat(9, (2, 1), zero=4, scales=_super_block(16, sub_scales=SubScales((4, 2), 32))),  # Q3_K
    GGMLFormat(10, (4,), scales=_BYTES_MINIMUM),  # Q4_K
    GGMLFormat(11, (4, 1), scales=_BYTES_MINIMUM),  # Q5_K
    GGMLFormat(12, (4, 2), zero=32, scales=_super_block(16, sub_scales=SubScales((8,), 128))),  # Q6_K
    GGMLFormat(13, (4,), zero=_IQ4_ZERO, table=_IQ4),  # IQ4_NL
    GGMLFormat(14, (4,), zero=_IQ4_ZERO, table=_IQ4, scales=_super_block(sub_scales=SubScales((8,), 32))),  # IQ4_XS
    GGMLFormat(15, (4,), zero=_E2M1_ZERO, table=_E2M1, scales=Scales(exponent=True)),  # MXFP4
    GGMLFormat(16, (2,), zero=1, scales=_super_block(256)),  # TQ1_0, TQ2_0
)  # fmt: skip


def _stored_sub_scales(scale: Scale) -> SubScales | None:
    if scale.sub_scales is None:
        return None
    return SubScales(tuple(plane.bits for plane in scale.sub_scales.planes), scale.sub_scale_zero)


def _layout(weight: CodedTensor) -> GGMLFormat:
    """Return the layout of a coded tensor, with `number` 0, for comparison with the table."""
    table, zero = _lifted(weight.table) if weight.table else (None, weight.zero)
    block_scales = weight.scale.block_scales
    spread = weight.shape[1] // max(1, block_scales.shape[1])  # columns that share a block scale
    return GGMLFormat(
        0,
        tuple(plane.bits for plane in weight.codes.planes),
        zero,
        table,
        Scales(
            weight.group,
            block_scales.dtype == torch.uint8,
            weight.minimum is not None,
            _stored_sub_scales(weight.scale),
            block_groups=max(1, spread // GROUP),
            unit=weight.scale.unit,
        ),
    )


_BY_LAYOUT = {replace(layout, number=0): layout for layout in GGML_FORMATS if not layout.plain}


def ggml_format_of(weight: BlockTensor) -> GGMLFormat:
    """Return the layout that holds `weight` exactly. Raises UnsupportedQuantization, naming the weight's type."""
    if isinstance(weight, PlainTensor):
        return next(f for f in GGML_FORMATS if f.plain is weight.values.dtype)
    try:
        return _BY_LAYOUT[_layout(weight)]
    except KeyError:
        raise UnsupportedQuantization(
            f"The CPU kernels have no layout for {weight.type_name} weights",
            "Use the reference kernels: --kernels reference.",
        ) from None
