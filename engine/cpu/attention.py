"""Attention over paged keys and values: softmax in pieces of 128 positions.

Blocks are laid out as `kv_store` writes them; whatever their type, sums are of float32. A query's context is cut into
pieces of PIECE positions. A piece becomes a record (values, peak, total), whoever computes it; records are combined one
after another in order of position by a running maximum (arXiv:2205.14135). A query alone and a query among others go
through the same sums in the same order, so that its bits depend neither on how the prompt was cut nor on what was
cached. Lanes behind a query's position are selected away, never added: a freed block may hold NaN.

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

from engine.config import BLOCK_SIZE
from engine.cpu.kv_store import ELEMENTS, Elements, KVType, scales_at
from quant.cpu.kernel import inlined, jit, kernel
from quant.cpu.vector import F32, I32, I64, LANES, Emit

PIECE = 128  # positions that are reduced together
QUERIES = 8  # tokens of a tile, and the most rows that go over a piece together
FEW = 4  # rows that are computed together where there are fewer, or few registers
SIDE_BY_SIDE = 4  # the most vectors of keys or values that are; a piece is a whole number of such
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
    """scores[row] becomes exp(score - peak), 0 behind what the row sees; peak and total go to its record.

    Rows take turns, so that none has to wait for its last result. Scales are multiplied here, once for each position:
    the score by that of K, the result by that of V.
    """
    b, counts = e.b, piece.counts(e, rows)
    tops, totals = ([e.variable(e.f(start)) for _ in range(rows)] for start in (LEAST, 0))

    def places(index: Any) -> list[tuple[Any, Any]]:
        """For each row, where its scores of a block are, and which of the lanes it sees."""
        at, start = e.at(piece.scores, index, 64), b.mul(index, I64(BLOCK_SIZE))
        return [(e.at(at, SCORE_ROW * row), e.first_lanes(b.sub(count, start))) for row, count in enumerate(counts)]

    def scales(index: Any) -> tuple[Any, Any]:
        keys, values = scales_at(e, kv, piece.block(e, index), piece.dim)
        return e.load(keys), e.load(values)

    with cgutils.for_range(b, piece.blocks) as loop:
        for (at, live), top in zip(places(loop.index), tops, strict=True):
            v = e.load(at)
            if kv.scaled:
                v = b.fmul(v, scales(loop.index)[0])
                e.store(at, v)
            b.store(e.larger(b.select(live, v, e.f(LEAST)), b.load(top)), top)
    peaks = [e.tree(b.load(top), e.larger) for top in tops]
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
        e.store(e.at(tail, 4), e.tree(b.load(total), b.fadd), 4)


def _emit_gather(e: Emit, kv: Elements, rows: int, most: int, piece: Piece) -> None:
    """record[row] = the sum of scores[row][t] * V[t] over the positions t that the row sees, in order.

    All columns of V: `most` vectors at a time as far as they go, then two.
    """
    wide = e.b.and_(piece.dim, I64(-LANES * most))
    parts = [(most, I64(0), wide), (2, wide, piece.dim)]
    for vectors, start, stop in parts if most > 2 else parts[:1]:
        with cgutils.for_range_slice(e.b, start, stop, I64(LANES * vectors), I64) as (column, _):
            _emit_columns(e, kv, rows, vectors, column, piece)


def _emit_columns(e: Emit, kv: Elements, rows: int, vectors: int, column: Any, piece: Piece) -> None:
    """The columns from `column` on; of each block, first the positions that all rows see, then those that some do."""
    b, counts = e.b, piece.counts(e, rows)
    cells = [(row, i) for row in range(rows) for i in range(vectors)]
    sums = {cell: e.variable(e.f(0)) for cell in cells}
    with cgutils.for_range(b, piece.blocks) as outer:
        start = b.mul(outer.index, I64(BLOCK_SIZE))
        values = e.at(e.at(piece.block(e, outer.index), piece.dim, kv.size * BLOCK_SIZE), column, kv.size)
        common, seen = (e.within(b.sub(count, start), BLOCK_SIZE) for count in (counts[0], counts[-1]))
        for begin, end, everyone in ((I64(0), common, True), (common, seen, False)):
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
                        after = b.select(b.icmp_signed("<", position, counts[row]), after, before)
                    b.store(after, sums[row, i])
    for row, i in cells:
        e.store(e.at(e.at(piece.row(e, row), column, 4), 64 * i), b.load(sums[row, i]))


def _make_kernel(name: str, kv_type: KVType, emit: Callable[[Emit, Elements, int, int, Piece], None]) -> Any:
    """A kernel for up to QUERIES rows; `emit` writes the code for a number of them, and of vectors side by side."""
    kv = ELEMENTS[kv_type]

    def build(
        e: Emit, rows: Any, at: Any, stride: Any, scores: Any, first_count: Any, count_step: Any, blocks: Any,
        table: Any, cache: Any, block_bytes: Any, dim: Any,
    ) -> None:  # fmt: skip
        b, rest = e.b, rows
        piece = Piece(at, stride, scores, first_count, count_step, blocks, table, cache, block_bytes, dim)
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
def _call(
    e: Emit, kernel: Any, rows: Any, at: Any, stride: Any, scores: Any, first_count: Any, count_step: Any, blocks: Any,
    table: Any, cache: Any, block_bytes: Any, dim: Any,
) -> None:  # fmt: skip
    """Call one of the three kernels by its address."""
    e.call_address(kernel, rows, at, stride, scores, first_count, count_step, blocks, table, cache, block_bytes, dim)


@jit
def attend_piece(
    rows: int, q: int, q_stride: int, first_count: int, count_step: int, table: int, kv: HeadBlocks, scores: int,
    records: int, record_stride: int,
) -> None:  # fmt: skip
    """Rows, any number of them, over one piece -> a record each. `scores` has room for QUERIES rows.

    Row r is at q + r * q_stride and sees first_count + r * count_step positions, at most PIECE: rows are the query
    heads of one token (step 0), or consecutive tokens (step 1). `table` is the address of the piece's first block id.
    """
    cache, block_bytes, dim = kv.cache, kv.block_bytes, kv.dim
    for row in range(0, rows, QUERIES):
        n = min(QUERIES, rows - row)
        query, record, count = q + row * q_stride, records + row * record_stride, first_count + row * count_step
        blocks = (min(PIECE, count + (n - 1) * count_step) + BLOCK_SIZE - 1) // BLOCK_SIZE
        _call(kv.scores, n, query, q_stride, scores, count, count_step, blocks, table, cache, block_bytes, dim)
        for address in (kv.soften, kv.gather):
            _call(address, n, record, record_stride, scores, count, count_step, blocks, table, cache, block_bytes, dim)


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
