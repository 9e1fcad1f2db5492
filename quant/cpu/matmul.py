"""Products of tiles and rows of activations: kernels for one, two, four, and six tokens, for each layout.

One token is bound by memory: the lower bound is the weight's bytes divided by the machine's read rate. Its kernel reads
one tile at a time and prefetches well ahead. Many tokens are bound by `vpdpbusd`: each load of codes of 2 x 16 rows is
used for 4 or 6 tokens. The lower bound is 2 * tokens * rows * columns * planes operations at 128 per cycle and port.

All kernels reduce in the same order, so that the bits of an output depend neither on the number of tokens nor on the
thread. Integer sums are exact within a group, or within half a group if halves have separate scales. The results of
groups are added in order, in float32 with fused multiply-adds. If activations are in super-blocks, the same holds for
super-blocks instead of groups (`quant.cpu.super_blocks`). Weights of floats are summed in two chains, over the even and
the odd columns, which are added at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from numba.core import cgutils

from quant.cpu.accumulators import (
    FEW,
    Accumulators,
    Cell,
    Prefetch,
    TileCall,
    integer_sums,
    prefetch_group,
    register_blocks,
    slots_of_block,
    tile_kernel,
)
from quant.cpu.activations import GROUP, Form, RowGroup
from quant.cpu.float16 import widen
from quant.cpu.ggml_decoding import each_group, load_scales
from quant.cpu.ggml_formats import HALF, SINGLE, TILE, GGMLFormat
from quant.cpu.group_formats import GroupFormat
from quant.cpu.group_products import make_group_tile
from quant.cpu.kernel import inlined, jit, kernel
from quant.cpu.layouts import LAYOUTS, Layout
from quant.cpu.super_blocks import make_super_block_tile
from quant.cpu.vector import F32, I64, Emit, F16x16, F32x16, I16x16, I32x16


def _make_coded_tile(layout: GGMLFormat, tiles: int, tokens: int, planes: int) -> Callable[..., None]:
    """Return the kernel that multiplies `tiles` weight tiles by up to `tokens` rows of quantized activations."""
    halves = layout.scales.halves

    def add_group(
        e: Emit, addresses: list[tuple[Any, Any]], g: Any, rows: list[RowGroup], half: int, totals: dict[Cell, Any]
    ) -> None:
        """Add the products of group `g` or half of it. `addresses` are those of each tile's group and block scales."""
        b, sums = e.b, integer_sums(e, layout, [at for at, _ in addresses], rows, planes, half)
        scales = [load_scales(e, layout, at, head, g)[half] for at, head in addresses]
        x_scales = [row.scale() for row in rows]
        x_sums = [row.sum(half, halves) for row in rows] if layout.scales.minimum else []
        for (t, m), found in sums.items():
            (scale, minimum), whole = scales[t], b.sitofp(found, F32x16)
            total = e.fma(whole, b.fmul(scale, x_scales[m]), b.load(totals[t, m]))
            if minimum is not None:
                total = e.fma(minimum, x_sums[m], total)
            b.store(total, totals[t, m])

    def coded_tile(e: Emit, acc: Accumulators, call: TileCall) -> None:
        b = e.b
        totals = {cell: e.variable(value) for cell, value in acc.initial(call.add, call.rows).items()}
        tile_bytes = b.sdiv(b.mul(call.groups, I64(layout.block_bytes)), I64(layout.scales.block_groups))
        starts = [e.at(call.w, tile_bytes, t) if t else call.w for t in range(tiles)]
        ahead = Prefetch.spread(e, call.fetch, call.lines, call.groups)
        with each_group(e, layout, call.groups, starts) as (g, at, heads):
            if tokens == 1:
                prefetch_group(e, layout, at[0])
            else:
                ahead.emit(g)
            for half, block in product(range(halves), register_blocks(e, tiles, tokens)):
                rows_here = [RowGroup(e, row, call.groups, g) for row in acc.x[block[1]]]
                addresses = list(zip(at, heads, strict=True))[block[0]]
                add_group(e, addresses, g, rows_here, half, slots_of_block(totals, block))
        acc.store({cell: b.load(slot) for cell, slot in totals.items()}, call.rows)

    named = f"coded_tile_{layout.number}_{tiles}x{tokens}_{planes}"
    return tile_kernel(named, tiles, tokens, layout.part, coded_tile)


def _make_plain_tile(layout: GGMLFormat, tiles: int, tokens: int) -> Callable[..., None]:
    """Return the kernel that multiplies `tiles` tiles of float weights by up to `tokens` rows of floats."""
    column_bytes = TILE * layout.bits // 8

    def load_column(e: Emit, at: Any) -> Any:
        if layout is SINGLE:
            return e.load(at)
        if layout is HALF:
            return widen(e, e.load(at, F16x16))
        wide = e.b.zext(e.load(at, I16x16), I32x16)
        return e.b.bitcast(e.b.shl(wide, e.i(16)), F32x16)

    def plain_tile(e: Emit, acc: Accumulators, call: TileCall) -> None:
        b = e.b
        chains = {(odd, *cell): e.variable(e.f(0)) for odd in range(2) for cell in acc.cells}
        starts = [e.at(call.w, call.groups, layout.group_bytes * t) if t else call.w for t in range(tiles)]
        with cgutils.for_range(b, b.mul(call.groups, I64(GROUP // 4))) as loop:
            for column in range(4):
                weights = [
                    load_column(e, e.at(e.at(start, loop.index, 4 * column_bytes), column * column_bytes))
                    for start in starts
                ]
                for m in range(tokens):
                    value = e.splat(e.load(e.at(e.at(acc.x[m], loop.index, 16), 4 * column), F32))
                    for t in range(tiles):
                        slot = chains[column % 2, t, m]
                        b.store(e.fma(weights[t], value, b.load(slot)), slot)
        initial = acc.initial(call.add, call.rows)
        sums = {
            (t, m): b.fadd(b.fadd(b.load(chains[0, t, m]), b.load(chains[1, t, m])), initial[t, m])
            for t, m in acc.cells
        }
        acc.store(sums, call.rows)

    named = f"plain_tile_{layout.number}_{tiles}x{tokens}"
    return tile_kernel(named, tiles, tokens, layout.part, plain_tile)


@dataclass(frozen=True, slots=True)
class TileKernels:
    """The kernels of one layout for one form of activations, as functions for compiled code."""

    one: Any  # one tile by one token
    two: Any  # two tiles by up to two tokens
    four: Any  # two tiles by up to four tokens
    six: Any = None  # two tiles by up to six tokens, if their sums fit into registers


def forms_of(layout: Layout) -> tuple[Form, ...]:
    """Return the forms that activations can have, the coarsest first."""
    if isinstance(layout, GroupFormat):
        return (Form.FLOAT,) if layout.floats else (Form.BITS_8, Form.BITS_14)
    if layout.plain:
        return (Form.FLOAT,)
    return Form.SUPER_BLOCKS if layout.super_blocks else Form.BITS_8, Form.BITS_14


def _make_kernels(layout: Layout, form: Form) -> TileKernels:
    shapes: tuple[tuple[int, int], ...] = ((1, 1), (2, 2), (2, 4))
    if isinstance(layout, GroupFormat):
        return TileKernels(*(make_group_tile(layout, *shape, form) for shape in shapes))
    if form is Form.FLOAT:
        return TileKernels(*(_make_plain_tile(layout, *shape) for shape in shapes))
    if form is Form.SUPER_BLOCKS:
        # With two scales for each group, decoding them takes the registers that two more tokens would need.
        shapes += ((2, 6),) if layout.scales.halves == 1 else ()
        return TileKernels(*(make_super_block_tile(layout, *shape) for shape in shapes))
    return TileKernels(*(_make_coded_tile(layout, *shape, form.planes) for shape in shapes))


TILE_KERNELS: dict[tuple[Layout, Form], TileKernels] = {
    (layout, form): _make_kernels(layout, form) for layout in LAYOUTS for form in forms_of(layout)
}


@inlined
def _call_tile(
    e: Emit, address: Any, w: Any, groups: Any, x: Any, x_stride: Any, count: Any, out: Any, out_stride: Any,
    add: Any, rows: Any, fetch: Any, lines: Any,
) -> None:  # fmt: skip
    e.call_address(address, w, groups, x, x_stride, count, out, out_stride, add, rows, fetch, lines)


@kernel
def _has_few_registers(e: Emit) -> Any:
    return I64(int(e.has_few_registers))


@jit
def _multiply_one(one: int, w: int, tile_bytes: int, groups: int, x: int, out: int, add: int, rows: int) -> None:
    for t in range(0, rows, TILE):
        _call_tile(one, w + t // TILE * tile_bytes, groups, x, 0, 1, out + 4 * t, 0, add, rows - t, 0, 0)


@jit
def multiply_pair(
    one: int, two: int, four: int, six: int, w: int, tile_bytes: int, groups: int, x: int, x_stride: int, n: int,
    out: int, out_stride: int, add: int, rows: int,
) -> None:  # fmt: skip
    """Multiply up to PAIR rows of a weight, two tiles at address w, by n rows of activations at x.

    Writes `rows` float32 at `out` for each token, or adds them there if `add` is 1. `one`, `two`, `four`, and `six` are
    addresses of TILE_KERNELS, 0 if there is none; strides are bytes. With few registers, kernels compute tokens in
    twos, so a token that would be computed twice is left to `one`.
    """
    if n == 1:
        _multiply_one(one, w, tile_bytes, groups, x, out, add, rows)
        return
    # While one pair is multiplied, the next pair is prefetched, an equal share of it in each pass.
    block = 6 if six != 0 else 4
    passes = (n + block - 1) // block
    lines = (2 * tile_bytes // 64 + passes) // passes
    ahead = w + 2 * tile_bytes
    for m in range(0, n, block):
        count, at, y = min(block, n - m), x + m * x_stride, out + m * out_stride
        alone = count % FEW[1] if _has_few_registers() else 0
        if alone:
            count -= 1
            _multiply_one(one, w, tile_bytes, groups, at + count * x_stride, y + count * out_stride, add, rows)
        if count > 0:
            tile = two if count <= 2 else four if count <= 4 else six
            _call_tile(tile, w, groups, at, x_stride, count, y, out_stride, add, rows, ahead, lines)
        ahead += 64 * lines
