"""Attention over the paged cache on a GPU, for any mixture of decoding and reading prompts. The twin is
`reference.batch_attention`.

A program takes one tile of queries (see `attention_tiles`) and one KV head, and goes over the tile's context piece by
piece, with a softmax by running maximum (arXiv:2205.14135). All query heads that share the KV head are rows of the
tile, so that keys and values are read once for them. Where tiles alone do not fill the card, contexts are cut into
parts as well: each leaves its peak, total and mixture, and a second kernel merges them (arXiv:2311.01282).

With `deterministic`, parts have a fixed length and are counted from the context's beginning, whichever program takes
them; all tiles have one shape, and one machine code computes them. A piece or a part of which a row sees nothing leaves
that row's bits as they are, and parts are merged in order of position, in both kernels by the same instructions. So a
token's bits are those of its own context alone.

The floor of decoding is to read keys and values once: 2 * kv_heads * head_dim * context elements for each request; that
of long prompts is 4 * heads * head_dim operations for each query and token that it sees.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.config import BLOCK_SIZE
from engine.kernels.attention_tiles import TileList, Tiles
from engine.kernels.attention_tuning import DECODE_ROWS, Tuning, tuning
from engine.kernels.reference import ScoreRule
from engine.kernels.running_softmax import base_of, weighed
from quant.kernels.card import Card

LOG2E = 1.4426950408889634
E4M3_SCALE = 256.0  # an e4m3's bits in the place of a float16's, whose exponents have a bias of 15 instead of 7
PROGRAMS = 4  # for each multiprocessor: two at a time, twice, so that none waits long for the last
PARTS_BYTES = 1 << 27  # that all parts may take; beyond, a tile's program merges its own as it goes


@triton.jit
def _parts(
    start: tl.tensor, end: tl.tensor, LENGTH: tl.constexpr, FIXED: tl.constexpr, PIECE: tl.constexpr
) -> tl.tensor:
    """Of a tile that sees its context from `start`, where a piece begins, to `end`: where the first part begins, how
    long parts are, and how many there are."""
    origin = start
    length = LENGTH
    if FIXED:
        origin = start // LENGTH * LENGTH
    else:
        length = tl.maximum(tl.cdiv(tl.cdiv(end - start, tl.num_programs(2)), PIECE) * PIECE, LENGTH)
    return origin, length, tl.cdiv(end - origin, length)


@triton.jit
def _loaded(pointers: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Keys or values as they are multiplied. An e4m3 becomes a float16, but for the factor E4M3_SCALE."""
    stored = tl.load(pointers, mask=mask, other=0)
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.uint16)
        stored = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return stored


@triton.jit
def _attended(
    q: tl.tensor,  # [ROWS, COLUMNS]
    sight: tl.tensor,  # [ROWS]: the last position that each row sees
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    block_stride: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    seen_from: tl.tensor,  # by any row
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,  # there may be rows that do not see everything
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Peak, total and mixture of each row, once it has attended positions low .. high as well."""
    column = tl.arange(0, COLUMNS)
    for at in range(low, high, PIECE):
        position = at + tl.arange(0, PIECE)
        valid = (position >= seen_from) & (position < high)
        block = tl.load(table + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        place = (block * block_stride + position % BLOCK_SIZE * HEAD_DIM)[:, None] + column[None, :]
        there = valid[:, None] & (column < HEAD_DIM)[None, :]
        scores = tl.dot(q, tl.trans(_loaded(keys + place, there)))
        if CAPPED:  # cap * tanh(x), and tanh(x) = 1 - 2 / (1 + exp(2 * x))
            scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores * scale))
        if MASKED:
            seen = valid[None, :] & (position[None, :] <= sight[:, None])
            if WINDOWED:
                seen &= position[None, :] > sight[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        weights, kept, peak, total = weighed(scores, 1.0 if CAPPED else scale, peak, total)
        v = _loaded(values + place, there)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * kept[:, None])
    return peak, total, mixed


@triton.jit
def _merged(
    peak: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    next_peak: tl.tensor,
    next_total: tl.tensor,
    next_mixed: tl.tensor,
) -> tl.tensor:
    """Two parts as one. With one of which a row has seen nothing, the other's bits stay."""
    top = tl.maximum(peak, next_peak)
    kept, added = tl.exp2(peak - base_of(top)), tl.exp2(next_peak - base_of(top))
    # Spelled out, so that both kernels round in the same places.
    total = tl.fma(next_total, added, total * kept)
    mixed = tl.fma(next_mixed, tl.broadcast_to(added[:, None], mixed.shape), mixed * kept[:, None])
    return top, total, mixed


@triton.jit
def _output(peak: tl.tensor, total: tl.tensor, mixed: tl.tensor, sink: tl.tensor, value_scale: tl.tensor) -> tl.tensor:
    """Of each row; `sink` takes part as a score does, -inf where there is none. A row that has seen nothing is 0."""
    top = base_of(tl.maximum(peak, sink))
    kept = tl.exp2(peak - top)
    total = total * kept + tl.exp2(sink - top)
    share = tl.where(total > 0, kept * value_scale / total, 0.0)
    return mixed * share[:, None]


@triton.jit(do_not_specialize=["table_stride", "slots"])  # one machine code for contexts of any length
def _attention_kernel(
    q: tl.tensor,
    pool: tl.tensor,
    tables: tl.tensor,
    query_starts: tl.tensor,
    context_lengths: tl.tensor,
    tiles: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,  # where DIRECT; else the three that follow
    mixtures: tl.tensor,
    peaks: tl.tensor,
    merges: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    slots: tl.tensor,  # for parts of one row; 1: its program merges them
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    value_scale: tl.tensor,
    LOG2E: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    MANY: tl.constexpr,  # there are queries enough that most pieces are seen by all of them
    DIRECT: tl.constexpr,  # a tile has one part
    FIXED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    tile = tiles + 3 * tl.program_id(0)
    kv_head, program = tl.program_id(1), tl.program_id(2)
    request, first, place = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    queries_start, context = tl.load(query_starts + request), tl.load(context_lengths + request)
    count = tl.load(query_starts + request + 1) - queries_start
    tokens = tl.minimum(QUERIES, count - first)
    position = context - count + first
    end = position + tokens

    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = token < tokens
    there = real[:, None] & (column < HEAD_DIM)[None, :]
    line = (queries_start + first + token).to(tl.int64) * (KV_HEADS * GROUP) + head
    own_q = tl.load(q + line[:, None] * HEAD_DIM + column[None, :], mask=there, other=0.0)
    if pool.dtype.element_ty != tl.bfloat16:
        own_q = tl.clamp(own_q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    keys = pool + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values = keys + KV_HEADS * BLOCK_SIZE * HEAD_DIM
    table = tables + request.to(tl.int64) * table_stride

    seen_from = tl.maximum(position - window + 1, 0) if WINDOWED else 0
    start = seen_from // PIECE * PIECE
    origin, length, parts = _parts(start, end, PART, FIXED, PIECE)
    slot_row = (place + token).to(tl.int64) * (KV_HEADS * GROUP) + head
    if DIRECT:
        parts = 1
    elif program == 0:
        tl.store(merges + 2 * slot_row, line, mask=real)
        tl.store(merges + 2 * slot_row + 1, tl.minimum(parts, slots), mask=real)

    for part in range(program, parts, tl.num_programs(2)):
        low = tl.maximum(start, origin + part * length)
        high = tl.minimum(end, origin + (part + 1) * length)
        peak = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, COLUMNS), tl.float32)
        if MANY and not WINDOWED:
            seen_by_all = low + tl.maximum(tl.minimum(position + 1, high) - low, 0) // PIECE * PIECE
            peak, total, mixed = _attended(
                own_q, position + token, keys, values, table, block_stride, low, seen_by_all, seen_from, window, scale,
                cap, peak, total, mixed, CAPPED, WINDOWED, False, HEAD_DIM, BLOCK_SIZE, PIECE, COLUMNS,
            )  # fmt: skip
            low = seen_by_all
        peak, total, mixed = _attended(
            own_q, position + token, keys, values, table, block_stride, low, high, seen_from, window, scale,
            cap, peak, total, mixed, CAPPED, WINDOWED, True, HEAD_DIM, BLOCK_SIZE, PIECE, COLUMNS,
        )  # fmt: skip
        if DIRECT:
            sink = (
                tl.load(sinks + head, mask=real, other=0.0) * LOG2E
                if SINKS
                else tl.full((ROWS,), float("-inf"), tl.float32)
            )
            result = _output(peak, total, mixed, sink, value_scale)
            tl.store(out + line[:, None] * HEAD_DIM + column[None, :], result.to(out.dtype.element_ty), mask=there)
        else:
            slot = slot_row * slots + tl.minimum(part, slots - 1)
            mixture = mixtures + slot[:, None] * HEAD_DIM + column[None, :]
            if FIXED:  # what this program has left there before
                earlier = (part > program) & (slots == 1)
                tl.debug_barrier()
                peak, total, mixed = _merged(
                    tl.load(peaks + 2 * slot, mask=real & earlier, other=float("-inf")),
                    tl.load(peaks + 2 * slot + 1, mask=real & earlier, other=0.0),
                    tl.load(mixture, mask=there & earlier, other=0.0),
                    peak, total, mixed,
                )  # fmt: skip
            tl.store(peaks + 2 * slot, peak, mask=real)
            tl.store(peaks + 2 * slot + 1, total, mask=real)
            tl.store(mixture, mixed, mask=there)


@triton.jit(do_not_specialize=["rows", "slots"])
def _merge_kernel(
    mixtures: tl.tensor,
    peaks: tl.tensor,
    merges: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    value_scale: tl.tensor,
    LOG2E: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    column = tl.arange(0, COLUMNS)[None, :]
    inside = column < HEAD_DIM
    line = tl.load(merges + 2 * row, mask=real, other=0).to(tl.int64)
    parts = tl.load(merges + 2 * row + 1, mask=real, other=0)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, tl.max(parts, 0), TOGETHER):
        for offset in tl.static_range(TOGETHER):
            slot = row.to(tl.int64) * slots + begin + offset
            more = begin + offset < parts
            peak, total, mixed = _merged(
                peak,
                total,
                mixed,
                tl.load(peaks + 2 * slot, mask=more, other=float("-inf")),
                tl.load(peaks + 2 * slot + 1, mask=more, other=0.0),
                tl.load(mixtures + slot[:, None] * HEAD_DIM + column, mask=more[:, None] & inside, other=0.0),
            )
    sink = tl.load(sinks + row % HEADS) * LOG2E if SINKS else tl.full((ROWS,), float("-inf"), tl.float32)
    result = _output(peak, total, mixed, sink, value_scale).to(out.dtype.element_ty)
    tl.store(out + line[:, None] * HEAD_DIM + column, result, mask=real[:, None] & inside)


def paged_attention(
    q: Tensor,
    pool: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    tiles: Tiles,
    rule: ScoreRule,
    *,
    sinks: Tensor | None = None,
    card: Card,
    deterministic: bool,
) -> Tensor:
    """Causal attention of all tokens of a step, over keys and values that are all in the pool.

    q bfloat16 [tokens, heads, head_dim]; pool: one layer's, [blocks, 2, kv_heads, BLOCK_SIZE, head_dim], bfloat16,
    float16, or uint8 for e4m3, where the blocks may lie apart; tables int32 [requests, blocks]; query_starts int32
    [requests + 1]; context_lengths int32 [requests]; sinks float32 [heads]. Tiles are those of the same step, and of
    `tile_queries` for these heads, this card and the same `deterministic`. -> bfloat16 [tokens, heads * head_dim].
    """
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=torch.bfloat16, device=q.device)
    for it in tiles.lists:
        _attend(q, pool, tables, query_starts, context_lengths, it, rule, sinks, out, card, deterministic)
    return out


def _attend(
    q: Tensor,
    pool: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    tiles: TileList,
    rule: ScoreRule,
    sinks: Tensor | None,
    out: Tensor,
    card: Card,
    deterministic: bool,
) -> None:
    """The tokens of one list of tiles."""
    (_, heads, head_dim), kv_heads = q.shape, pool.shape[2]
    rows = max(DECODE_ROWS, triton.next_power_of_2(tiles.queries * (heads // kv_heads)))
    columns = triton.next_power_of_2(head_dim)
    tuned = tuning(rows, columns, card, deterministic=deterministic)
    programs, slots = _division(tiles, heads, kv_heads, head_dim, rule.window, tuned, card, deterministic)
    direct = programs == 1 and not deterministic
    lines = 1 if direct else tiles.tokens * heads
    mixtures = torch.empty(lines, slots, head_dim, dtype=torch.float32, device=q.device)
    peaks = torch.empty(lines, slots, 2, dtype=torch.float32, device=q.device)
    merges = torch.empty(lines, 2, dtype=torch.int32, device=q.device)
    float8 = E4M3_SCALE if pool.dtype == torch.uint8 else 1.0
    scale = rule.scale * LOG2E * float8
    _attention_kernel[len(tiles.tiles), kv_heads, programs](
        q,
        pool,
        tables,
        query_starts,
        context_lengths,
        tiles.tiles,
        q if sinks is None else sinks,
        out,
        mixtures,
        peaks,
        merges,
        pool.stride(0),
        tables.stride(0),
        slots,
        rule.window or 0,
        2 * scale / rule.softcap if rule.softcap else scale,
        rule.softcap * LOG2E,
        float8,
        LOG2E=LOG2E,
        CAPPED=rule.softcap != 0,
        WINDOWED=rule.window is not None,
        SINKS=sinks is not None,
        MANY=rows > DECODE_ROWS,
        DIRECT=direct,
        FIXED=deterministic,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=BLOCK_SIZE,
        QUERIES=tiles.queries,
        ROWS=rows,
        COLUMNS=columns,
        PIECE=tuned.piece,
        PART=tuned.part,
        num_warps=tuned.warps,
        num_stages=tuned.stages,
    )
    if not direct:
        _merge_kernel[(triton.cdiv(lines, tuned.merged_rows),)](
            mixtures,
            peaks,
            merges,
            q if sinks is None else sinks,
            out,
            lines,
            slots,
            float8,
            LOG2E=LOG2E,
            SINKS=sinks is not None,
            HEADS=heads,
            HEAD_DIM=head_dim,
            COLUMNS=columns,
            ROWS=tuned.merged_rows,
            TOGETHER=tuned.merged_parts,
            num_warps=4,
        )


def _division(
    tiles: TileList,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    tuned: Tuning,
    card: Card,
    deterministic: bool,
) -> tuple[int, int]:
    """How many programs share a tile and a KV head, and for how many parts of each row there is room.

    Both follow from what the host knows, so that a recorded step has them too.
    """
    span = tiles.max_context
    if window is not None:
        span = min(span, window + tiles.queries + tuned.piece)
    most = triton.cdiv(span, tuned.part) + (deterministic and window is not None)  # it may begin within a part
    programs = max(1, min(most, PROGRAMS * card.multiprocessors // (len(tiles.tiles) * kv_heads)))
    if not deterministic:
        return programs, programs
    fits = 4 * tiles.tokens * heads * head_dim * most <= PARTS_BYTES
    return (programs, most) if programs > 1 and fits else (1, 1)
