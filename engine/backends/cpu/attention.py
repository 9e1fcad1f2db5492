"""Attention over paged keys and values: softmax in pieces of 128 positions.

Blocks are laid out as `kv_store` writes them; whatever their type, sums are of float32. A query's context is cut into
pieces of PIECE positions. A piece becomes a record (`records`), whoever computes it; records are combined one after
another in order of position. A query alone and a query among others go through the same sums in the same order, so that
its bits depend neither on how the prompt was cut nor on what was cached. What lies behind a query's position, or before
its window, is selected away, never added: a freed block may hold NaN. Blocks before all windows are not even read.

Rows that share a KV head, which are the query heads of one token or consecutive tokens, go over a piece together: what
was read and widened to float32 serves them all.

Floor of one token: the bytes of its context's keys and values. Floor of a prompt: 4 * queries * heads * head_dim *
context operations. Everything here is compiled and takes addresses; the twin is `paged_attention` in
`engine.kernels.reference`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from numba.core import cgutils

from engine.backends.cpu.kv_store import ELEMENTS, Elements, KVType, scales_at
from engine.backends.cpu.records import RECORD_TAIL, combine, finish
from engine.backends.cpu.soft_cap import soft_cap
from engine.config import BLOCK_SIZE
from quant.cpu.kernel import inlined, jit, kernel
from quant.cpu.vector import F32, I32, I64, LANE_NUMBERS, LANES, Emit

PIECE = 128  # positions that are reduced together
QUERIES = 8  # tokens of a tile, and the most rows that go over a piece together
FEW = 4  # rows that are computed together where there are fewer, or few registers
SIDE_BY_SIDE = 4  # the most vectors of keys or values that are; a piece is a whole number of such
LEAST = -1e30  # a peak below all scores
SCORE_ROW = 4 * PIECE  # bytes of one row of scores
ALL = 1 << 30  # a window that holds any context


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """The kernels that read one type of cache, as compiled code calls them."""

    scores: Any
    soften: Any
    gather: Any


class HeadBlocks(NamedTuple):
    """One KV head of a layer in all blocks: where it is in block 0, how it is attended over, and the addresses of the
    kernels that do."""

    cache: int
    block_bytes: int
    dim: int
    window: int  # positions that a query sees, its own included
    softcap: int  # of scores, bits of a float32; 0: none
    scores: int
    soften: int
    gather: int


# -- one piece


class Piece(NamedTuple):
    """Some rows over one piece, as vector code has it: what each of the three kernels takes, all i64."""

    at: Any  # the first row's query, or its record
    stride: Any  # bytes from there to the next row's
    scores: Any  # float32 [rows][PIECE]
    first_count: Any  # positions that the first row sees; more than PIECE where it sees some behind the piece
    count_step: Any
    blocks: Any  # those of which any row sees a position
    table: Any
    cache: Any
    block_bytes: Any
    dim: Any
    window: Any  # positions that a row sees, of which the last is the one before its count
    softcap: Any  # bits of a float32

    def behind(self, e: Emit, rows: Any) -> "Piece":
        """The rows behind the first ones."""
        at, count = e.b.add(self.at, e.b.mul(self.stride, rows)), e.b.mul(self.count_step, rows)
        scores = e.at(self.scores, rows, SCORE_ROW)
        return self._replace(at=at, scores=scores, first_count=e.b.add(self.first_count, count))

    def row(self, e: Emit, row: int) -> Any:
        """The address of a row's query or record."""
        return e.b.add(self.at, e.b.mul(self.stride, I64(row)))

    def counts(self, e: Emit, rows: int) -> list[Any]:
        """How many positions each row sees."""
        return [e.b.add(self.first_count, e.b.mul(self.count_step, I64(row))) for row in range(rows)]

    def sees(self, e: Emit, positions: Any, count: Any) -> Any:
        """Which of some positions, an integer or a vector, a row sees: those of its window before its count."""

        def same(value: Any) -> Any:
            return value if positions.type == I64 else e.splat(e.b.trunc(value, I32))

        behind = e.b.sub(positions, same(e.b.sub(count, self.window)))
        return e.b.icmp_unsigned("<", behind, same(self.window))  # negative numbers are large ones

    def block(self, e: Emit, index: Any) -> Any:
        """The address of a block of the piece."""
        return e.b.add(self.cache, e.b.mul(e.load(e.at(self.table, index, 8), I64, 8), self.block_bytes))


def _emit_scores(e: Emit, kv: Elements, rows: int, span: int, piece: Piece) -> None:
    """scores[row] = q[row] . K, without scales, `span` blocks side by side; behind the last block it repeats."""
    b, size = e.b, kv.size * BLOCK_SIZE
    queries = [piece.row(e, row) for row in range(rows)]
    with cgutils.for_range_slice(b, I64(0), piece.blocks, I64(span), I64) as (first, _):
        places = [b.add(first, I64(i)) for i in range(span)]
        last = b.sub(piece.blocks, I64(1))
        keys = [piece.block(e, b.select(b.icmp_signed("<", place, last), place, last)) for place in places]
        sums = {(row, i): e.variable(e.f(0)) for row in range(rows) for i in range(span)}
        with cgutils.for_range(b, b.sdiv(piece.dim, I64(4))) as loop:
            for d in range(4):
                columns = [kv.load(e, e.at(e.at(key, loop.index, 4 * size), size * d)) for key in keys]
                for row, query in enumerate(queries):
                    value = e.splat(e.load(e.at(e.at(query, loop.index, 16), 4 * d), F32))
                    for i, column in enumerate(columns):
                        b.store(e.fma(column, value, b.load(sums[row, i])), sums[row, i])
        for (row, i), total in sums.items():
            e.store(e.at(e.at(piece.scores, places[i], 64), SCORE_ROW * row), b.load(total))


def _emit_soften(e: Emit, kv: Elements, rows: int, _: int, piece: Piece) -> None:
    """scores[row] becomes exp(score - peak), 0 outside of what the row sees; peak and total go to its record.

    Rows take turns, so that none has to wait for its last result. Scales are multiplied here, once for each position:
    the score by that of K, before it is capped, and the result by that of V.
    """
    b, counts = e.b, piece.counts(e, rows)
    capped, cap = b.icmp_signed("!=", piece.softcap, I64(0)), e.splat(e.float_from_bits(piece.softcap))
    tops, totals = ([e.variable(e.f(start)) for _ in range(rows)] for start in (LEAST, 0))

    def places(index: Any) -> list[tuple[Any, Any]]:
        """For each row, where its scores of a block are, and which of the lanes it sees."""
        at, start = e.at(piece.scores, index, 64), b.mul(index, I64(BLOCK_SIZE))
        return [
            (e.at(at, SCORE_ROW * row), piece.sees(e, LANE_NUMBERS, b.sub(count, start)))
            for row, count in enumerate(counts)
        ]

    def scales(index: Any) -> tuple[Any, Any]:
        keys, values = scales_at(e, kv, piece.block(e, index), piece.dim)
        return e.load(keys), e.load(values)

    with b.if_then(capped), cgutils.for_range(b, piece.blocks) as loop:
        for at, _ in places(loop.index):
            v = e.load(at)
            v = b.fmul(v, scales(loop.index)[0]) if kv.scaled else v
            e.store(at, soft_cap(e, v, cap))
    with cgutils.for_range(b, piece.blocks) as loop:
        for (at, live), top in zip(places(loop.index), tops, strict=True):
            v = e.load(at)
            if kv.scaled:
                v = b.fmul(v, b.select(capped, e.f(1), scales(loop.index)[0]))
                e.store(at, v)
            b.store(e.larger(b.select(live, v, e.f(LEAST)), b.load(top)), top)
    peaks = [e.reduce(b.load(top), e.larger) for top in tops]
    with cgutils.for_range(b, piece.blocks) as loop:
        for (at, live), peak, total in zip(places(loop.index), peaks, totals, strict=True):
            weights = b.select(live, e.exp(b.fsub(e.load(at), e.splat(peak))), e.f(0))
            b.store(b.fadd(b.load(total), weights), total)
            if kv.scaled:
                weights = b.select(live, b.fmul(weights, scales(loop.index)[1]), e.f(0))
            e.store(at, weights)
    for row, (peak, total) in enumerate(zip(peaks, totals, strict=True)):
        tail = e.at(piece.row(e, row), piece.dim, 4)
        e.store(tail, peak, 4)
        e.store(e.at(tail, 4), e.reduce(b.load(total), b.fadd), 4)


def _emit_gather(e: Emit, kv: Elements, rows: int, most: int, piece: Piece) -> None:
    """record[row] = the sum of scores[row][t] * V[t] over the positions t that the row sees, in order.

    All columns of V: `most` vectors at a time as far as they go, then half as many.
    """
    start = I64(0)
    while most:
        stop = e.b.and_(piece.dim, I64(-LANES * most))
        with cgutils.for_range_slice(e.b, start, stop, I64(LANES * most), I64) as (column, _):
            _emit_columns(e, kv, rows, most, column, piece)
        start, most = stop, most // 2


def _emit_columns(e: Emit, kv: Elements, rows: int, vectors: int, column: Any, piece: Piece) -> None:
    """The columns from `column` on. Of a block that not all rows see all of, each takes what it sees by selection."""
    b, counts = e.b, piece.counts(e, rows)
    cells = [(row, i) for row in range(rows) for i in range(vectors)]
    sums = {cell: e.variable(e.f(0)) for cell in cells}
    with cgutils.for_range(b, piece.blocks) as outer:
        start = b.mul(outer.index, I64(BLOCK_SIZE))
        values = e.at(e.at(piece.block(e, outer.index), piece.dim, kv.size * BLOCK_SIZE), column, kv.size)
        stop = b.add(start, I64(BLOCK_SIZE))
        whole = b.and_(
            b.icmp_signed("<=", b.sub(counts[-1], piece.window), start), b.icmp_signed(">=", counts[0], stop)
        )
        first = e.within(b.sub(b.sub(counts[0], piece.window), start), BLOCK_SIZE)
        last = e.within(b.sub(counts[-1], start), BLOCK_SIZE)
        most = b.select(whole, I64(BLOCK_SIZE), I64(0))
        for begin, end, everyone in ((I64(0), most, True), (first, b.select(whole, first, last), False)):
            with cgutils.for_range(b, end, begin) as inner:
                position = b.add(start, inner.index)
                at = b.add(values, b.mul(inner.index, b.mul(piece.dim, I64(kv.size))))
                columns = [kv.load(e, e.at(at, kv.size * LANES * i)) for i in range(vectors)]
                at = e.at(piece.scores, position, 4)
                weights = [e.splat(e.load(e.at(at, SCORE_ROW * row), F32)) for row in range(rows)]
                for row, i in cells:
                    before = b.load(sums[row, i])
                    after = e.fma(columns[i], weights[row], before)
                    if not everyone:
                        after = b.select(piece.sees(e, position, counts[row]), after, before)
                    b.store(after, sums[row, i])
    for row, i in cells:
        e.store(e.at(e.at(piece.row(e, row), column, 4), 64 * i), b.load(sums[row, i]))


def _make_kernel(name: str, kv_type: KVType, emit: Callable[[Emit, Elements, int, int, Piece], None]) -> Any:
    """A kernel for up to QUERIES rows; `emit` writes the code for a number of them, and of vectors side by side."""
    kv = ELEMENTS[kv_type]

    def build(
        e: Emit, rows: Any, at: Any, stride: Any, scores: Any, first_count: Any, count_step: Any, blocks: Any,
        table: Any, cache: Any, block_bytes: Any, dim: Any, window: Any, softcap: Any,
    ) -> None:  # fmt: skip
        b, rest, head = e.b, rows, (cache, block_bytes, dim, window, softcap)
        piece = Piece(at, stride, scores, first_count, count_step, blocks, table, *head)
        sums = 4 if e.has_few_registers else 16  # that fit into registers beside what is added to them
        if not e.has_few_registers:
            full = b.icmp_signed("==", rows, I64(QUERIES))
            with b.if_then(full):
                emit(e, kv, QUERIES, sums // QUERIES, piece)
            rest = b.select(full, I64(0), rows)
        with cgutils.for_range_slice(b, I64(0), rest, I64(FEW), I64) as (first, _):
            left = e.within(b.sub(rest, first), FEW)
            for height in range(1, FEW + 1):
                with b.if_then(b.icmp_signed("==", left, I64(height))):
                    emit(e, kv, height, min(SIDE_BY_SIDE, sums // height), piece.behind(e, first))

    build.__name__ = f"{name}_{kv_type.name.lower()}"
    return kernel(build)


def _make_kernels(kv_type: KVType) -> AttentionKernels:
    return AttentionKernels(
        _make_kernel("scores", kv_type, _emit_scores),
        _make_kernel("soften", kv_type, _emit_soften),
        _make_kernel("gather", kv_type, _emit_gather),
    )


ATTENTION_KERNELS = {kv_type: _make_kernels(kv_type) for kv_type in KVType}


@inlined
def _call(
    e: Emit, kernel: Any, rows: Any, at: Any, stride: Any, scores: Any, first_count: Any, count_step: Any, blocks: Any,
    table: Any, cache: Any, block_bytes: Any, dim: Any, window: Any, softcap: Any,
) -> None:  # fmt: skip
    """Call one of the three kernels by its address."""
    head = cache, block_bytes, dim, window, softcap
    e.call_address(kernel, rows, at, stride, scores, first_count, count_step, blocks, table, *head)


@jit
def attend_piece(
    rows: int, q: int, q_stride: int, first_count: int, count_step: int, table: int, kv: HeadBlocks, scores: int,
    records: int, record_stride: int,
) -> None:  # fmt: skip
    """Rows, any number of them, over one piece -> a record each. `scores` has room for QUERIES rows.

    Row r is at q + r * q_stride and sees the last kv.window of first_count + r * count_step positions, some of them in
    the piece: rows are the query heads of one token (step 0), or consecutive tokens (step 1). `table` is the address of
    the piece's first block id.
    """
    for row in range(0, rows, QUERIES):
        n = min(QUERIES, rows - row)
        query, record, count = q + row * q_stride, records + row * record_stride, first_count + row * count_step
        before = max(0, count - kv.window) // BLOCK_SIZE  # blocks that no row sees anything of
        blocks = (min(PIECE, count + (n - 1) * count_step) + BLOCK_SIZE - 1) // BLOCK_SIZE - before
        count, ids = count - before * BLOCK_SIZE, table + 8 * before
        _call(
            kv.scores, n, query, q_stride, scores, count, count_step, blocks, ids, kv.cache, kv.block_bytes, kv.dim,
            kv.window, kv.softcap,
        )  # fmt: skip
        for address in (kv.soften, kv.gather):
            _call(
                address, n, record, record_stride, scores, count, count_step, blocks, ids, kv.cache, kv.block_bytes,
                kv.dim, kv.window, kv.softcap,
            )  # fmt: skip


@jit
def attend_tile(
    q: int, token_stride: int, heads: int, pos: int, queries: int, table: int, kv: HeadBlocks, scores: int,
    records: int, out: int, out_stride: int,
) -> None:  # fmt: skip
    """`queries` consecutive tokens, the first at `pos`, and all query heads of one KV head, over all that they see.

    `records` has room for heads + 1 times QUERIES of them; out [queries][heads * dim] float32.
    """
    dim = kv.dim
    size = 4 * dim + RECORD_TAIL
    later = records + heads * QUERIES * size
    for start in range(first_seen(pos, kv.window) // PIECE * PIECE, pos + queries, PIECE):
        blocks = table + start // BLOCK_SIZE * 8
        # Of this piece, tokens before it see nothing, and neither do those whose window begins behind it.
        first, last = max(0, start - pos), min(queries, start + PIECE + kv.window - 1 - pos)
        # It is the first one of those whose window begins in it.
        begun = first if start == 0 else min(last, max(first, start + kv.window - 1 - pos))
        for head in range(heads):
            at, total = q + 4 * dim * head, records + head * QUERIES * size
            for row, stop, record in ((first, begun, later), (begun, last, total + begun * size)):
                if row < stop:
                    here, count = at + row * token_stride, pos + row + 1 - start
                    attend_piece(stop - row, here, token_stride, count, 1, blocks, kv, scores, record, size)
            for row in range(first, begun):
                combine(total + row * size, later + (row - first) * size, dim, total + row * size)
    for head in range(heads):
        for row in range(queries):
            finish(records + (head * QUERIES + row) * size, dim, out + row * out_stride + 4 * dim * head)


@jit
def first_seen(position: int, window: int) -> int:
    """The first position that one sees."""
    return max(0, position + 1 - window)
