"""Attention over paged keys and values: softmax in pieces of 128 positions.

Blocks are laid out as `kv_store` writes them; whatever their type, sums are of float32. A query's context is cut into
pieces of PIECE positions. A piece becomes a record (values, peak, total), whoever computes it; records are combined one
after another in order of position by a running maximum (arXiv:2205.14135). A query alone and a query in a tile of four
go through the same sums in the same order, so that its bits depend neither on how the prompt was cut nor on what was
cached. Lanes behind a query's position are selected away, never added: a freed block may hold NaN.

Floor of one token: the bytes of its context's keys and values. Floor of a prompt: 4 * queries * heads * head_dim *
context operations. Everything here is compiled and takes addresses; the twin is `paged_attention` in
`engine.kernels.reference`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from numba.core import cgutils

from engine.config import BLOCK_SIZE
from engine.cpu.kv_store import ELEMENTS, Elements, KVType, scales_at
from quant.cpu.kernel import inlined, jit, kernel
from quant.cpu.vector import F32, I32, I64, LANES, Emit

PIECE = 128  # positions that are reduced together
PIECE_BLOCKS = PIECE // BLOCK_SIZE
SPAN = 4  # blocks whose scores are computed side by side
QUERIES = 4  # queries that are attended together, and query heads of one query
LEAST = -1e30  # a peak below all scores
SCORE_ROW = 4 * PIECE  # bytes of one row of scores
RECORD_TAIL = 64  # bytes behind the values of a record: peak, total, padding


def record_bytes(head_dim: int) -> int:
    """Bytes of one record: float32 values [head_dim], peak, total."""
    return 4 * head_dim + RECORD_TAIL


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """The kernels that read one type of cache, as compiled code calls them."""

    scores: Any
    soften: Any
    gather: Any


class HeadBlocks(NamedTuple):
    """One KV head of a layer in all blocks: where it is in block 0, and the addresses of the kernels that read it."""

    cache: int
    block_bytes: int
    dim: int
    scores: int
    soften: int
    gather: int


# -- one piece


def _emit_scores(
    e: Emit, kv: Elements, rows: int, q: Any, q_stride: Any, table: Any, cache: Any, block_bytes: Any, blocks: Any,
    dim: Any, out: Any,
) -> None:  # fmt: skip
    """out[row][16 * SPAN] = q[row] . K of up to SPAN blocks, without scales; behind the last block it repeats."""
    b, last, size = e.b, e.b.sub(blocks, I64(1)), kv.size * BLOCK_SIZE
    places = [b.select(b.icmp_signed("<", I64(i), last), I64(i), last) for i in range(SPAN)]
    keys = [b.add(cache, b.mul(e.load(e.at(table, place, 8), I64, 8), block_bytes)) for place in places]
    queries = [b.add(q, b.mul(q_stride, I64(row))) for row in range(rows)]
    sums = {(row, i): e.variable(e.f(0)) for row in range(rows) for i in range(SPAN)}
    with cgutils.for_range(b, b.sdiv(dim, I64(4))) as loop:
        for d in range(4):
            columns = [kv.load(e, e.at(e.at(key, loop.index, 4 * size), size * d)) for key in keys]
            for row, query in enumerate(queries):
                value = e.splat(e.load(e.at(e.at(query, loop.index, 16), 4 * d), F32))
                for i, column in enumerate(columns):
                    b.store(e.fma(column, value, b.load(sums[row, i])), sums[row, i])
    for (row, i), total in sums.items():
        e.store(e.at(out, SCORE_ROW * row + 64 * i), b.load(total))


def _emit_gather(
    e: Emit, kv: Elements, rows: int, vectors: int, p: Any, table: Any, values: Any, block_bytes: Any, first: Any,
    count: Any, dim: Any, record: Any, record_stride: Any,
) -> None:  # fmt: skip
    """record[row][16 * vectors] = the sum of p[row][t] * V[t] over the positions from 0 to `count`, in order.

    Those before `first` are in the record already. `values` is the address of the wanted columns of V in block 0.
    """
    b = e.b
    cells = [(row, i) for row in range(rows) for i in range(vectors)]
    places = {(row, i): e.at(b.add(record, b.mul(record_stride, I64(row))), 64 * i) for row, i in cells}
    begun = b.icmp_signed(">", first, I64(0))
    sums = {cell: e.variable(b.select(begun, e.load(at), e.f(0))) for cell, at in places.items()}
    start_block = b.sdiv(first, I64(BLOCK_SIZE))
    stop_block = b.sdiv(b.add(count, I64(BLOCK_SIZE - 1)), I64(BLOCK_SIZE))
    with cgutils.for_range(b, stop_block, start_block) as outer:
        start = b.mul(outer.index, I64(BLOCK_SIZE))
        block = b.add(values, b.mul(e.load(e.at(table, outer.index, 8), I64, 8), block_bytes))
        here = e.within(b.sub(first, start), BLOCK_SIZE), e.within(b.sub(count, start), BLOCK_SIZE)
        with cgutils.for_range(b, here[1], here[0]) as inner:
            at = b.add(block, b.mul(inner.index, b.mul(dim, I64(kv.size))))
            columns = [kv.load(e, e.at(at, kv.size * LANES * i)) for i in range(vectors)]
            weight_at = e.at(p, b.add(start, inner.index), 4)
            weights = [e.splat(e.load(e.at(weight_at, SCORE_ROW * row), F32)) for row in range(rows)]
            for row, i in cells:
                b.store(e.fma(columns[i], weights[row], b.load(sums[row, i])), sums[row, i])
    for cell, at in places.items():
        e.store(at, b.load(sums[cell]))


def _make_kernels(kv_type: KVType) -> AttentionKernels:
    kv, suffix = ELEMENTS[kv_type], kv_type.name.lower()

    def scores(
        e: Emit, rows: Any, q: Any, q_stride: Any, table: Any, cache: Any, block_bytes: Any, blocks: Any, dim: Any,
        out: Any,
    ) -> None:  # fmt: skip
        for count in range(1, QUERIES + 1):
            with e.b.if_then(e.b.icmp_signed("==", rows, I64(count))):
                _emit_scores(e, kv, count, q, q_stride, table, cache, block_bytes, blocks, dim, out)

    def soften(
        e: Emit, scores: Any, count: Any, table: Any, cache: Any, block_bytes: Any, dim: Any, record: Any
    ) -> None:
        """scores[0:count] becomes exp(score - peak), 0 behind that; peak and total go to the record.

        Scales are multiplied here, once for each position: the score by that of K, the result by that of V.
        """
        b, blocks = e.b, e.b.sdiv(e.b.add(count, I64(BLOCK_SIZE - 1)), I64(BLOCK_SIZE))
        top, total = e.variable(e.f(LEAST)), e.variable(e.f(0))

        def live(index: Any) -> Any:
            return e.first_lanes(b.sub(count, b.mul(index, I64(BLOCK_SIZE))))

        def scales(index: Any) -> tuple[Any, Any]:
            block = b.add(cache, b.mul(e.load(e.at(table, index, 8), I64, 8), block_bytes))
            keys, values = scales_at(e, kv, block, dim)
            return e.load(keys), e.load(values)

        with cgutils.for_range(b, blocks) as loop:
            at = e.at(scores, loop.index, 64)
            v = e.load(at)
            if kv.scaled:
                v = b.fmul(v, scales(loop.index)[0])
                e.store(at, v)
            b.store(e.larger(b.select(live(loop.index), v, e.f(LEAST)), b.load(top)), top)
        peak = e.tree(b.load(top), e.larger)
        with cgutils.for_range(b, blocks) as loop:
            at = e.at(scores, loop.index, 64)
            weights = b.select(live(loop.index), e.exp(b.fsub(e.load(at), e.splat(peak))), e.f(0))
            b.store(b.fadd(b.load(total), weights), total)
            if kv.scaled:
                weights = b.select(live(loop.index), b.fmul(weights, scales(loop.index)[1]), e.f(0))
            e.store(at, weights)
        e.store(e.at(record, dim, 4), peak, 4)
        e.store(e.at(e.at(record, dim, 4), 4), e.tree(b.load(total), b.fadd), 4)

    def gather(
        e: Emit, rows: Any, p: Any, table: Any, cache: Any, block_bytes: Any, first: Any, count: Any, dim: Any,
        record: Any, record_stride: Any,
    ) -> None:  # fmt: skip
        """All columns of V: 64 at a time as far as they go, then 16."""
        b, values = e.b, e.at(cache, dim, kv.size * BLOCK_SIZE)
        wide = b.and_(dim, I64(-64))
        for height in range(1, QUERIES + 1):
            with b.if_then(b.icmp_signed("==", rows, I64(height))):
                for vectors, start, stop in ((4, I64(0), wide), (1, wide, dim)):
                    step = I64(LANES * vectors)
                    with cgutils.for_range_slice(b, start, stop, step, I64) as (column, _):
                        _emit_gather(
                            e, kv, height, vectors, p, table, e.at(values, column, kv.size), block_bytes, first, count,
                            dim, e.at(record, column, 4), record_stride,
                        )  # fmt: skip

    for build in (scores, soften, gather):
        build.__name__ = f"{build.__name__}_{suffix}"
    return AttentionKernels(kernel(scores), kernel(soften), kernel(gather))


ATTENTION_KERNELS = {kv_type: _make_kernels(kv_type) for kv_type in KVType}


@kernel
def combine(e: Emit, record: Any, later: Any, dim: Any, out: Any) -> None:
    """out = the record of some pieces and that of the piece behind them, as one; out may be `record`."""
    b = e.b
    tails = [e.at(base, dim, 4) for base in (record, later)]
    peaks = [e.load(tail, F32, 4) for tail in tails]
    totals = [e.load(e.at(tail, 4), F32, 4) for tail in tails]
    peak = e.larger(peaks[0], peaks[1])
    kept, added = (e.exp(e.splat(b.fsub(old, peak))) for old in peaks)
    with cgutils.for_range(b, b.sdiv(dim, I64(LANES))) as loop:
        scaled = b.fmul(e.load(e.at(later, loop.index, 64)), added)
        e.store(e.at(out, loop.index, 64), e.fma(e.load(e.at(record, loop.index, 64)), kept, scaled))
    first, tail = I32(0), e.at(out, dim, 4)
    total = b.fadd(
        b.fmul(totals[0], b.extract_element(kept, first)), b.fmul(totals[1], b.extract_element(added, first))
    )
    e.store(tail, peak, 4)
    e.store(e.at(tail, 4), total, 4)


@kernel
def finish(e: Emit, record: Any, dim: Any, out: Any) -> None:
    """out [dim] = the values of a record divided by its total."""
    b = e.b
    total = e.splat(e.load(e.at(e.at(record, dim, 4), 4), F32, 4))
    with cgutils.for_range(b, b.sdiv(dim, I64(LANES))) as loop:
        e.store(e.at(out, loop.index, 64), b.fdiv(e.load(e.at(record, loop.index, 64)), total))


@inlined
def _scores(
    e: Emit, kernel: Any, rows: Any, q: Any, q_stride: Any, table: Any, cache: Any, block_bytes: Any, blocks: Any,
    dim: Any, out: Any,
) -> None:  # fmt: skip
    e.call_address(kernel, rows, q, q_stride, table, cache, block_bytes, blocks, dim, out)


@inlined
def _soften(
    e: Emit, kernel: Any, scores: Any, count: Any, table: Any, cache: Any, block_bytes: Any, dim: Any, record: Any
) -> None:
    e.call_address(kernel, scores, count, table, cache, block_bytes, dim, record)


@inlined
def _gather(
    e: Emit, kernel: Any, rows: Any, p: Any, table: Any, cache: Any, block_bytes: Any, first: Any, count: Any, dim: Any,
    record: Any, record_stride: Any,
) -> None:  # fmt: skip
    e.call_address(kernel, rows, p, table, cache, block_bytes, first, count, dim, record, record_stride)


@jit
def attend_piece(
    rows: int, q: int, q_stride: int, first_count: int, count_step: int, table: int, kv: HeadBlocks, scores: int,
    record: int, record_stride: int,
) -> None:  # fmt: skip
    """Up to four rows over one piece -> a record each.

    Row r is at q + r * q_stride and sees first_count + r * count_step positions, at most PIECE: rows are the query
    heads of one token (step 0), or consecutive tokens (step 1). `table` is the address of the piece's first block id.
    """
    cache, block_bytes, dim = kv.cache, kv.block_bytes, kv.dim
    most = min(PIECE, first_count + (rows - 1) * count_step)
    for block in range(0, (most + BLOCK_SIZE - 1) // BLOCK_SIZE, SPAN):
        blocks, out = (most + BLOCK_SIZE - 1) // BLOCK_SIZE - block, scores + 4 * BLOCK_SIZE * block
        _scores(kv.scores, rows, q, q_stride, table + 8 * block, cache, block_bytes, blocks, dim, out)
    for row in range(rows):
        p, sums = scores + SCORE_ROW * row, record + row * record_stride
        _soften(kv.soften, p, min(PIECE, first_count + row * count_step), table, cache, block_bytes, dim, sums)
    seen = min(PIECE, first_count)
    _gather(kv.gather, rows, scores, table, cache, block_bytes, 0, seen, dim, record, record_stride)
    for row in range(1, rows):  # what a row sees and the first one does not
        count = min(PIECE, first_count + row * count_step)
        if count > first_count:
            p, sums = scores + SCORE_ROW * row, record + row * record_stride
            _gather(kv.gather, 1, p, table, cache, block_bytes, first_count, count, dim, sums, record_stride)


@jit
def attend_token(
    q: int, heads: int, q_stride: int, count: int, table: int, kv: HeadBlocks, scores: int, records: int
) -> None:
    """The query heads of one token that share a KV head, over one piece of `count` positions -> a record each."""
    size = 4 * kv.dim + RECORD_TAIL
    for head in range(0, heads, QUERIES):
        rows = min(QUERIES, heads - head)
        attend_piece(rows, q + head * q_stride, q_stride, count, 0, table, kv, scores, records + head * size, size)


@jit
def attend_tile(
    q: int, token_stride: int, heads: int, pos: int, queries: int, table: int, kv: HeadBlocks, scores: int,
    records: int, out: int, out_stride: int,
) -> None:  # fmt: skip
    """`queries` consecutive tokens, the first at `pos`, and all query heads of one KV head, over the whole context.

    `records` has room for heads + 1 times QUERIES of them; out [queries][heads * dim] float32.
    """
    dim = kv.dim
    size = 4 * dim + RECORD_TAIL
    piece_record = records + heads * QUERIES * size
    for start in range(0, pos + queries, PIECE):
        blocks = table + start // BLOCK_SIZE * 8
        for head in range(heads):
            # Tokens before this piece see nothing of it: only the last piece can begin inside of the tile.
            skipped = max(0, start - pos)
            at = q + 4 * dim * head + skipped * token_stride
            total = records + (head * QUERIES + skipped) * size
            record = total if start == 0 else piece_record
            rows, count = queries - skipped, pos + skipped + 1 - start
            attend_piece(rows, at, token_stride, count, 1, blocks, kv, scores, record, size)
            if start > 0:
                for row in range(rows):
                    combine(total + row * size, record + row * size, dim, total + row * size)
    for head in range(heads):
        for row in range(queries):
            finish(records + (head * QUERIES + row) * size, dim, out + row * out_stride + 4 * dim * head)


@jit
def merge_pieces(records: int, stride: int, pieces: int, dim: int, total: int, out: int) -> None:
    """The records of one head's pieces, `stride` bytes apart, in order -> out [dim]; `total` has room for a record."""
    before = records
    for piece in range(1, pieces):
        combine(before, records + piece * stride, dim, total)
        before = total
    finish(before, dim, out)
