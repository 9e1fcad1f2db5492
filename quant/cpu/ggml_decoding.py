"""Decode one group of a GGML tile in registers: codes to bytes, and scales to floats.

The code is generated from the format's row in `quant.cpu.ggml_formats`, for the layout of `quant.cpu.ggml_tiles`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from quant.cpu.float16 import widen
from quant.cpu.ggml_formats import HALF_BYTES, TILE, GGMLFormat, SubScales
from quant.cpu.vector import I32, I64, Emit, F16x16, F32x16, I8x16, I8x32, I8x64, I16x32, I32x16


def load_codes(e: Emit, layout: GGMLFormat, at: Any, chunk: int) -> Any:
    """Return 16 rows by columns 4 * chunk to 4 * chunk + 3 of the group, as unsigned bytes.

    They are codes, or the table's values for the codes, which are also unsigned because the table includes the zero
    point.
    """
    if layout.is_packed6:
        return _load_packed6(e, e.at(at, 64 * 3 * (chunk // 4)), chunk % 4)
    codes, shift = None, 0
    for plane, bits in enumerate(layout.planes):
        vector, index = divmod(chunk, 8 // bits)
        part = e.load(e.at(at, 64 * (sum(layout.planes[:plane]) + vector)), I8x64)
        if bits < 8:
            part = _move(e, part, bits * index - shift, ((1 << bits) - 1) << shift)
        codes, shift = part if codes is None else e.b.or_(codes, part), shift + bits
    return codes if layout.table is None else e.lookup(codes, layout.table)


def _load_packed6(e: Emit, at: Any, index: int) -> Any:
    """Return one of four chunks of packed 6-bit codes: a vector's low bits, or the top bits of all three vectors."""
    vectors = [e.load(e.at(at, 64 * vector), I8x64) for vector in range(3)]
    if index < 3:
        return _move(e, vectors[index], 0, 0x3F)
    codes = vectors[0]
    for vector in vectors[1:]:
        codes = e.b.or_(_move(e, codes, 2, 0x3F), e.b.and_(vector, ir.Constant(I8x64, [0xC0] * 64)))
    return _move(e, codes, 2, 0x3F)


def _move(e: Emit, codes: Any, right: int, mask: int) -> Any:
    """Shift bytes right by up to 7 bits, or left if negative, and apply `mask`."""
    # no instruction shifts single bytes: shift pairs, and let the mask drop bits of the other byte
    pairs = e.b.bitcast(codes, I16x32)
    if right > 0:
        pairs = e.b.lshr(pairs, ir.Constant(I16x32, [right] * 32))
    elif right < 0:
        pairs = e.b.shl(pairs, ir.Constant(I16x32, [-right] * 32))
    return e.b.and_(e.b.bitcast(pairs, I8x64), ir.Constant(I8x64, [mask] * 64))


def load_scales(e: Emit, layout: GGMLFormat, at: Any, head: Any, g: Any) -> list[tuple[Any, Any]]:
    """Return the scales of 16 rows and their negated minimums (or None), for each half of the group or for the group.

    `at` is the address of group `g`, and `head` the address of the block scales.
    """
    scales, after = layout.scales, e.at(at, layout.codes_bytes)
    if scales.exponent:
        return [(_in_units(e, layout, _powers(e, e.load(after, I8x16))), None)]
    block_scales = load_block_scales(e, layout, head if layout.head_bytes else after)
    if scales.sub_scales is None:
        return [(block_scales[0], block_scales[1] if scales.minimum else None)]
    sub_scales = [load_sub_scales(e, layout, at)]
    if scales.minimum:
        sub_scales.append(_sub_minimums_of(e, layout, head, e.b.urem(g, I64(scales.block_groups))))
    scaled = [
        [e.b.fmul(block_scale, e.b.sitofp(sub_scale, F32x16)) for sub_scale in of_block]
        for block_scale, of_block in zip(block_scales, sub_scales, strict=True)
    ]
    return [(half, scaled[1][i] if scales.minimum else None) for i, half in enumerate(scaled[0])]


def load_block_scales(e: Emit, layout: GGMLFormat, at: Any) -> list[Any]:
    """Return the float16 block scales of 16 rows at an address as floats, and the block's minimums if there are any."""
    scale, *minimum = (
        widen(e, e.load(e.at(at, HALF_BYTES * index), F16x16)) for index in range(1 + layout.scales.minimum)
    )
    return [_in_units(e, layout, scale), *minimum]


def _in_units(e: Emit, layout: GGMLFormat, scale: Any) -> Any:
    unit = layout.scales.unit
    return scale if unit == 1.0 else e.b.fmul(scale, e.f(unit))


def load_sub_scales(e: Emit, layout: GGMLFormat, at: Any) -> list[Any]:
    """Return the sub-scales of 16 rows as int32, for each half of the group at `at` or for the group."""
    scales, at = layout.scales, e.at(at, layout.codes_bytes)
    b, sub_scales, found, shift = e.b, scales.sub_scales or SubScales(), [e.i(0)] * scales.halves, 0
    if sub_scales.signed:
        return [b.sext(e.load(e.at(at, TILE * half), I8x16), I32x16) for half in range(scales.halves)]
    for bits in sub_scales.planes:
        for half in range(scales.halves):
            if bits == 2:
                word = e.splat(e.load(e.at(at, 4 * half), I32))
                stored = b.and_(b.lshr(word, ir.Constant(I32x16, list(range(0, 32, 2)))), e.i(3))
            else:
                stored = b.zext(e.load(e.at(at, TILE * half if bits == 8 else 0), I8x16), I32x16)
            if bits == 4:
                stored = b.lshr(stored, e.i(4)) if half else b.and_(stored, e.i(15))
            found[half] = b.or_(found[half], b.shl(stored, e.i(shift))) if shift else stored
        at, shift = e.at(at, TILE * bits * scales.halves // 8), shift + bits
    return [b.sub(part, e.i(sub_scales.zero)) for part in found]


def load_sub_minimums(e: Emit, layout: GGMLFormat, head: Any, pair: Any) -> Any:
    """Return two sub-minimums for each of 16 rows, as adjacent int16. They belong to two halves or to two groups."""
    scales = layout.scales
    at = e.at(e.at(head, scales.block_scale_bytes), pair, 2 // scales.halves * scales.sub_scale_bytes)
    if scales.halves == 1:
        return e.b.bitcast(e.b.zext(e.load(at, I8x32), I16x32), I32x16)
    both = e.b.zext(e.load(at, I8x16), I32x16)
    return e.b.or_(e.b.and_(both, e.i(15)), e.b.shl(e.b.lshr(both, e.i(4)), e.i(16)))


def _sub_minimums_of(e: Emit, layout: GGMLFormat, head: Any, number: Any) -> list[Any]:
    """Return the sub-minimums of one group of a block, int32, for each half or for the group."""
    b, low = e.b, e.i(0xFFFF)
    if layout.scales.halves == 2:
        pair = load_sub_minimums(e, layout, head, number)
        return [b.and_(pair, low), b.lshr(pair, e.i(16))]
    pair = load_sub_minimums(e, layout, head, b.lshr(number, I64(1)))
    shift = e.splat(b.trunc(b.shl(b.and_(number, I64(1)), I64(4)), I32))
    return [b.and_(b.lshr(pair, shift), low)]


def _powers(e: Emit, exponents: Any) -> Any:
    """Return 2 ** (e - 128) for 16 bytes e. The two smallest results are subnormal."""
    b, wide = e.b, e.b.zext(exponents, I32x16)
    small = b.shl(e.i(0x00200000), b.and_(wide, e.i(1)))
    bits = b.select(b.icmp_signed("<", wide, e.i(2)), small, b.shl(b.sub(wide, e.i(1)), e.i(23)))
    return b.bitcast(bits, F32x16)


@contextmanager
def each_group(e: Emit, layout: GGMLFormat, groups: Any, starts: list[Any]) -> Iterator[tuple[Any, list[Any], Any]]:
    """Loop over groups. Yields the group's index and, for each tile, the addresses of the group and of its block
    scales.
    """
    if layout.scales.block_groups == 1:
        with cgutils.for_range(e.b, groups) as loop:
            at = [e.at(start, loop.index, layout.group_bytes) for start in starts]
            yield loop.index, at, at
        return
    size = I64(layout.scales.block_groups)
    with cgutils.for_range(e.b, e.b.sdiv(groups, size)) as outer:
        heads = [e.at(start, outer.index, layout.block_bytes) for start in starts]
        with cgutils.for_range(e.b, size) as inner:
            at = [e.at(e.at(head, layout.head_bytes), inner.index, layout.group_bytes) for head in heads]
            yield e.b.add(e.b.mul(outer.index, size), inner.index), at, heads
