"""What kernels of products share: the sums of some tiles by some tokens, and their integer parts.

Knows where sums come from and go. Refuses to know scales.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Self

from llvmlite import ir
from numba.core import cgutils

from quant.cpu.activations import RowGroup, SuperGroup
from quant.cpu.ggml_decoding import load_codes
from quant.cpu.ggml_formats import TILE, GGMLFormat
from quant.cpu.group_formats import GroupFormat
from quant.cpu.kernel import kernel
from quant.cpu.vector import I64, Emit, I32x16

AHEAD = 4096  # bytes that the kernel of one token prefetches in advance: 1024 and 16384 are slower
FEW = (1, 2)  # tiles and tokens whose sums fit into 16 registers of 32 bytes

Cell = tuple[int, int]  # tile, token


class Accumulators:
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


@dataclass(frozen=True, slots=True)
class TileCall:
    """What else a tile's kernel is told, all int64."""

    w: Any  # the address of the first tile
    groups: Any  # of a row
    add: Any  # 1: to what is there
    rows: Any  # of the tiles, that there are
    fetch: Any  # the address of what is needed next
    lines: Any  # of it


def tile_kernel(
    name: str, tiles: int, tokens: int, part: str, emit: Callable[[Emit, Accumulators, TileCall], None]
) -> Callable[..., None]:
    """The kernel of some tiles by up to some tokens, as all callers call it, whatever the tiles hold."""

    def tile(
        e: Emit, w: Any, groups: Any, x: Any, x_stride: Any, count: Any, out: Any, out_stride: Any,
        add: Any, rows: Any, fetch: Any, lines: Any,
    ) -> None:  # fmt: skip
        acc = Accumulators(e, tiles, tokens, x, x_stride, count, out, out_stride)
        emit(e, acc, TileCall(w, groups, add, rows, fetch, lines))

    tile.__name__ = name
    return kernel(tile, part)


def integer_sums(
    e: Emit,
    layout: GGMLFormat,
    tiles_at: list[Any],
    rows: Sequence[RowGroup | SuperGroup],
    planes: int,
    half: int = 0,
    zeros: Sequence[Any] = (),
) -> dict[Cell, Any]:
    """The exact dot products of one group of some tiles and rows, or of one half of it.

    `zeros` are the zero points of each tile, int32, where the layout has not the same for all.
    """
    b, cells = e.b, list(product(range(len(tiles_at)), range(len(rows))))
    halves, chunks = layout.scales.halves, 8 // layout.scales.halves
    sums = {(plane, *cell): e.i(0) for plane in range(planes) for cell in cells}
    if layout.zero:  # what the zero point adds is taken away beforehand, which costs nothing
        less = [row.integer_sum(half, halves, -layout.zero) for row in rows]
        sums.update({(planes - 1, t, m): less[m] for t, m in cells})
    if zeros:
        less = [row.integer_sum(half, halves, -1) for row in rows]
        sums.update({(planes - 1, t, m): b.mul(zeros[t], less[m]) for t, m in cells})
    for chunk in range(chunks * half, chunks * (half + 1)):
        codes = [b.bitcast(load_codes(e, layout, at, chunk), I32x16) for at in tiles_at]
        for plane in range(planes):
            four = [row.columns(plane, chunk) for row in rows]
            for t, m in cells:
                sums[plane, t, m] = e.dot(sums[plane, t, m], codes[t], four[m], layout.dot_bits)
    if planes == 1:
        return {cell: sums[0, *cell] for cell in cells}
    return {cell: b.add(sums[1, *cell], b.shl(sums[0, *cell], e.i(7))) for cell in cells}


def register_blocks(e: Emit, tiles: int, tokens: int) -> list[tuple[slice, slice]]:
    """Tiles and tokens, cut into what fits into registers."""
    few = FEW if e.has_few_registers else (tiles, tokens)
    return [
        (slice(t, t + few[0]), slice(m, m + few[1]))
        for t, m in product(range(0, tiles, few[0]), range(0, tokens, few[1]))
    ]


def slots_of_block(slots: dict[Cell, Any], block: tuple[slice, slice]) -> dict[Cell, Any]:
    """Those of a block, by their indices in it."""
    tiles, tokens = block
    return {
        (t - tiles.start, m - tokens.start): slot
        for (t, m), slot in slots.items()
        if tiles.start <= t < tiles.stop and tokens.start <= m < tokens.stop
    }


def prefetch_group(e: Emit, layout: GGMLFormat | GroupFormat, at: Any) -> None:
    """Ask for a group further on in the tile."""
    for line in range((layout.group_bytes + 63) // 64):
        e.prefetch(e.at(at, AHEAD + 64 * line))


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Some lines from an address on, asked for in as many count: few at a time, evenly, or what is read waits."""

    e: Emit
    address: Any
    each: Any  # lines

    @classmethod
    def spread(cls, e: Emit, address: Any, lines: Any, count: Any) -> Self:
        return cls(e, address, e.b.sdiv(e.b.add(lines, e.b.sub(count, I64(1))), count))

    def emit(self, index: Any) -> None:
        e, at = self.e, self.e.at(self.address, self.e.b.mul(index, self.each), 64)
        e.prefetch(at)  # mostly there is but one, and a loop around it would cost as much again
        with cgutils.for_range(e.b, self.each, start=I64(1)) as loop:
            e.prefetch(e.at(at, loop.index, 64))
