"""Instructions divided into units of work, which threads may compute in any order.

`count_units` returns the number of units of an instruction in this step; `compute` runs a range of them. Everything
here is compiled and takes the words of an instruction and of the step header. Nothing is checked here: `program` has
already checked all addresses.
"""

from typing import Any

import numpy as np
from numba.core import cgutils

from engine.backends.cpu.attention_units import attend, count_attend_units, merge, rope_store
from engine.backends.cpu.convolution import convolve, count_strips
from engine.backends.cpu.delta_rule import delta, delta_rates, scale_rows
from engine.backends.cpu.expert_units import (
    combine,
    count_blocks,
    count_expert_units,
    expert_gated,
    expert_matmul,
    gather_rows,
    order_rows,
    route,
    sort_routes,
)
from engine.backends.cpu.floats import add_floats, init_with_bias, largest, multiply_floats
from engine.backends.cpu.instructions import ONE_BITS, SEGMENT, TOKENS, Op, Record
from engine.backends.cpu.soft_cap import cap_floats
from quant.cpu.activations import gated_product, scale_row, take_columns, write_row
from quant.cpu.ggml_formats import GROUP, PAIR
from quant.cpu.kernel import jit, kernel, word
from quant.cpu.matmul import multiply_pair
from quant.cpu.norms import layer_norm_row, norm_factor
from quant.cpu.rows import read_row
from quant.cpu.vector import F32, I32, I64, Emit

(
    _EMBED,
    _NORM,
    _LAYER_NORM,
    _WRITE,
    _MATMUL,
    _GATED,
    _GATE,
    _ROPE_STORE,
    _ATTEND,
    _MERGE,
    _ARGMAX_SEGMENTS,
    _ARGMAX_ROWS,
    _ROUTE,
    _SORT_ROUTES,
    _GATHER_ROWS,
    _EXPERT_GATED,
    _EXPERT_MATMUL,
    _COMBINE,
    _ORDER_ROWS,
    _CONVOLVE,
    _SCALE,
    _DELTA_RATES,
    _DELTA,
) = (int(op) for op in Op)


@jit
def _norm(a: Record, h: Record, first: int, last: int, copy: int) -> None:
    for m in range(first, last):
        row = word(h.output_rows, m) if a.gather else m
        x = a.x + row * a.x_stride
        factor = norm_factor(x, a.groups, a.epsilon)
        out = a.out + m * a.out_stride + copy * a.out_copy
        scale_row(a.kernel, x, factor, a.vector, a.groups, out)
        if a.scale != ONE_BITS:
            multiply_floats(out, GROUP * a.groups, a.scale)


@jit
def _layer_norm(a: Record, h: Record, first: int, last: int, copy: int, scratch: int) -> None:
    width = GROUP * a.groups
    for m in range(first, last):
        row, out = word(h.output_rows, m) if a.gather else m, a.out + m * a.out_stride + copy * a.out_copy
        layer_norm_row(a.x + row * a.x_stride, a.vector, a.groups, a.epsilon, scratch)
        if a.bias != 0:
            add_floats(a.bias, width, scratch)
        if a.add:
            add_floats(scratch, width, out)
            if a.scale != ONE_BITS:
                multiply_floats(out, width, a.scale)
        else:
            write_row(a.kernel, scratch, a.groups, out)


@jit
def _write(a: Record, h: Record, first: int, last: int, copy: int, scratch: int) -> None:
    for m in range(first, last):
        x = a.x + (word(h.output_rows, m) if a.gather else m) * a.x_stride
        if a.order != 0:
            take_columns(x, a.order, a.groups, scratch)
            x = scratch
        write_row(a.kernel, x, a.groups, a.out + m * a.out_stride + copy * a.out_copy)


@jit
def _embed(a: Record, h: Record, first: int, last: int) -> None:
    for m in range(first, last):
        row = word(h.token_ids, m)
        out = a.out + m * a.out_stride
        read_row(a.kernel, a.weight, a.tile_bytes, a.groups, row, out)
        if a.scale != ONE_BITS:
            multiply_floats(out, GROUP * a.groups, a.scale)


@jit
def _matmul(a: Record, n: int, first: int, last: int, copy: int) -> None:
    pairs = (a.rows + PAIR - 1) // PAIR
    for unit in range(first, last):
        block, pair = unit // pairs * TOKENS, unit % pairs
        x, out = a.x + copy * a.x_copy + block * a.x_stride, a.out + block * a.out_stride + 4 * PAIR * pair
        w, rows, count = a.weight + 2 * pair * a.tile_bytes, min(PAIR, a.rows - PAIR * pair), min(TOKENS, n - block)
        add = a.add
        if a.bias != 0:
            init_with_bias(a.bias + 4 * PAIR * pair, rows, add, count, out, a.out_stride)
            add = 1
        multiply_pair(
            a.one, a.two, a.four, a.six, w, a.tile_bytes, a.groups, x, a.x_stride, count, out, a.out_stride, add, rows
        )  # fmt: skip


@jit
def _gated(a: Record, n: int, first: int, last: int, copy: int, scratch: int) -> None:
    """Run units of a GATED instruction. A unit multiplies 32 rows of gate and of up, for 32 columns of the product."""
    units, half = a.rows // PAIR, 4 * PAIR
    for unit in range(first, last):
        block, pair = unit // units * TOKENS, unit % units
        x, count = a.x + copy * a.x_copy + block * a.x_stride, min(TOKENS, n - block)
        gate, up = a.weight + 2 * pair * a.tile_bytes, a.up + 2 * pair * a.up_tile_bytes
        multiply_pair(
            a.one, a.two, a.four, a.six, gate, a.tile_bytes, a.groups, x, a.x_stride, count, scratch, 2 * half, 0, PAIR
        )  # fmt: skip
        multiply_pair(
            a.up_one, a.up_two, a.up_four, a.up_six, up, a.up_tile_bytes, a.groups, x, a.x_stride, count,
            scratch + half, 2 * half, 0, PAIR,
        )  # fmt: skip
        for m in range(count):
            row, out = scratch + 2 * half * m, a.out + (block + m) * a.out_stride
            gated_product(a.kernel, row, row + half, pair, units, out)


@jit
def _gate(a: Record, first: int, last: int) -> None:
    for m in range(first, last):
        gate, up, out = a.x + m * a.x_stride, a.up + m * a.up_stride, a.out + m * a.out_stride
        for group in range(a.groups):
            at = 4 * GROUP * group
            gated_product(a.kernel, gate + at, up + at, group, a.groups, out)


@jit
def _argmax_segments(a: Record, first: int, last: int) -> None:
    segments = (a.rows + SEGMENT - 1) // SEGMENT
    for unit in range(first, last):
        start = unit % segments * SEGMENT
        x, count = a.x + unit // segments * a.x_stride + 4 * start, min(SEGMENT, a.rows - start)
        if a.softcap != 0:  # applied before the search, because different logits may be equal after the cap
            cap_floats(x, count, a.softcap)
        largest(x, count, start, a.out + 8 * unit)


@kernel
def _largest_pair(e: Emit, largest: Any, count: Any, out: Any) -> None:
    """Write the id of the largest of `count` (value, id) pairs to `out`, or -1 if no value is above -inf.

    Ties: the first wins.
    """
    b = e.b
    best, where = e.variable(F32(-np.inf)), e.variable(I64(-1))
    with cgutils.for_range(b, count) as loop:
        at = e.at(largest, loop.index, 8)
        value, token_id = e.load(at, F32), b.sext(e.load(e.at(at, 4), I32), I64)
        more = b.fcmp_ordered(">", value, b.load(best))
        b.store(b.select(more, value, b.load(best)), best)
        b.store(b.select(more, token_id, b.load(where)), where)
    e.store(out, b.load(where), 8)


@jit
def _argmax_rows(a: Record, first: int, last: int) -> None:
    segments = (a.rows + SEGMENT - 1) // SEGMENT
    for m in range(first, last):
        _largest_pair(a.x + 8 * segments * m, segments, a.out + 8 * m)


@jit
def count_units(a: Record, h: Record) -> int:
    n = h.outputs if a.selected else h.tokens
    if a.op == _MATMUL or a.op == _GATED:
        return (n + TOKENS - 1) // TOKENS * ((a.rows + PAIR - 1) // PAIR)
    if a.op == _ROPE_STORE:
        return n * a.kv_heads
    if a.op == _ATTEND:
        return count_attend_units(a, h)
    if a.op == _CONVOLVE:
        return h.requests * count_strips(a)
    if a.op == _DELTA:
        return h.requests * a.value_heads
    if a.op == _ARGMAX_SEGMENTS:
        return n * ((a.rows + SEGMENT - 1) // SEGMENT)
    if a.op == _SORT_ROUTES:
        return 1
    if a.op == _GATHER_ROWS:
        return n * a.each if n > 1 else 0
    if a.op == _EXPERT_GATED or a.op == _EXPERT_MATMUL:
        return count_expert_units(a)
    if a.op == _ORDER_ROWS:
        return count_blocks(a)
    return n * a.each if a.each else n


@jit
def compute(a: Record, h: Record, first: int, last: int, thread: int) -> None:
    """Compute units first..last. `thread` selects the scratch memory and the copy of local rows."""
    n, copy = h.outputs if a.selected else h.tokens, thread if h.local else 0
    scratch = h.scratch + thread * h.scratch_stride
    if a.op == _MATMUL:
        _matmul(a, n, first, last, copy)
    elif a.op == _GATED:
        _gated(a, n, first, last, copy, scratch)
    elif a.op == _GATE:
        _gate(a, first, last)
    elif a.op == _NORM:
        _norm(a, h, first, last, copy)
    elif a.op == _LAYER_NORM:
        _layer_norm(a, h, first, last, copy, scratch)
    elif a.op == _WRITE:
        _write(a, h, first, last, copy, scratch)
    elif a.op == _ROPE_STORE:
        rope_store(a, h, first, last)
    elif a.op == _ATTEND:
        attend(a, h, first, last, scratch)
    elif a.op == _MERGE:
        merge(a, h, first, last, copy, scratch)
    elif a.op == _ARGMAX_SEGMENTS:
        _argmax_segments(a, first, last)
    elif a.op == _ARGMAX_ROWS:
        _argmax_rows(a, first, last)
    elif a.op == _EMBED:
        _embed(a, h, first, last)
    elif a.op == _EXPERT_GATED:
        expert_gated(a, n, first, last, copy, scratch)
    elif a.op == _EXPERT_MATMUL:
        expert_matmul(a, first, last)
    elif a.op == _ROUTE:
        route(a, first, last, scratch)
    elif a.op == _SORT_ROUTES:
        sort_routes(a, n, scratch)
    elif a.op == _GATHER_ROWS:
        gather_rows(a, first, last)
    elif a.op == _COMBINE:
        combine(a, first, last, scratch)
    elif a.op == _ORDER_ROWS:
        order_rows(a, first, last, copy)
    elif a.op == _CONVOLVE:
        convolve(a, h, first, last, scratch)
    elif a.op == _SCALE:
        scale_rows(a, first, last)
    elif a.op == _DELTA_RATES:
        delta_rates(a, first, last)
    elif a.op == _DELTA:
        delta(a, h, first, last, scratch)
