"""Attention over paged keys and values: the softmax is computed in pieces of 128 positions.

Blocks have the layout of `kv_store`; sums are float32 for every cache type. A query's context is divided into pieces of
PIECE positions. Each piece gives a partial result (see `partials`), which any thread may compute, and partial results
are combined in order of position. A query uses the same sums in the same order whether it is computed alone or among
others, so its bits depend neither on the chunking of the prompt nor on what was cached. Positions that a query does not
see are masked by a select instruction, not by adding zero, because a freed block may hold NaN. Blocks that no row's
window reaches are not read.

Rows that share a KV head are processed together, so that keys and values are loaded and widened to float32 once for all
of them. Rows are the query heads of one token, or consecutive tokens.

Lower bounds: one token must read the keys and values of its context; a prompt needs 4 * queries * heads * head_dim *
context operations. Everything here is compiled and takes addresses. Reference implementation: `paged_attention` in
`engine.kernels.reference`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from numba.core import cgutils

from engine.backends.cpu.kv_store import ELEMENTS, Elements, KVType, scales_at
from engine.backends.cpu.partials import PARTIAL_TAIL, combine, finish
from engine.backends.cpu.soft_cap import soft_cap
from engine.config import BLOCK_SIZE
from quant.cpu.kernel import inlined, jit, kernel
from quant.cpu.vector import F32, I32, I64, LANE_NUMBERS, LANES, Emit

PIECE = 128  # positions per partial result
QUERIES = 8  # maximum number of tokens per tile, and of rows that are processed together
SMALL_ROWS = 4  # maximum number of rows processed together in an incomplete tile, or on a CPU with few vector registers
# maximum number of vectors of keys or values that are loaded together; it divides the number of blocks in a piece
MAX_VECTORS = 4
LOWEST = -1e30  # less than any score
CACHE_LINE = 64  # bytes
SCORE_ROW = 4 * PIECE  # bytes of one row of scores
UNLIMITED = 1 << 30  # window size of layers that have no window


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """The three kernels for one cache type: q * K, softmax, and the weighted sum of V."""

    scores: Any
    softmax: Any
    weighted_sum: Any


class HeadBlocks(NamedTuple):
    """One KV head of a layer: its address in block 0, attention parameters, and the addresses of the kernels."""

    cache: int
    block_bytes: int
    dim: int
    window: int  # positions that a query sees, including its own
    softcap: int  # soft cap of scores, as the bits of a float32; 0: none
    sinks: int  # address of one more score for each query head, float32; 0: none
    scores: int
    softmax: int
    weighted_sum: int


# -- one piece


class Piece(NamedTuple):
    """The arguments of all three kernels: some rows, and one piece of their context. All values are i64."""

    at: Any  # address of the first row's query, or of its partial result
    stride: Any  # bytes between rows
    scores: Any  # float32 [rows][PIECE]
    # number of positions up to the first row's own, counted from the start of the piece; may exceed PIECE
    first_count: Any
    count_step: Any
    blocks: Any  # number of blocks of the piece, up to the last one that any row sees
    table: Any
    cache: Any
    block_bytes: Any
    dim: Any
    window: Any  # number of positions that a row attends to, including its own
    softcap: Any  # soft cap of scores, as the bits of a float32; 0: none

    def skip(self, e: Emit, rows: Any) -> "Piece":
        """Return the same piece without its first `rows` rows."""
        at, count = e.b.add(self.at, e.b.mul(self.stride, rows)), e.b.mul(self.count_step, rows)
        scores = e.at(self.scores, rows, SCORE_ROW)
        return self._replace(at=at, scores=scores, first_count=e.b.add(self.first_count, count))

    def row(self, e: Emit, row: int) -> Any:
        """Return the address of a row's query or partial result."""
        return e.b.add(self.at, e.b.mul(self.stride, I64(row)))

    def counts(self, e: Emit, rows: int) -> list[Any]:
        """Return for each row the number of positions up to its own, counted from the start of the piece."""
        return [e.b.add(self.first_count, e.b.mul(self.count_step, I64(row))) for row in range(rows)]

    def visible(self, e: Emit, positions: Any, count: Any) -> Any:
        """Return a mask of the `positions` (integer or vector) that a row sees: the last `window` before `count`."""

        def same(value: Any) -> Any:
            return value if positions.type == I64 else e.splat(e.b.trunc(value, I32))

        offset = e.b.sub(positions, same(e.b.sub(count, self.window)))
        return e.b.icmp_unsigned("<", offset, same(self.window))  # unsigned, so that negative offsets are large

    def block(self, e: Emit, index: Any) -> Any:
        """Return the address of a block of the piece."""
        return e.b.add(self.cache, e.b.mul(e.load(e.at(self.table, index, 8), I64, 8), self.block_bytes))


def _emit_scores(e: Emit, kv: Elements, rows: int, span: int, piece: Piece) -> None:
    """Emit scores[row] = q[row] * K without scales, for `span` blocks at a time.

    The last block is repeated to fill the last span.
    """
    b, size = e.b, kv.size * BLOCK_SIZE
    queries, last = [piece.row(e, row) for row in range(rows)], b.sub(piece.blocks, I64(1))

    def keys_from(first: Any) -> list[Any]:
        blocks = [b.add(first, I64(i)) for i in range(span)]
        return [piece.block(e, b.select(b.icmp_signed("<", block, last), block, last)) for block in blocks]

    with cgutils.for_range_slice(b, I64(0), piece.blocks, I64(span), I64) as (first, _):
        keys = keys_from(first)
        # The values of these blocks and the next keys are read next. A block has as many values as keys.
        ahead = [e.at(key, piece.dim, size) for key in keys] + keys_from(b.add(first, I64(span)))
        sums = {(row, i): e.variable(e.f(0)) for row in range(rows) for i in range(span)}
        with cgutils.for_range(b, b.sdiv(piece.dim, I64(4))) as loop:
            for line, at in product(range(4 * size // CACHE_LINE), ahead):
                e.prefetch(e.at(e.at(at, loop.index, 4 * size), CACHE_LINE * line))
            for d in range(4):
                columns = [kv.load(e, e.at(e.at(key, loop.index, 4 * size), size * d)) for key in keys]
                for row, query in enumerate(queries):
                    value = e.splat(e.load(e.at(e.at(query, loop.index, 16), 4 * d), F32))
                    for i, column in enumerate(columns):
                        b.store(e.fma(column, value, b.load(sums[row, i])), sums[row, i])
        for (row, i), total in sums.items():
            e.store(e.at(e.at(piece.scores, b.add(first, I64(i)), 64), SCORE_ROW * row), b.load(total))


def _emit_softmax(e: Emit, kv: Elements, rows: int, _: int, piece: Piece) -> None:
    """Emit scores[row] = exp(score - peak), and 0 for positions that the row does not see.

    The peak and the total are stored in the partial result. Rows are interleaved, so that no row waits for its previous
    result. int8 scales are applied here, once per position: the scale of K to the score before the soft cap, the scale
    of V to the result.
    """
    b, counts = e.b, piece.counts(e, rows)
    capped, cap = b.icmp_signed("!=", piece.softcap, I64(0)), e.splat(e.float_from_bits(piece.softcap))
    tops, totals = ([e.variable(e.f(start)) for _ in range(rows)] for start in (LOWEST, 0))

    def rows_of_block(index: Any) -> list[tuple[Any, Any]]:
        """Return, for each row, the address of its scores for a block and a mask of the positions it sees."""
        at, start = e.at(piece.scores, index, 64), b.mul(index, I64(BLOCK_SIZE))
        return [
            (e.at(at, SCORE_ROW * row), piece.visible(e, LANE_NUMBERS, b.sub(count, start)))
            for row, count in enumerate(counts)
        ]

    def scales(index: Any) -> tuple[Any, Any]:
        keys, values = scales_at(e, kv, piece.block(e, index), piece.dim)
        return e.load(keys), e.load(values)

    with b.if_then(capped), cgutils.for_range(b, piece.blocks) as loop:
        for at, _ in rows_of_block(loop.index):
            v = e.load(at)
            v = b.fmul(v, scales(loop.index)[0]) if kv.scaled else v
            e.store(at, soft_cap(e, v, cap))
    with cgutils.for_range(b, piece.blocks) as loop:
        for (at, live), top in zip(rows_of_block(loop.index), tops, strict=True):
            v = e.load(at)
            if kv.scaled:
                v = b.fmul(v, b.select(capped, e.f(1), scales(loop.index)[0]))
                e.store(at, v)
            b.store(e.larger(b.select(live, v, e.f(LOWEST)), b.load(top)), top)
    peaks = [e.reduce(b.load(top), e.larger) for top in tops]
    with cgutils.for_range(b, piece.blocks) as loop:
        for (at, live), peak, total in zip(rows_of_block(loop.index), peaks, totals, strict=True):
            weights = b.select(live, e.exp(b.fsub(e.load(at), e.splat(peak))), e.f(0))
            b.store(b.fadd(b.load(total), weights), total)
            if kv.scaled:
                weights = b.select(live, b.fmul(weights, scales(loop.index)[1]), e.f(0))
            e.store(at, weights)
    for row, (peak, total) in enumerate(zip(peaks, totals, strict=True)):
        tail = e.at(piece.row(e, row), piece.dim, 4)
        e.store(tail, peak, 4)
        e.store(e.at(tail, 4), e.reduce(b.load(total), b.fadd), 4)


def _emit_weighted_sum(e: Emit, kv: Elements, rows: int, most: int, piece: Piece) -> None:
    """Emit partial[row] = sum of scores[row][t] * V[t], in order, over the positions t that the row sees.

    The columns of V are processed `most` vectors at a time. The rest is processed with half as many, and so on.
    """
    start = I64(0)
    while most:
        stop = e.b.and_(piece.dim, I64(-LANES * most))
        with cgutils.for_range_slice(e.b, start, stop, I64(LANES * most), I64) as (column, _):
            _emit_columns(e, kv, rows, most, column, piece)
        start, most = stop, most // 2


def _emit_columns(e: Emit, kv: Elements, rows: int, vectors: int, column: Any, piece: Piece) -> None:
    """Emit the weighted sum of `vectors` vectors of columns, starting at `column`.

    In a block that some rows see only partly, each row selects the positions that it sees.
    """
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
        for begin, end, all_visible in ((I64(0), most, True), (first, b.select(whole, first, last), False)):
            with cgutils.for_range(b, end, begin) as inner:
                position = b.add(start, inner.index)
                at = b.add(values, b.mul(inner.index, b.mul(piece.dim, I64(kv.size))))
                columns = [kv.load(e, e.at(at, kv.size * LANES * i)) for i in range(vectors)]
                at = e.at(piece.scores, position, 4)
                weights = [e.splat(e.load(e.at(at, SCORE_ROW * row), F32)) for row in range(rows)]
                for row, i in cells:
                    before = b.load(sums[row, i])
                    after = e.fma(columns[i], weights[row], before)
                    if not all_visible:
                        after = b.select(piece.visible(e, position, counts[row]), after, before)
                    b.store(after, sums[row, i])
    for row, i in cells:
        e.store(e.at(e.at(piece.row(e, row), column, 4), 64 * i), b.load(sums[row, i]))


def _make_kernel(name: str, kv_type: KVType, emit: Callable[[Emit, Elements, int, int, Piece], None]) -> Any:
    """Return a kernel for up to QUERIES rows. `emit` generates code for given numbers of rows and vectors."""
    kv = ELEMENTS[kv_type]

    def build(
        e: Emit, rows: Any, at: Any, stride: Any, scores: Any, first_count: Any, count_step: Any, blocks: Any,
        table: Any, cache: Any, block_bytes: Any, dim: Any, window: Any, softcap: Any,
    ) -> None:  # fmt: skip
        b, rest, head = e.b, rows, (cache, block_bytes, dim, window, softcap)
        piece = Piece(at, stride, scores, first_count, count_step, blocks, table, *head)
        sums = 4 if e.has_few_registers else 16  # number of accumulators for which the registers suffice
        if not e.has_few_registers:
            full = b.icmp_signed("==", rows, I64(QUERIES))
            with b.if_then(full):
                emit(e, kv, QUERIES, sums // QUERIES, piece)
            rest = b.select(full, I64(0), rows)
        with cgutils.for_range_slice(b, I64(0), rest, I64(SMALL_ROWS), I64) as (first, _):
            left = e.within(b.sub(rest, first), SMALL_ROWS)
            for height in range(1, SMALL_ROWS + 1):
                with b.if_then(b.icmp_signed("==", left, I64(height))):
                    emit(e, kv, height, min(MAX_VECTORS, sums // height), piece.skip(e, first))

    build.__name__ = f"{name}_{kv_type.name.lower()}"
    return kernel(build)


def _make_kernels(kv_type: KVType) -> AttentionKernels:
    return AttentionKernels(
        _make_kernel("scores", kv_type, _emit_scores),
        _make_kernel("softmax", kv_type, _emit_softmax),
        _make_kernel("weighted_sum", kv_type, _emit_weighted_sum),
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
    partials: int, partial_stride: int,
) -> None:  # fmt: skip
    """Compute attention of any number of rows over one piece, and write a partial result for each row.

    `scores` is scratch memory for QUERIES rows. Row r is at q + r * q_stride; its own position is the last of
    first_count + r * count_step positions counted from the start of the piece, and it sees the last kv.window of them.
    Rows are the query heads of one token (count_step 0) or consecutive tokens (count_step 1). `table` is the address of
    the piece's first block id.
    """
    for row in range(0, rows, QUERIES):
        n = min(QUERIES, rows - row)
        query, partial, count = q + row * q_stride, partials + row * partial_stride, first_count + row * count_step
        before = max(0, count - kv.window) // BLOCK_SIZE  # number of blocks that precede the windows of all rows
        blocks = (min(PIECE, count + (n - 1) * count_step) + BLOCK_SIZE - 1) // BLOCK_SIZE - before
        count, ids = count - before * BLOCK_SIZE, table + 8 * before
        _call(
            kv.scores, n, query, q_stride, scores, count, count_step, blocks, ids, kv.cache, kv.block_bytes, kv.dim,
            kv.window, kv.softcap,
        )  # fmt: skip
        for address in (kv.softmax, kv.weighted_sum):
            _call(
                address, n, partial, partial_stride, scores, count, count_step, blocks, ids, kv.cache, kv.block_bytes,
                kv.dim, kv.window, kv.softcap,
            )  # fmt: skip


@jit
def attend_tile(
    q: int, token_stride: int, heads: int, pos: int, queries: int, table: int, kv: HeadBlocks, scores: int,
    partials: int, out: int, out_stride: int,
) -> None:  # fmt: skip
    """Compute attention of `queries` consecutive tokens over their context, for all query heads of one KV head.

    The first token is at position `pos`. `partials` has space for (heads + 1) * QUERIES partial results. `out` is
    float32 [queries][heads * dim].
    """
    dim = kv.dim
    size = 4 * dim + PARTIAL_TAIL
    later = partials + heads * QUERIES * size
    for start in range(first_visible(pos, kv.window) // PIECE * PIECE, pos + queries, PIECE):
        blocks = table + start // BLOCK_SIZE * 8
        first, last = tokens_of_piece(pos, queries, start, kv.window)
        # tokens first..started see no earlier piece
        started = first if start == 0 else min(last, max(first, start + kv.window - 1 - pos))
        for head in range(heads):
            at, total = q + 4 * dim * head, partials + head * QUERIES * size
            for row, stop, partial in ((first, started, later), (started, last, total + started * size)):
                if row < stop:
                    here, count = at + row * token_stride, pos + row + 1 - start
                    attend_piece(stop - row, here, token_stride, count, 1, blocks, kv, scores, partial, size)
            for row in range(first, started):
                combine(total + row * size, later + (row - first) * size, dim, total + row * size)
    for head in range(heads):
        for row in range(queries):
            sink = kv.sinks + 4 * head if kv.sinks != 0 else 0
            finish(partials + (head * QUERIES + row) * size, dim, sink, out + row * out_stride + 4 * dim * head)


@jit
def tokens_of_piece(pos: int, tokens: int, start: int, window: int) -> tuple[int, int]:
    """Return the range of tokens, the first of which is at position `pos`, that see the piece from `start` on.

    Earlier tokens precede the piece; the windows of later ones start after it.
    """
    return max(0, start - pos), min(tokens, start + PIECE + window - 1 - pos)


@jit
def first_visible(position: int, window: int) -> int:
    """Return the first position in the window of the token at `position`."""
    return max(0, position + 1 - window)
