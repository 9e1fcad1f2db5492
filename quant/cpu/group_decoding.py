"""Decode a scale group of a tile in registers: scales, zero points, and small floats.

A scale group is the columns that share a scale, one or more groups of 32. The code is generated from the format's row
in `quant.cpu.group_formats`, for the layout of `quant.cpu.group_tiles`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils

from quant.cpu.float16 import widen
from quant.cpu.ggml_formats import TILE
from quant.cpu.group_formats import HEADER_BYTES, GroupFormat, Word
from quant.cpu.vector import F32, I8, I32, I64, Emit, F16x16, F32x16, I8x16, I16x16, I16x32, I32x16

I8x8 = ir.VectorType(I8, 8)
TABLE_BYTES = 4 * 256
E4M3_UNIT = 256.0  # factor that corrects e4m3 bits in the fields of a float16, whose exponent bias is 8 larger


@dataclass(frozen=True, slots=True)
class ScaleGroup:
    """Scale group `number` of some tiles: `count` groups, starting at group `first`."""

    e: Emit
    layout: GroupFormat
    number: Any
    first: Any
    count: Any
    tiles: list[Any]  # addresses of the tiles
    heads: list[Any]

    @contextmanager
    def each_group(self) -> Iterator[tuple[Any, list[Any]]]:
        """Loop over the groups. Yields the group's index in its row, and its address in each tile."""
        e = self.e
        with cgutils.for_range(e.b, self.count) as loop:
            at = [e.at(e.at(it, self.layout.head_bytes), loop.index, self.layout.group_bytes) for it in self.heads]
            yield e.b.add(self.first, loop.index), at

    def scales(self) -> list[Any]:
        """Return the scales of 16 rows, for each tile."""
        return [self._scale(tile, head) for tile, head in zip(self.tiles, self.heads, strict=True)]

    def zeros(self) -> list[Any]:
        """Return the zero points of 16 rows, int32, for each tile.

        The list is empty if the layout has one zero point for all groups.
        """
        return [self._zeros(head) for head in self.heads] if self.layout.zeros else []

    def _scale(self, tile: Any, head: Any) -> Any:
        e, layout = self.e, self.layout
        if layout.nested:
            return self._nested(tile, head)
        if layout.rows == 1:
            scale = e.splat(e.load(head, F32))
        elif layout.scale is torch.float32:
            scale = e.load(head)
        elif layout.scale is torch.float16:
            scale = widen(e, e.load(head, F16x16))
        else:
            wide = e.b.zext(e.load(head, I16x16), I32x16)
            scale = e.b.bitcast(e.b.shl(wide, e.i(16)), F32x16)
        return e.b.fmul(scale, e.f(E4M3_UNIT)) if layout.float8 is torch.float8_e4m3fn else scale

    def _nested(self, tile: Any, head: Any) -> Any:
        """Return table[code] * block scale + offset, rounded twice.

        Nested scales are counted through all rows of a weight.
        """
        e, b = self.e, self.e.b
        table = b.add(tile, _word(e, tile, Word.SHARED))
        first, per_row, shift = (_word(e, tile, word) for word in (Word.FIRST, Word.PER_ROW, Word.SHIFT))
        codes = [b.zext(e.load(e.at(head, row), I8), I64) for row in range(TILE)]
        numbers = [b.add(b.add(first, self.number), b.mul(per_row, I64(row))) for row in range(TILE)]
        factors = e.gather([e.at(table, code, 4) for code in codes])
        block_scales = e.gather([e.at(e.at(table, TABLE_BYTES), b.lshr(number, shift), 4) for number in numbers])
        return b.fadd(b.fmul(factors, block_scales), e.splat(e.float_from_bits(_word(e, tile, Word.OFFSET))))

    def _zeros(self, head: Any) -> Any:
        e, b, bits = self.e, self.e.b, self.layout.codes.bits
        at = e.at(head, self.layout.scale_bytes)
        if bits == 2:
            word = e.splat(e.load(at, I32))
            return b.and_(b.lshr(word, ir.Constant(I32x16, list(range(0, 32, 2)))), e.i(3))
        if bits == 8:
            return b.zext(e.load(at, I8x16), I32x16)
        both = e.load(at, I8x8)
        low, high = b.and_(both, e.constant(I8x8, 15)), b.lshr(both, e.constant(I8x8, 4))
        return b.zext(b.shuffle_vector(low, high, ir.Constant(I32x16, list(range(TILE)))), I32x16)


@contextmanager
def each_scale_group(e: Emit, layout: GroupFormat, groups: Any, tiles: list[Any]) -> Iterator[ScaleGroup]:
    """Loop over the scale groups of the tiles at these addresses."""
    b = e.b
    length = _word(e, tiles[0], Word.GROUPS_PER_SCALE)
    size = b.add(I64(layout.head_bytes), b.mul(length, I64(layout.group_bytes)))
    with cgutils.for_range(b, count_scale_groups(e, groups, length)) as loop:
        first = b.mul(loop.index, length)
        left = b.sub(groups, first)
        count = b.select(b.icmp_signed("<", left, length), left, length)
        heads = [e.at(tile, b.add(I64(HEADER_BYTES), b.mul(loop.index, size))) for tile in tiles]
        yield ScaleGroup(e, layout, loop.index, first, count, tiles, heads)


def _word(e: Emit, tile: Any, word: Word) -> Any:
    return e.load(e.at(tile, 8 * word), I64)


def count_scale_groups(e: Emit, groups: Any, length: Any) -> Any:
    """Return the number of scale groups if each has `length` groups. The last one may be shorter."""
    return e.b.sdiv(e.b.add(groups, e.b.sub(length, I64(1))), length)


def tile_size(e: Emit, layout: GroupFormat, groups: Any, tile: Any) -> Any:
    """Return the size of the tile at an address in bytes."""
    heads = e.b.mul(count_scale_groups(e, groups, _word(e, tile, Word.GROUPS_PER_SCALE)), I64(layout.head_bytes))
    return e.b.add(e.b.add(I64(HEADER_BYTES), heads), e.b.mul(groups, I64(layout.group_bytes)))


def columns_of_vector(layout: GroupFormat) -> int:
    """Return the number of columns in a vector of 64 bytes, which holds codes of 16 rows."""
    return 32 // layout.codes.bits


def load_floats(e: Emit, layout: GroupFormat, at: Any, vector: int) -> list[Any]:
    """Return the columns in vector number `vector` of the group at an address, 16 rows each, before scaling."""
    at = e.at(at, 64 * vector)
    if layout.numbers is None:
        return _load_float8(e, layout.float8 is torch.float8_e4m3fn, at)
    words = e.load(at, I32x16)
    shifts = [8 * byte + bit for bit in (0, 4) for byte in range(4)]
    return [e.lookup_floats(e.b.lshr(words, e.i(shift)), layout.numbers) for shift in shifts]


def _load_float8(e: Emit, e4m3: bool, at: Any) -> list[Any]:
    """Return four columns of 16 rows. The address has 16 words with the first two columns, then 16 with the other two.

    The first column of a pair is in the low bytes of the words, and the second in the high bytes.
    """
    b, words = e.b, e.load(at, I16x32)
    pairs = [b.shl(words, e.constant(I16x32, 8)), b.and_(words, e.constant(I16x32, -0x100))]
    if e4m3:  # e4m3 has one exponent bit less than float16
        pairs = [b.and_(b.ashr(pair, e.constant(I16x32, 1)), e.constant(I16x32, -0x4080)) for pair in pairs]
    halves = [b.bitcast(e.half_of(pair, half), F16x16) for half in range(2) for pair in pairs]
    return [widen(e, half) for half in halves]
