"""Weights in tiles times rows of activations.

One token is bound by memory: the floor is the weight's bytes at the machine's read rate, and its kernel walks one tile
at a time with a prefetch well ahead. Many tokens are bound by `vpdpbusd`: 2 x 16 rows meet 4 tokens, so that each load
of codes is used four times; the floor is 2 * tokens * rows * columns * planes operations at 128 a cycle and port.

Both reduce in the same order, so that the bits of an output depend neither on the number of tokens nor on who computes
it: integers within a group are exact, and groups are added one after another from the first on, in float32 with fused
multiply-adds. Weights of floats are multiplied in two chains, even and odd columns, which are added at the end.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from quant.cpu.activations import GROUP
from quant.cpu.tiles import AFFINE4, AFFINE4_MIN, AFFINE8, BRAIN, FORMATS, HALF, SINGLE, TILE, TileFormat
from quant.cpu.vector import (
    F16,
    F32,
    I16,
    I32,
    I64,
    Emit,
    F16x16,
    F32x16,
    I8x64,
    I16x16,
    I16x32,
    I32x16,
    byte,
    half_bits,
    inlined,
    jit,
    kernel,
    prefetch_lines,
)

AHEAD = 4096  # bytes that the kernel of one token prefetches in advance: 1024 and 16384 are slower
NIBBLE = ir.Constant(I8x64, [15] * 64)
GROUP_BYTES = tuple(layout.group_bytes for layout in FORMATS)  # by format number
_AFFINE4_MIN, _AFFINE4, _AFFINE8 = AFFINE4_MIN.number, AFFINE4.number, AFFINE8.number
_HALF, _BRAIN, _SINGLE = HALF.number, BRAIN.number, SINGLE.number

Cell = tuple[int, int]  # tile, token


class _Cells:
    """The sums of some tiles by some tokens: where they come from, and where they go.

    Tokens behind `count` are computed as copies of the last one, so that nothing outside of its rows is touched.
    """

    def __init__(
        self, e: Emit, tiles: int, tokens: int, x: Any, x_stride: Any, count: Any, out: Any, out_stride: Any
    ) -> None:
        self.e, b = e, e.b
        self.cells: list[Cell] = [(t, m) for t in range(tiles) for m in range(tokens)]
        last = b.sub(count, I64(1))
        index = [b.select(b.icmp_signed("<", I64(m), last), I64(m), last) for m in range(tokens)]
        self.x = [b.add(x, b.mul(x_stride, i)) for i in index]
        self._out = [b.add(out, b.mul(out_stride, i)) for i in index]

    def masks(self, rows: Any) -> list[Any]:
        tiles = 1 + max(t for t, _ in self.cells)
        return [self.e.first_lanes(self.e.b.sub(rows, I64(TILE * t))) for t in range(tiles)]

    def initial(self, add: Any, rows: Any) -> dict[Cell, Any]:
        """What is there already where `add` is not 0, else zeros."""
        masks, keep = self.masks(rows), self.e.b.icmp_signed("!=", add, I64(0))
        off = ir.Constant(masks[0].type, [0] * TILE)
        return {
            (t, m): self.e.load_some(self.e.at(self._out[m], 64 * t), self.e.b.select(keep, masks[t], off))
            for t, m in self.cells
        }

    def store(self, totals: dict[Cell, Any], rows: Any) -> None:
        masks = self.masks(rows)
        for t, m in self.cells:
            self.e.store_some(self.e.at(self._out[m], 64 * t), totals[t, m], masks[t])


def _make_affine_tile(layout: TileFormat, tiles: int, tokens: int, planes: int) -> Callable[..., None]:
    """`tiles` tiles by up to `tokens` rows of quantized activations."""
    codes_end, group_bytes = TILE * GROUP * layout.bits // 8, layout.group_bytes

    def load_codes(e: Emit, at: Any, chunk: int) -> Any:
        """The codes of 16 rows by the columns 4 * chunk to 4 * chunk + 3 of the group, one byte each."""
        if layout.bits == 8:
            return e.b.bitcast(e.load(e.at(at, 64 * chunk), I8x64, 32), I32x16)
        codes = e.load(e.at(at, 64 * (chunk // 2)), I8x64, 32)
        if chunk % 2:
            codes = e.b.bitcast(e.b.lshr(e.b.bitcast(codes, I16x32), ir.Constant(I16x32, [4] * 32)), I8x64)
        return e.b.bitcast(e.b.and_(codes, NIBBLE), I32x16)

    def integer_sums(e: Emit, cells: _Cells, codes_at: list[Any], groups: Any, g: Any) -> dict[Cell, Any]:
        """The exact dot products of one group."""
        b = e.b
        sums: dict[tuple[int, int, int], Any] = {(p, *cell): e.i(0) for p in range(planes) for cell in cells.cells}
        for plane in range(planes):
            for chunk in range(8):
                for t, at in enumerate(codes_at):
                    codes = load_codes(e, at, chunk)
                    for m in range(tokens):
                        row = e.at(cells.x[m], groups, GROUP * plane) if plane else cells.x[m]
                        four = e.load(e.at(e.at(row, g, GROUP), 4 * chunk), I32)
                        sums[plane, t, m] = e.dot(sums[plane, t, m], codes, e.splat(four))
            if plane == 0 and planes == 2 and tokens > 1:  # many tokens: go on in the same registers
                sums.update({(1, *cell): b.shl(sums[0, *cell], e.i(7)) for cell in cells.cells})
        if planes == 2 and tokens == 1:  # one token: two short chains, joined here
            sums.update({(1, *cell): b.add(sums[1, *cell], b.shl(sums[0, *cell], e.i(7))) for cell in cells.cells})
        return {cell: sums[planes - 1, *cell] for cell in cells.cells}

    def affine_tile(
        e: Emit, w: Any, groups: Any, x: Any, x_stride: Any, count: Any, out: Any, out_stride: Any, add: Any, rows: Any
    ) -> None:
        b = e.b
        cells = _Cells(e, tiles, tokens, x, x_stride, count, out, out_stride)
        totals = {cell: e.variable(value) for cell, value in cells.initial(add, rows).items()}
        starts = [e.at(w, groups, group_bytes * t) if t else w for t in range(tiles)]
        with cgutils.for_range(b, groups) as loop:
            g = loop.index
            at = [e.at(start, g, group_bytes) for start in starts]
            for line in range((group_bytes + 63) // 64 if tokens == 1 else 0):
                e.prefetch(e.at(at[0], AHEAD + 64 * line))
            sums = integer_sums(e, cells, at, groups, g)
            for t in range(tiles):
                scale = b.fpext(e.load(e.at(at[t], codes_end), F16x16, 32), F32x16)
                if layout.minimums:
                    least = b.fpext(e.load(e.at(at[t], codes_end + 2 * TILE), F16x16, 32), F32x16)
                else:
                    least = b.fmul(scale, e.f(-layout.zero))
                for m in range(tokens):
                    scale_at = e.at(e.at(cells.x[m], groups, 2 * GROUP), g, 4)
                    x_scale = e.splat(e.load(scale_at, F32))
                    x_sum = e.splat(e.load(e.at(scale_at, groups, 4), F32))
                    whole = b.sitofp(sums[t, m], F32x16)
                    total = e.fma(whole, b.fmul(scale, x_scale), b.load(totals[t, m]))
                    b.store(e.fma(least, x_sum, total), totals[t, m])
        cells.store({cell: b.load(slot) for cell, slot in totals.items()}, rows)

    affine_tile.__name__ = f"affine_tile_{layout.number}_{tiles}x{tokens}_{planes}"
    return kernel(affine_tile)


def _make_plain_tile(layout: TileFormat, tiles: int, tokens: int) -> Callable[..., None]:
    """`tiles` tiles of floats by up to `tokens` rows of floats."""
    column_bytes = TILE * layout.bits // 8

    def load_column(e: Emit, at: Any) -> Any:
        if layout is SINGLE:
            return e.load(at, F32x16, 32)
        if layout is HALF:
            return e.b.fpext(e.load(at, F16x16, 32), F32x16)
        wide = e.b.zext(e.load(at, I16x16, 32), I32x16)
        return e.b.bitcast(e.b.shl(wide, e.i(16)), F32x16)

    def plain_tile(
        e: Emit, w: Any, groups: Any, x: Any, x_stride: Any, count: Any, out: Any, out_stride: Any, add: Any, rows: Any
    ) -> None:
        b = e.b
        cells = _Cells(e, tiles, tokens, x, x_stride, count, out, out_stride)
        chains = {(odd, *cell): e.variable(e.f(0)) for odd in range(2) for cell in cells.cells}
        starts = [e.at(w, groups, layout.group_bytes * t) if t else w for t in range(tiles)]
        with cgutils.for_range(b, b.mul(groups, I64(GROUP // 4))) as loop:
            for column in range(4):
                weights = [
                    load_column(e, e.at(e.at(start, loop.index, 4 * column_bytes), column * column_bytes))
                    for start in starts
                ]
                for m in range(tokens):
                    value = e.splat(e.load(e.at(e.at(cells.x[m], loop.index, 16), 4 * column), F32))
                    for t in range(tiles):
                        slot = chains[column % 2, t, m]
                        b.store(e.fma(weights[t], value, b.load(slot)), slot)
        initial = cells.initial(add, rows)
        sums = {
            (t, m): b.fadd(b.fadd(b.load(chains[0, t, m]), b.load(chains[1, t, m])), initial[t, m])
            for t, m in cells.cells
        }
        cells.store(sums, rows)

    plain_tile.__name__ = f"plain_tile_{layout.number}_{tiles}x{tokens}"
    return kernel(plain_tile)


_min4_one_1, _min4_one_2 = (_make_affine_tile(AFFINE4_MIN, 1, 1, planes) for planes in (1, 2))
_min4_many_1, _min4_many_2 = (_make_affine_tile(AFFINE4_MIN, 2, 4, planes) for planes in (1, 2))
_affine4_one_1, _affine4_one_2 = (_make_affine_tile(AFFINE4, 1, 1, planes) for planes in (1, 2))
_affine4_many_1, _affine4_many_2 = (_make_affine_tile(AFFINE4, 2, 4, planes) for planes in (1, 2))
_affine8_one_1, _affine8_one_2 = (_make_affine_tile(AFFINE8, 1, 1, planes) for planes in (1, 2))
_affine8_many_1, _affine8_many_2 = (_make_affine_tile(AFFINE8, 2, 4, planes) for planes in (1, 2))
_half_one, _brain_one, _single_one = (_make_plain_tile(layout, 1, 1) for layout in (HALF, BRAIN, SINGLE))
_half_many, _brain_many, _single_many = (_make_plain_tile(layout, 2, 4) for layout in (HALF, BRAIN, SINGLE))


@jit
def _one_token(layout: int, planes: int, w: int, groups: int, x: int, out: int, add: int, rows: int) -> None:
    """One tile by one token."""
    if layout == _AFFINE4_MIN:
        if planes == 2:
            _min4_one_2(w, groups, x, 0, 1, out, 0, add, rows)
        else:
            _min4_one_1(w, groups, x, 0, 1, out, 0, add, rows)
    elif layout == _AFFINE4:
        if planes == 2:
            _affine4_one_2(w, groups, x, 0, 1, out, 0, add, rows)
        else:
            _affine4_one_1(w, groups, x, 0, 1, out, 0, add, rows)
    elif layout == _AFFINE8:
        if planes == 2:
            _affine8_one_2(w, groups, x, 0, 1, out, 0, add, rows)
        else:
            _affine8_one_1(w, groups, x, 0, 1, out, 0, add, rows)
    elif layout == _HALF:
        _half_one(w, groups, x, 0, 1, out, 0, add, rows)
    elif layout == _BRAIN:
        _brain_one(w, groups, x, 0, 1, out, 0, add, rows)
    elif layout == _SINGLE:
        _single_one(w, groups, x, 0, 1, out, 0, add, rows)


@jit
def _four_tokens(
    layout: int,
    planes: int,
    w: int,
    groups: int,
    x: int,
    x_stride: int,
    count: int,
    out: int,
    out_stride: int,
    add: int,
    rows: int,
) -> None:
    """Two tiles by up to four tokens."""
    if layout == _AFFINE4_MIN:
        if planes == 2:
            _min4_many_2(w, groups, x, x_stride, count, out, out_stride, add, rows)
        else:
            _min4_many_1(w, groups, x, x_stride, count, out, out_stride, add, rows)
    elif layout == _AFFINE4:
        if planes == 2:
            _affine4_many_2(w, groups, x, x_stride, count, out, out_stride, add, rows)
        else:
            _affine4_many_1(w, groups, x, x_stride, count, out, out_stride, add, rows)
    elif layout == _AFFINE8:
        if planes == 2:
            _affine8_many_2(w, groups, x, x_stride, count, out, out_stride, add, rows)
        else:
            _affine8_many_1(w, groups, x, x_stride, count, out, out_stride, add, rows)
    elif layout == _HALF:
        _half_many(w, groups, x, x_stride, count, out, out_stride, add, rows)
    elif layout == _BRAIN:
        _brain_many(w, groups, x, x_stride, count, out, out_stride, add, rows)
    elif layout == _SINGLE:
        _single_many(w, groups, x, x_stride, count, out, out_stride, add, rows)


@jit
def multiply_pair(
    layout: int,
    planes: int,
    w: int,
    tile_bytes: int,
    groups: int,
    x: int,
    x_stride: int,
    n: int,
    out: int,
    out_stride: int,
    add: int,
    rows: int,
) -> None:
    """Up to PAIR rows of a weight, two tiles at address w, times n rows of activations at x.

    Writes `rows` float32 at `out` for each token, added to what is there where `add` is 1. Strides are bytes.
    """
    if n <= 2:
        for m in range(n):
            for t in range(0, rows, TILE):
                at = out + 4 * t + m * out_stride
                _one_token(layout, planes, w + t // TILE * tile_bytes, groups, x + m * x_stride, at, add, rows - t)
        return
    # While a pair is multiplied, the next one comes from memory.
    ahead, lines = w + 2 * tile_bytes, tile_bytes // 32 // ((n + 3) // 4) + 1
    for m in range(0, n, 4):
        prefetch_lines(ahead, lines)
        ahead += lines * 64
        count = min(4, n - m)
        _four_tokens(
            layout, planes, w, groups, x + m * x_stride, x_stride, count, out + m * out_stride, out_stride, add, rows
        )


@jit
def read_row(layout: int, tiles: int, tile_bytes: int, groups: int, row: int, out: int) -> None:
    """Row `row` of a weight as float32 at `out`: an embedding look-up."""
    group_bytes = tile_bytes // groups
    at = tiles + row // TILE * tile_bytes
    lane = row % TILE
    for g in range(groups):
        if layout in (_AFFINE4_MIN, _AFFINE4):
            _read_group4(at, lane, layout == _AFFINE4_MIN, out + 4 * GROUP * g)
        elif layout == _AFFINE8:
            _read_group8(at, lane, out + 4 * GROUP * g)
        else:
            _read_plain(layout, at, lane, out + 4 * GROUP * g)
        at += group_bytes


@inlined
def _put_affine(e: Emit, out: Any, column: Any, scale: Any, code: Any, least: Any) -> None:
    """out[column] = float16(scale) * code + float16(least), rounded twice as the canonical form is."""
    b = e.b
    scale, least = (b.fpext(b.bitcast(b.trunc(bits, I16), F16), F32) for bits in (scale, least))
    e.store(e.at(out, column, 4), b.fadd(b.fmul(scale, b.sitofp(code, F32)), least), 4)


@inlined
def _put_bits(e: Emit, out: Any, column: Any, bits: Any, kind: Any) -> None:
    """out[column] = the float whose bits these are: float16 (0), bfloat16 (1) or float32 (2)."""
    b = e.b
    short = b.fpext(b.bitcast(b.trunc(bits, I16), F16), F32)
    brain = b.bitcast(b.shl(b.trunc(bits, I32), I32(16)), F32)
    single = b.bitcast(b.trunc(bits, I32), F32)
    value = b.select(b.icmp_signed("==", kind, I64(1)), brain, single)
    e.store(e.at(out, column, 4), b.select(b.icmp_signed("==", kind, I64(0)), short, value), 4)


@jit
def _read_group4(at: int, lane: int, with_minimum: int, out: int) -> None:
    scale = half_bits(at + 256 + 2 * lane)
    least = half_bits(at + 288 + 2 * lane) if with_minimum else 0
    zero = 0 if with_minimum else 8
    for column in range(GROUP):
        codes = byte(at + column // 8 * 64 + 4 * lane + column % 4)
        code = codes >> 4 if column % 8 >= 4 else codes & 15
        _put_affine(out, column, scale, code - zero, least)


@jit
def _read_group8(at: int, lane: int, out: int) -> None:
    scale = half_bits(at + 512 + 2 * lane)
    for column in range(GROUP):
        _put_affine(out, column, scale, byte(at + column // 4 * 64 + 4 * lane + column % 4) - 128, 0)


@jit
def _read_plain(layout: int, at: int, lane: int, out: int) -> None:
    for column in range(GROUP):
        if layout == _SINGLE:
            place = at + 4 * (column * TILE + lane)
            _put_bits(out, column, half_bits(place) | half_bits(place + 2) << 16, 2)
        else:
            _put_bits(out, column, half_bits(at + 2 * (column * TILE + lane)), 0 if layout == _HALF else 1)
