"""What instructions do: each is cut into units that anyone may compute, in any order.

`count_units` says how many an instruction has in this step, `compute` does a range of them. Everything here is compiled
and takes the words of an instruction and of the step header; nothing is checked. Refuses to know about threads, but for
the scratch memory and the copies that each has of its own.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numba.core import cgutils

from engine.config import BLOCK_SIZE
from engine.cpu.attention import (
    PIECE,
    QUERIES,
    RECORD_TAIL,
    SCORE_ROW,
    HeadBlocks,
    attend_piece,
    attend_tile,
    merge_pieces,
)
from engine.cpu.kv_store import rotate, store_key_value
from engine.cpu.program import SEGMENT, TOKENS, Op
from quant.cpu.activations import norm_factor, scale_row, silu_product, take_columns, write_row
from quant.cpu.formats import GROUP, PAIR
from quant.cpu.kernel import jit, kernel, word
from quant.cpu.matmul import multiply_pair
from quant.cpu.rows import read_row
from quant.cpu.vector import F32, I32, I64, LANE_NUMBERS, LANES, Emit

_EMBED, _NORM, _WRITE, _MATMUL, _GATED, _GATE, _ROPE_STORE, _ATTEND, _MERGE, _ARGMAX, _PICK = (int(op) for op in Op)
ONE_BITS = int(np.float32(1).view(np.int32))


class Record(Protocol):
    """An instruction or the header, as compiled code sees it: its words are attributes."""

    def __getattr__(self, word: str) -> int: ...


Records = Sequence[Record]


@jit
def _norm(a: Record, h: Record, first: int, last: int, copy: int) -> None:
    for m in range(first, last):
        row = word(h.output_rows, m) if a.gather else m
        x = a.x + row * a.x_stride
        factor = norm_factor(x, a.groups, a.epsilon)
        scale_row(a.kernel, x, factor, a.vector, a.groups, a.out + m * a.out_stride + copy * a.out_copy)


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
        read_row(a.kernel, a.weight, a.tile_bytes, a.groups, row, a.out + m * a.out_stride)


@jit
def _matmul(a: Record, n: int, first: int, last: int, copy: int) -> None:
    pairs = (a.rows + PAIR - 1) // PAIR
    for unit in range(first, last):
        block, pair = unit // pairs * TOKENS, unit % pairs
        x, out = a.x + copy * a.x_copy + block * a.x_stride, a.out + block * a.out_stride + 4 * PAIR * pair
        w, rows, count = a.weight + 2 * pair * a.tile_bytes, min(PAIR, a.rows - PAIR * pair), min(TOKENS, n - block)
        multiply_pair(
            a.one, a.two, a.four, a.six, w, a.tile_bytes, a.groups, x, a.x_stride, count, out, a.out_stride, a.add, rows
        )  # fmt: skip


@jit
def _gated(a: Record, n: int, first: int, last: int, copy: int, scratch: int) -> None:
    """A unit is 32 rows of gate and of up: together one group of 32 columns of the product."""
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
            silu_product(a.kernel, row, row + half, pair, units, out)


@jit
def _gate(a: Record, first: int, last: int) -> None:
    for m in range(first, last):
        gate, out = a.x + m * a.x_stride, a.out + m * a.out_stride
        for group in range(a.groups):
            at = gate + 4 * GROUP * group
            silu_product(a.kernel, at, at + 4 * GROUP * a.groups, group, a.groups, out)


@jit
def _rope_store(a: Record, h: Record, first: int, last: int) -> None:
    """A unit is one KV head of one token, with the query heads that share it. q, k and v lie side by side at x."""
    size, queries = 4 * a.head_dim, a.kv_heads * a.heads
    for unit in range(first, last):
        m, head = unit // a.kv_heads, unit % a.kv_heads
        row, position, slot = a.x + m * a.x_stride, word(h.positions, m), word(h.slots, m)
        cosine, sine = a.cosine + position * size // 2, a.sine + position * size // 2
        for query in range(head * a.heads, (head + 1) * a.heads):
            rotate(row + query * size, cosine, sine, a.head_dim, a.scale, a.neighbours)
        key = row + (queries + head) * size
        rotate(key, cosine, sine, a.head_dim, ONE_BITS, a.neighbours)
        block = a.cache + slot // BLOCK_SIZE * a.block_bytes + head * a.head_bytes
        store_key_value(a.kernel, key, key + a.kv_heads * size, block, slot % BLOCK_SIZE, a.head_dim)


@jit
def _attend_units(a: Record, h: Record) -> int:
    """For each KV head: a tile of several tokens is a unit, and so is each piece of a single one."""
    units = 0
    for tile in range(h.tiles):
        units += max(1, word(h.tile_list, 4 * tile + 3))
    return units * a.kv_heads


@jit
def _attend(a: Record, h: Record, first: int, last: int, scratch: int) -> None:
    record = 4 * a.head_dim + RECORD_TAIL
    unit = 0
    for tile in range(h.tiles):
        token, tokens = word(h.tile_list, 4 * tile), word(h.tile_list, 4 * tile + 1)
        request, pieces = word(h.tile_list, 4 * tile + 2), word(h.tile_list, 4 * tile + 3)
        here = max(1, pieces) * a.kv_heads
        table, position = h.tables + request * h.table_stride, word(h.positions, token)
        for i in range(max(0, first - unit), min(here, last - unit)):
            head, piece = i % a.kv_heads, i // a.kv_heads
            q = a.x + token * a.x_stride + head * a.heads * a.head_dim * 4
            cache = a.cache + head * a.head_bytes
            kv = HeadBlocks(cache, a.block_bytes, a.head_dim, a.scores, a.soften, a.gather_values)
            if pieces == 0:
                out = a.out + token * a.out_stride + head * a.heads * a.head_dim * 4
                records = scratch + QUERIES * SCORE_ROW
                attend_tile(
                    q, a.x_stride, a.heads, position, tokens, table, kv, scratch, records, out, a.out_stride
                )  # fmt: skip
            else:
                start = piece * PIECE
                count = min(PIECE, position + 1 - start)
                part = a.parts + ((request * a.kv_heads + head) * a.max_pieces + piece) * a.heads * record
                blocks = table + start // BLOCK_SIZE * 8
                attend_piece(a.heads, q, 4 * a.head_dim, count, 0, blocks, kv, scratch, part, record)
        unit += here
        if unit >= last:
            return


@jit
def _tile_of(h: Record, token: int) -> int:
    """The tile that a token is in; they lie in order."""
    first, last = 0, h.tiles
    while last - first > 1:
        middle = (first + last) // 2
        if word(h.tile_list, 4 * middle) <= token:
            first = middle
        else:
            last = middle
    return first


@jit
def _merge_token(a: Record, h: Record, tile: int, m: int, out: int, scratch: int) -> None:
    """Write token `m` of a tile in the reader's form: the row, or what its pieces give where it is a single token."""
    size = 4 * a.head_dim
    record = size + RECORD_TAIL
    request, pieces = word(h.tile_list, 4 * tile + 2), word(h.tile_list, 4 * tile + 3)
    row = a.x + m * a.x_stride
    if pieces > 0:
        row = scratch + record
        for query in range(a.kv_heads * a.heads):
            head, member = query // a.heads, query % a.heads
            part = a.parts + ((request * a.kv_heads + head) * a.max_pieces * a.heads + member) * record
            merge_pieces(part, a.heads * record, pieces, a.head_dim, scratch, row + query * size)
    write_row(a.kernel, row, a.groups, out)


@jit
def _merge(a: Record, h: Record, first: int, last: int, copy: int, scratch: int) -> None:
    """A unit is a tile, or a wanted row."""
    for unit in range(first, last):
        if a.gather:
            token, out = word(h.output_rows, unit), a.out + unit * a.out_stride + copy * a.out_copy
            _merge_token(a, h, _tile_of(h, token), token, out, scratch)
            continue
        token, tokens = word(h.tile_list, 4 * unit), word(h.tile_list, 4 * unit + 1)
        for m in range(token, token + tokens):
            _merge_token(a, h, unit, m, a.out + m * a.out_stride + copy * a.out_copy, scratch)


@kernel
def _largest(e: Emit, x: Any, count: Any, first: Any, out: Any) -> None:
    """The largest of `count` float32 at x, the first of equals: its value at out, and first + its index behind it."""
    b = e.b
    best, where = e.variable(e.f(-np.inf)), e.variable(e.splat(I32(0)))
    vectors = b.sdiv(b.add(count, I64(LANES - 1)), I64(LANES))
    with cgutils.for_range(b, vectors) as loop:
        start = b.mul(loop.index, I64(LANES))
        live = e.first_lanes(b.sub(count, start))
        v = b.select(live, e.load_some(e.at(x, start, 4), live), e.f(-np.inf))
        more = b.fcmp_ordered(">", v, b.load(best))
        b.store(b.select(more, v, b.load(best)), best)
        b.store(b.select(more, b.add(e.splat(b.trunc(start, I32)), LANE_NUMBERS), b.load(where)), where)
    top = e.tree(b.load(best), e.larger)
    tied = b.select(b.fcmp_ordered("==", b.load(best), e.splat(top)), b.load(where), e.i(2**31 - 1))
    index = e.tree(tied, lambda p, q: b.select(b.icmp_signed("<", p, q), p, q))
    e.store(out, top)
    e.store(e.at(out, 4), b.add(index, b.trunc(first, I32)))


@jit
def _argmax(a: Record, first: int, last: int) -> None:
    segments = (a.rows + SEGMENT - 1) // SEGMENT
    for unit in range(first, last):
        start = unit % segments * SEGMENT
        _largest(a.x + unit // segments * a.x_stride + 4 * start, min(SEGMENT, a.rows - start), start, a.out + 8 * unit)


@kernel
def _pick(e: Emit, largest: Any, count: Any, out: Any) -> None:
    """The id of the largest of `count` pairs of value and id, the first of equals; -1 where none is a number."""
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
def _pick_rows(a: Record, first: int, last: int) -> None:
    segments = (a.rows + SEGMENT - 1) // SEGMENT
    for m in range(first, last):
        _pick(a.x + 8 * segments * m, segments, a.out + 8 * m)


@jit
def count_units(a: Record, h: Record) -> int:
    n = h.outputs if a.selected else h.tokens
    if a.op == _MATMUL or a.op == _GATED:
        return (n + TOKENS - 1) // TOKENS * ((a.rows + PAIR - 1) // PAIR)
    if a.op == _ROPE_STORE:
        return n * a.kv_heads
    if a.op == _ATTEND:
        return _attend_units(a, h)
    if a.op == _MERGE:
        return n if a.gather else h.tiles
    if a.op == _ARGMAX:
        return n * ((a.rows + SEGMENT - 1) // SEGMENT)
    return n


@jit
def compute(a: Record, h: Record, first: int, last: int, thread: int) -> None:
    """Units first..last. `thread` picks the scratch memory."""
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
    elif a.op == _WRITE:
        _write(a, h, first, last, copy, scratch)
    elif a.op == _ROPE_STORE:
        _rope_store(a, h, first, last)
    elif a.op == _ATTEND:
        _attend(a, h, first, last, scratch)
    elif a.op == _MERGE:
        _merge(a, h, first, last, copy, scratch)
    elif a.op == _ARGMAX:
        _argmax(a, first, last)
    elif a.op == _PICK:
        _pick_rows(a, first, last)
    elif a.op == _EMBED:
        _embed(a, h, first, last)
