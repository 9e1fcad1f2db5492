"""Dot products of super-blocks: 256 columns, summed in int32 and scaled once.

    sum = block scale * sum of (sub-scale * (weight codes . row codes)) + block minimum * sum of (sub-minimum * sum of
          row codes)
    total = total + scale of the row * sum

The inner sums are over the 8 groups or their 16 halves, and are exact. So besides its dot products a group costs one
integer multiplication, instead of a conversion and two or three float multiplications. Only sums stay in registers
while codes are read: 2 tiles by 6 tokens. Minimums are added afterwards, two groups at a time.

The sums fit into int32. Weight codes (or table values) and zero points are below 2^d, row codes are at most 127, and
sub-scales are at most 2^p. So a sum is below 256 * 2^d * 127 * 2^p, which is less than 2^31 if d + p is at most 16. The
largest are IQ4_XS, with d = 8 for table values and p = 5, and Q6_K, with d = 6 and p = 7. A sum for minimums is at most
256 * 127 * 2^6. A sum of row codes, which is stored as int16, is at most 32 * 127.
"""

from collections.abc import Callable
from typing import Any

from numba.core import cgutils

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
from quant.cpu.activations import SUPER_BLOCK_GROUPS, SuperBlock, SuperGroup
from quant.cpu.ggml_decoding import load_block_scales, load_sub_minimums, load_sub_scales
from quant.cpu.ggml_formats import GGMLFormat
from quant.cpu.integer_dots import dot_of_words
from quant.cpu.vector import I64, Emit, F32x16

Slots = dict[Cell, Any]


def make_super_block_tile(layout: GGMLFormat, tiles: int, tokens: int) -> Callable[..., None]:
    """Make the kernel for `tiles` tiles by up to `tokens` rows in super-blocks."""

    def super_block_tile(e: Emit, acc: Accumulators, call: TileCall) -> None:
        b = e.b
        totals = {cell: e.variable(value) for cell, value in acc.initial(call.add, call.rows).items()}
        sums = {cell: e.variable(e.i(0)) for cell in acc.cells}
        count = b.sdiv(call.groups, I64(SUPER_BLOCK_GROUPS))
        tile_bytes = b.mul(count, I64(layout.block_bytes))
        starts = [e.at(call.w, tile_bytes, t) if t else call.w for t in range(tiles)]
        ahead = Prefetch.spread(e, call.fetch, call.lines, b.mul(count, I64(SUPER_BLOCK_GROUPS + 1)))
        with cgutils.for_range(b, count) as loop:
            first = b.mul(loop.index, I64(SUPER_BLOCK_GROUPS + 1))
            heads = [e.at(start, loop.index, layout.block_bytes) for start in starts]
            for number, block in enumerate(register_blocks(e, tiles, tokens)):
                slots = slots_of_block(sums, block)
                activations = [SuperBlock(e, row, call.groups, loop.index) for row in acc.x[block[1]]]
                for slot in slots.values():
                    b.store(e.i(0), slot)
                with cgutils.for_range(b, I64(SUPER_BLOCK_GROUPS)) as inner:
                    at = [_group(e, layout, head, inner.index) for head in heads[block[0]]]
                    if tokens == 1:
                        prefetch_group(e, layout, at[0])
                    elif number == 0:
                        ahead.emit(b.add(first, inner.index))
                    _add_group(e, layout, at, [it.group(inner.index) for it in activations], slots)
                if number == 0 and tokens > 1:
                    ahead.emit(b.add(first, I64(SUPER_BLOCK_GROUPS)))
                _add_super_block(e, layout, heads[block[0]], activations, slots, slots_of_block(totals, block))
        acc.store({cell: b.load(slot) for cell, slot in totals.items()}, call.rows)

    named = f"super_block_tile_{layout.number}_{tiles}x{tokens}"
    return tile_kernel(named, tiles, tokens, layout.part, super_block_tile)


def _group(e: Emit, layout: GGMLFormat, head: Any, number: Any) -> Any:
    """Return the address of one group of the super-block at `head`."""
    return e.at(e.at(head, layout.head_bytes), number, layout.group_bytes)


def _add_group(e: Emit, layout: GGMLFormat, at: list[Any], rows: list[SuperGroup], sums: Slots) -> None:
    """Add the integer products of one group."""
    b, scales = e.b, layout.scales
    sub_scales = [load_sub_scales(e, layout, it) for it in at] if scales.sub_scales else []
    for half in range(scales.halves):
        for (t, m), found in integer_sums(e, layout, at, rows, 1, half).items():
            scaled = b.mul(found, sub_scales[t][half]) if sub_scales else found
            b.store(b.add(b.load(sums[t, m]), scaled), sums[t, m])


def _add_super_block(
    e: Emit, layout: GGMLFormat, heads: list[Any], rows: list[SuperBlock], sums: Slots, totals: Slots
) -> None:
    """Scale the sums of a super-block and of its minimums to float32, and add them to the totals."""
    b, halves = e.b, layout.scales.halves
    block_scales = [load_block_scales(e, layout, head) for head in heads]
    pairs = range(SUPER_BLOCK_GROUPS * halves // 2 if layout.scales.minimum else 0)
    minimums = [[load_sub_minimums(e, layout, head, I64(pair)) for pair in pairs] for head in heads]
    for (t, m), total in totals.items():
        found = b.fmul(b.sitofp(b.load(sums[t, m]), F32x16), block_scales[t][0])
        if pairs:
            less = e.i(0)
            for number, pair in enumerate(minimums[t]):
                less = dot_of_words(e, less, pair, rows[m].two_sums(number, halves))
            found = e.fma(b.sitofp(less, F32x16), block_scales[t][1], found)
        b.store(e.fma(found, rows[m].scale(), b.load(total)), total)
