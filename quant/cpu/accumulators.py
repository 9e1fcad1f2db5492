"""Code shared by all matrix product kernels: accumulators, integer dot products, and prefetches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Self

from llvmlite import ir
from numba.core import cgutils

from quant.cpu.activations import PLANE_MAGNITUDES, RowGroup, SuperGroup
from quant.cpu.dot_sums import DotSums
from quant.cpu.ggml_decoding import load_codes
from quant.cpu.ggml_formats import TILE, GGMLFormat
from quant.cpu.group_formats import GroupFormat
from quant.cpu.kernel import kernel
from quant.cpu.vector import I64, Emit, I32x16

AHEAD = 4096  # prefetch distance of the one-token kernels in bytes; 1024 and 16384 are slower
FEW = (1, 2)  # number of tiles and tokens whose accumulators fit into 16 registers of 32 bytes

Cell = tuple[int, int]  # tile, token


class Accumulators:
    """The sums of `tiles` tiles by `tokens` tokens: read from memory or zeroed, and written back.

    Tokens at or above `count` are computed as copies of the last token, so that no other memory is accessed.
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
        """Return the values at the output if `add` is not 0, else zeros."""
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
    """The arguments of a tile kernel besides those of its `Accumulators`, all int64."""

    w: Any  # address of the first tile
    groups: Any  # number of groups in a row of the weight
    add: Any  # 1: add to the values at the output
    rows: Any  # number of real rows in the tiles; the rest are padding
    fetch: Any  # address to prefetch
    lines: Any  # number of cache lines to prefetch


def tile_kernel(
    name: str, tiles: int, tokens: int, part: str, emit: Callable[[Emit, Accumulators, TileCall], None]
) -> Callable[..., None]:
    """Make the kernel for `tiles` tiles by up to `tokens` tokens. All layouts have the same signature."""

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
    """Return the exact dot products of one group, or half a group, for some tiles and rows of activations.

    `zeros` are the zero points of each tile, int32, if the layout does not have one zero point for all.
    """
    b, cells = e.b, list(product(range(len(tiles_at)), range(len(rows))))
    halves, chunks = layout.scales.halves, 8 // layout.scales.halves
    sums = {(plane, *cell): e.i(0) for plane in range(planes) for cell in cells}
    if layout.zero:  # start with the zero point's contribution, which then costs no extra addition
        less = [row.integer_sum(half, halves, -layout.zero) for row in rows]
        sums.update({(planes - 1, t, m): less[m] for t, m in cells})
    if zeros:
        less = [row.integer_sum(half, halves, -1) for row in rows]
        sums.update({(planes - 1, t, m): b.mul(zeros[t], less[m]) for t, m in cells})
    dots = DotSums(e, sums, layout.dot_bits)
    for chunk in range(chunks * half, chunks * (half + 1)):
        codes = [b.bitcast(load_codes(e, layout, at, chunk), I32x16) for at in tiles_at]
        for plane in range(planes):
            four = [row.columns(plane, chunk) for row in rows]
            for t, m in cells:
                dots.add((plane, t, m), codes[t], four[m], PLANE_MAGNITUDES[plane])
    sums = dots.totals()
    if planes == 1:
        return {cell: sums[0, *cell] for cell in cells}
    return {cell: b.add(sums[1, *cell], b.shl(sums[0, *cell], e.i(7))) for cell in cells}


def register_blocks(e: Emit, tiles: int, tokens: int) -> list[tuple[slice, slice]]:
    """Divide tiles and tokens into blocks whose accumulators fit into registers."""
    few = FEW if e.has_few_registers else (tiles, tokens)
    return [
        (slice(t, t + few[0]), slice(m, m + few[1]))
        for t, m in product(range(0, tiles, few[0]), range(0, tokens, few[1]))
    ]


def slots_of_block(slots: dict[Cell, Any], block: tuple[slice, slice]) -> dict[Cell, Any]:
    """Return the slots of a block, keyed by their indices in the block."""
    tiles, tokens = block
    return {
        (t - tiles.start, m - tokens.start): slot
        for (t, m), slot in slots.items()
        if tiles.start <= t < tiles.stop and tokens.start <= m < tokens.stop
    }


def prefetch_group(e: Emit, layout: GGMLFormat | GroupFormat, at: Any) -> None:
    """Prefetch the group that is AHEAD bytes after `at` in the tile."""
    for line in range((layout.group_bytes + 63) // 64):
        e.prefetch(e.at(at, AHEAD + 64 * line))


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A range of cache lines that is prefetched evenly over `count` steps. Prefetching all at once would delay other
    loads.
    """

    e: Emit
    address: Any
    each: Any  # lines for each step

    @classmethod
    def spread(cls, e: Emit, address: Any, lines: Any, count: Any) -> Self:
        return cls(e, address, e.b.sdiv(e.b.add(lines, e.b.sub(count, I64(1))), count))

    def emit(self, index: Any) -> None:
        e, at = self.e, self.e.at(self.address, self.e.b.mul(index, self.each), 64)
        e.prefetch(at)  # usually the only line of a step; a loop of one iteration would double the cost
        with cgutils.for_range(e.b, self.each, start=I64(1)) as loop:
            e.prefetch(e.at(at, loop.index, 64))
