"""Products of tiles in scale groups and rows of activations: integers by integers, and small floats by floats.

Integers are multiplied as in `quant.cpu.matmul`: exactly within 32 columns. Zero points are subtracted by means of the
sums that rows of activations store. Table values and 8-bit floats become float32 in registers. With AVX-512, one
instruction looks up the 4-bit codes of 16 rows in a table of 16 floats. Looking up 16-bit integers would cost the same,
but would round, and would need a second product for the second byte. Each group of 32 columns is summed in two chains,
one over the even and one over the odd columns, so that no group waits for another:

    total = total + scale * (even + odd)

One token is bound by memory: the lower bound is the weight's bytes divided by the machine's read rate. Many tokens are
bound by `vpdpbusd`, like other integers, or by fused multiply-adds: 2 * tokens * rows * columns operations at 32 per
cycle and port. Scaling adds 2 operations to the 32 of each group.
"""

from collections.abc import Callable
from typing import Any

from quant.cpu.accumulators import (
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
from quant.cpu.activations import Form, RowGroup
from quant.cpu.ggml_formats import GROUP
from quant.cpu.group_decoding import columns_of_vector, each_scale_group, load_floats, tile_size
from quant.cpu.group_formats import GroupFormat
from quant.cpu.vector import F32, I64, Emit, F32x16

Slots = dict[Cell, Any]


def make_group_tile(layout: GroupFormat, tiles: int, tokens: int, form: Form) -> Callable[..., None]:
    """Make the kernel for `tiles` tiles by up to `tokens` rows of activations in `form`."""

    def group_tile(e: Emit, acc: Accumulators, call: TileCall) -> None:
        b = e.b
        totals = {cell: e.variable(value) for cell, value in acc.initial(call.add, call.rows).items()}
        size = tile_size(e, layout, call.groups, call.w)
        starts = [e.at(call.w, b.mul(size, I64(t))) if t else call.w for t in range(tiles)]
        ahead = Prefetch.spread(e, call.fetch, call.lines, call.groups)
        with each_scale_group(e, layout, call.groups, starts) as scale_group:
            scales, zeros = scale_group.scales(), scale_group.zeros()
            with scale_group.each_group() as (g, at):
                if tokens == 1:
                    prefetch_group(e, layout, at[0])
                else:
                    ahead.emit(g)
                for block in register_blocks(e, tiles, tokens):
                    here = at[block[0]], scales[block[0]], zeros[block[0]]
                    x_rows = acc.x[block[1]]
                    if layout.floats:
                        _add_floats(e, layout, here[0], here[1], x_rows, g, slots_of_block(totals, block))
                    else:
                        x_groups = [RowGroup(e, row, call.groups, g) for row in x_rows]
                        _add_integers(e, layout, *here, x_groups, form.planes, slots_of_block(totals, block))
        acc.store({cell: b.load(slot) for cell, slot in totals.items()}, call.rows)

    kind = "float" if layout.floats else "coded"
    named = f"{kind}_group_tile_{layout.number}_{tiles}x{tokens}_{form.planes}"
    return tile_kernel(named, tiles, tokens, layout.part, group_tile)


def _add_integers(
    e: Emit,
    layout: GroupFormat,
    at: list[Any],
    scales: list[Any],
    zeros: list[Any],
    rows: list[RowGroup],
    planes: int,
    totals: Slots,
) -> None:
    """Add the products of one group and rows of integers."""
    b, sums = e.b, integer_sums(e, layout.codes, at, rows, planes, zeros=zeros)
    x_scales = [row.scale() for row in rows]
    for (t, m), found in sums.items():
        scale = b.fmul(scales[t], x_scales[m])
        b.store(e.fma(b.sitofp(found, F32x16), scale, b.load(totals[t, m])), totals[t, m])


def _add_floats(
    e: Emit, layout: GroupFormat, at: list[Any], scales: list[Any], rows: list[Any], g: Any, totals: Slots
) -> None:
    """Add the products of group `g` and rows of floats, whose addresses are `rows`."""
    b, chains = e.b, dict[tuple[int, int, int], Any]()
    x_at, width = [e.at(row, g, 4 * GROUP) for row in rows], columns_of_vector(layout)
    for vector in range(GROUP // width):
        columns = zip(*(load_floats(e, layout, it, vector) for it in at), strict=True)
        for column, weights in enumerate(columns, width * vector):
            values = [e.splat(e.load(e.at(it, 4 * column), F32)) for it in x_at]
            for t, m in totals:
                chain = column % 2, t, m
                product = weights[t], values[m]
                chains[chain] = e.fma(*product, chains[chain]) if chain in chains else b.fmul(*product)
    for (t, m), total in totals.items():
        found = b.fadd(chains[0, t, m], chains[1, t, m])
        b.store(e.fma(found, scales[t], b.load(total)), total)
