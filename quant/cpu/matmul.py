"""Weights in tiles times rows of activations: kernels for one token, two and four, for each layout.

One token is bound by memory: the floor is the weight's bytes at the machine's read rate, and its kernel walks one tile
at a time with a prefetch well ahead. Many tokens are bound by `vpdpbusd`: 2 x 16 rows meet 4 tokens, so that each load
of codes is used four times; the floor is 2 * tokens * rows * columns * planes operations at 128 a cycle and port.

Both reduce in the same order, so that the bits of an output depend neither on the number of tokens nor on who computes
it: integers within a group are exact (within half of one, where halves have scales of their own), and groups are added
one after another from the first on, in float32 with fused multiply-adds. Weights of floats are multiplied in two
chains, even and odd columns, which are added at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from quant.cpu.activations import GROUP, Form, RowGroup
from quant.cpu.formats import FORMATS, HALF, SINGLE, TILE, TileFormat
from quant.cpu.groups import each_group, load_codes, load_scales
from quant.cpu.kernel import inlined, jit, kernel
from quant.cpu.vector import F32, I64, Emit, F16x16, F32x16, I16x16, I32x16

AHEAD = 4096  # bytes that the kernel of one token prefetches in advance: 1024 and 16384 are slower
TOKENS = 4  # that are multiplied at once
FEW = (1, 2)  # tiles and tokens whose sums fit into 16 registers of 32 bytes

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


def _integer_sums(
    e: Emit, layout: TileFormat, tiles_at: list[Any], rows: list[RowGroup], planes: int, half: int
) -> dict[Cell, Any]:
    """The exact dot products of one group of some tiles and rows, or of one half of it."""
    b, cells = e.b, list(product(range(len(tiles_at)), range(len(rows))))
    halves, chunks = layout.scales.halves, 8 // layout.scales.halves
    sums = {(plane, *cell): e.i(0) for plane in range(planes) for cell in cells}
    if layout.zero:  # what the zero point adds is taken away beforehand, which costs nothing
        less = [row.integer_sum(half, halves, -layout.zero) for row in rows]
        sums.update({(planes - 1, t, m): less[m] for t, m in cells})
    for chunk in range(chunks * half, chunks * (half + 1)):
        codes = [b.bitcast(load_codes(e, layout, at, chunk), I32x16) for at in tiles_at]
        for plane in range(planes):
            four = [row.columns(plane, chunk) for row in rows]
            for t, m in cells:
                sums[plane, t, m] = e.dot(sums[plane, t, m], codes[t], four[m], layout.dot_bits)
    if planes == 1:
        return {cell: sums[0, *cell] for cell in cells}
    return {cell: b.add(sums[1, *cell], b.shl(sums[0, *cell], e.i(7))) for cell in cells}


def _make_coded_tile(layout: TileFormat, tiles: int, tokens: int, planes: int) -> Callable[..., None]:
    """`tiles` tiles by up to `tokens` rows of quantized activations."""
    halves = layout.scales.halves

    def add_group(
        e: Emit, places: list[tuple[Any, Any]], rows: list[RowGroup], half: int, totals: dict[Cell, Any]
    ) -> None:
        """Add the products of one group, or of half of it. A place: the addresses of a tile's group and of its head."""
        b, sums = e.b, _integer_sums(e, layout, [at for at, _ in places], rows, planes, half)
        scales = [load_scales(e, layout, at, head)[half] for at, head in places]
        x_scales = [row.scale() for row in rows]
        x_sums = [row.sum(half, halves) for row in rows] if layout.scales.minimum else []
        for (t, m), found in sums.items():
            (scale, minimum), whole = scales[t], b.sitofp(found, F32x16)
            total = e.fma(whole, b.fmul(scale, x_scales[m]), b.load(totals[t, m]))
            if minimum is not None:
                total = e.fma(minimum, x_sums[m], total)
            b.store(total, totals[t, m])

    def coded_tile(
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
        tile_bytes = b.sdiv(b.mul(groups, I64(layout.span_bytes)), I64(layout.scales.span))
        starts = [e.at(w, tile_bytes, t) if t else w for t in range(tiles)]
        with each_group(e, layout, groups, starts) as (g, at, heads):
            if tokens == 1:
                for line in range((layout.group_bytes + 63) // 64):
                    e.prefetch(e.at(at[0], AHEAD + 64 * line))
            else:
                with cgutils.for_range(b, lines) as fetching:
                    e.prefetch(e.at(b.add(fetch, b.mul(g, b.mul(lines, I64(64)))), fetching.index, 64))
            few = FEW if e.has_few_registers else (tiles, tokens)
            for half, t, m in product(range(halves), range(0, tiles, few[0]), range(0, tokens, few[1])):
                rows_here = [RowGroup(e, row, groups, g) for row in cells.x[m : m + few[1]]]
                places = list(zip(at, heads, strict=True))[t : t + few[0]]
                add_group(e, places, rows_here, half, {(i - t, j - m): slot for (i, j), slot in totals.items()})
        cells.store({cell: b.load(slot) for cell, slot in totals.items()}, rows)

    coded_tile.__name__ = f"coded_tile_{layout.number}_{tiles}x{tokens}_{planes}"
    return kernel(coded_tile, layout.part)


def _make_plain_tile(layout: TileFormat, tiles: int, tokens: int) -> Callable[..., None]:
    """`tiles` tiles of floats by up to `tokens` rows of floats."""
    column_bytes = TILE * layout.bits // 8

    def load_column(e: Emit, at: Any) -> Any:
        if layout is SINGLE:
            return e.load(at)
        if layout is HALF:
            return e.widen(e.load(at, F16x16))
        wide = e.b.zext(e.load(at, I16x16), I32x16)
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
    return kernel(plain_tile, layout.part)


@dataclass(frozen=True, slots=True)
class TileKernels:
    """The kernels of one layout for one form of activations, as compiled code calls them."""

    one: Any  # one tile by one token
    two: Any  # two tiles by up to two tokens
    four: Any  # two tiles by up to four tokens


TILE_KERNELS: dict[tuple[TileFormat, Form], TileKernels] = {
    (layout, form): TileKernels(
        *(
            _make_plain_tile(layout, tiles, tokens)
            if layout.plain
            else _make_coded_tile(layout, tiles, tokens, int(form))
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
