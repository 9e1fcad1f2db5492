"""Weights in tiles times rows of activations: kernels for one token, two and four, for each layout.

One token is bound by memory: the floor is the weight's bytes at the machine's read rate, and its kernel walks one tile
at a time with a prefetch well ahead. Many tokens are bound by `vpdpbusd`: 2 x 16 rows meet 4 tokens, so that each load
of codes is used four times; the floor is 2 * tokens * rows * columns * planes operations at 128 a cycle and port.

Both reduce in the same order, so that the bits of an output depend neither on the number of tokens nor on who computes
it: integers within a group are exact, and groups are added one after another from the first on, in float32 with fused
multiply-adds. Weights of floats are multiplied in two chains, even and odd columns, which are added at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from quant.cpu.activations import GROUP, Form
from quant.cpu.tiles import FORMATS, HALF, SINGLE, TILE, TileFormat
from quant.cpu.vector import (
    F16,
    F32,
    I32,
    I64,
    Emit,
    F16x16,
    F32x16,
    I8x16,
    I8x64,
    I16x16,
    I16x32,
    I32x16,
    inlined,
    jit,
    kernel,
)

AHEAD = 4096  # bytes that the kernel of one token prefetches in advance: 1024 and 16384 are slower
TOKENS = 4  # that are multiplied at once
NIBBLE = ir.Constant(I8x64, [15] * 64)

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
        sums = {(plane, *cell): e.i(0) for plane in range(planes) for cell in cells.cells}
        for chunk in range(8):
            codes = [load_codes(e, at, chunk) for at in codes_at]
            for plane in range(planes):
                for m in range(tokens):
                    row = e.at(cells.x[m], groups, GROUP * plane) if plane else cells.x[m]
                    four = e.splat(e.load(e.at(e.at(row, g, GROUP), 4 * chunk), I32))
                    for t in range(tiles):
                        sums[plane, t, m] = e.dot(sums[plane, t, m], codes[t], four)
        if planes == 1:
            return {cell: sums[0, *cell] for cell in cells.cells}
        return {cell: b.add(sums[1, *cell], b.shl(sums[0, *cell], e.i(7))) for cell in cells.cells}

    def affine_tile(
        e: Emit,
        w: Any,
        groups: Any,
        x: Any,
        x_stride: Any,
        count: Any,
        out: Any,
        out_stride: Any,
        add: Any,
        rows: Any,
        fetch: Any,
        lines: Any,
    ) -> None:
        b = e.b
        cells = _Cells(e, tiles, tokens, x, x_stride, count, out, out_stride)
        totals = {cell: e.variable(value) for cell, value in cells.initial(add, rows).items()}
        starts = [e.at(w, groups, group_bytes * t) if t else w for t in range(tiles)]
        with cgutils.for_range(b, groups) as loop:
            g = loop.index
            at = [e.at(start, g, group_bytes) for start in starts]
            if tokens == 1:
                for line in range((group_bytes + 63) // 64):
                    e.prefetch(e.at(at[0], AHEAD + 64 * line))
            else:
                with cgutils.for_range(b, lines) as fetching:
                    e.prefetch(e.at(b.add(fetch, b.mul(g, b.mul(lines, I64(64)))), fetching.index, 64))
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
        e: Emit,
        w: Any,
        groups: Any,
        x: Any,
        x_stride: Any,
        count: Any,
        out: Any,
        out_stride: Any,
        add: Any,
        rows: Any,
        fetch: Any,
        lines: Any,
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


def _make_affine_row(layout: TileFormat) -> Callable[..., None]:
    """One row as float32, rounded as the canonical form is: an embedding look-up."""
    codes_end = TILE * GROUP * layout.bits // 8
    quarter = ir.VectorType(I32, 4)

    def column_bytes(e: Emit, at: Any, lane: Any, chunks: range) -> Any:
        """The 16 bytes of a row in four chunks of 64."""
        four = ir.Constant(quarter, ir.Undefined)
        for place, chunk in enumerate(chunks):
            four = e.b.insert_element(four, e.load(e.at(e.at(at, 64 * chunk), lane, 4), I32), I32(place))
        return e.b.bitcast(four, I8x16)

    def codes_of(e: Emit, at: Any, lane: Any) -> list[Any]:
        """Columns 0 to 15 and 16 to 31 of the group, a byte each."""
        if layout.bits == 8:
            return [column_bytes(e, at, lane, range(4)), column_bytes(e, at, lane, range(4, 8))]
        both = column_bytes(e, at, lane, range(4))
        low = e.b.and_(both, ir.Constant(I8x16, [15] * 16))
        high = e.b.lshr(both, ir.Constant(I8x16, [4] * 16))
        order = [8 * half + 4 * j + k for half in range(2) for j in range(2) for k in range(4)]
        fours = [[place + 16 * upper for upper in (0, 1) for place in order[4 * j : 4 * j + 4]] for j in range(4)]
        return [
            e.b.shuffle_vector(low, high, ir.Constant(I32x16, fours[2 * half] + fours[2 * half + 1]))
            for half in range(2)
        ]

    def affine_row(e: Emit, w: Any, groups: Any, lane: Any, out: Any) -> None:
        b = e.b
        with cgutils.for_range(b, groups) as loop:
            at = e.at(w, loop.index, layout.group_bytes)
            scale = e.splat(b.fpext(e.load(e.at(e.at(at, codes_end), lane, 2), F16, 2), F32))
            for half, codes in enumerate(codes_of(e, at, lane)):
                whole = b.sub(b.zext(codes, I32x16), e.i(layout.zero))
                values = b.fmul(scale, b.sitofp(whole, F32x16))
                if layout.minimums:
                    least = e.load(e.at(e.at(at, codes_end + 2 * TILE), lane, 2), F16, 2)
                    values = b.fadd(values, e.splat(b.fpext(least, F32)))
                e.store(e.at(e.at(out, loop.index, 4 * GROUP), 64 * half), values)

    affine_row.__name__ = f"affine_row_{layout.number}"
    return kernel(affine_row)


def _make_plain_row(layout: TileFormat) -> Callable[..., None]:
    size = layout.bits // 8

    def plain_row(e: Emit, w: Any, groups: Any, lane: Any, out: Any) -> None:
        b = e.b
        with cgutils.for_range(b, b.mul(groups, I64(GROUP))) as loop:
            at = e.at(e.at(w, loop.index, TILE * size), lane, size)
            if layout is SINGLE:
                value = e.load(at, F32)
            elif layout is HALF:
                value = b.fpext(e.load(at, F16), F32)
            else:
                value = b.bitcast(b.shl(b.zext(e.load(at, ir.IntType(16)), I32), I32(16)), F32)
            e.store(e.at(out, loop.index, 4), value)

    plain_row.__name__ = f"plain_row_{layout.number}"
    return kernel(plain_row)


@dataclass(frozen=True, slots=True)
class TileKernels:
    """The kernels of one layout for one form of activations, as compiled code calls them."""

    one: Any  # one tile by one token
    two: Any  # two tiles by up to two tokens
    four: Any  # two tiles by up to four tokens


ROW_KERNELS: dict[TileFormat, Any] = {
    layout: _make_plain_row(layout) if layout.plain else _make_affine_row(layout) for layout in FORMATS
}
TILE_KERNELS: dict[tuple[TileFormat, Form], TileKernels] = {
    (layout, form): TileKernels(
        *(
            _make_plain_tile(layout, tiles, tokens)
            if layout.plain
            else _make_affine_tile(layout, tiles, tokens, int(form))
            for tiles, tokens in ((1, 1), (2, 2), (2, TOKENS))
        )
    )
    for layout in FORMATS
    for form in ((Form.FLOAT,) if layout.plain else (Form.ONE_PLANE, Form.TWO_PLANES))
}


@inlined
def _call_tile(
    e: Emit, address: Any, w: Any, groups: Any, x: Any, x_stride: Any, count: Any, out: Any, out_stride: Any,
    add: Any, rows: Any, fetch: Any, lines: Any,
) -> None:  # fmt: skip
    e.call_address(address, w, groups, x, x_stride, count, out, out_stride, add, rows, fetch, lines)


@inlined
def _call_row(e: Emit, address: Any, w: Any, groups: Any, lane: Any, out: Any) -> None:
    e.call_address(address, w, groups, lane, out)


@jit
def read_row(row_kernel: int, w: int, tile_bytes: int, groups: int, row: int, out: int) -> None:
    """Row `row` of the weight at address w as float32 at `out`; the kernel is the address of one of ROW_KERNELS."""
    _call_row(row_kernel, w + row // TILE * tile_bytes, groups, row % TILE, out)


@jit
def multiply_pair(
    one: int, two: int, four: int, w: int, tile_bytes: int, groups: int, x: int, x_stride: int, n: int, out: int,
    out_stride: int, add: int, rows: int,
) -> None:  # fmt: skip
    """Up to PAIR rows of a weight, two tiles at address w, times n rows of activations at x.

    Writes `rows` float32 at `out` for each token, added to what is there where `add` is 1. `one`, `two` and `four`
    are addresses of TILE_KERNELS; strides are bytes.
    """
    if n == 1:
        for t in range(0, rows, TILE):
            _call_tile(one, w + t // TILE * tile_bytes, groups, x, x_stride, 1, out + 4 * t, 0, add, rows - t, 0, 0)
        return
    # While a pair is multiplied, the next one comes from memory: each pass asks for its share of it.
    passes = (n + TOKENS - 1) // TOKENS
    lines = (2 * tile_bytes // groups // 64 + passes) // passes
    ahead = w + 2 * tile_bytes
    for m in range(0, n, TOKENS):
        count, at, y = min(TOKENS, n - m), x + m * x_stride, out + m * out_stride
        tile = four if count > 2 else two
        _call_tile(tile, w, groups, at, x_stride, count, y, out_stride, add, rows, ahead, lines)
        ahead += lines * groups * 64
