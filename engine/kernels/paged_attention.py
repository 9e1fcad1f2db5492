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
from engine.kernels.attention_parts import attended, merged, output, parts_of
from engine.kernels.attention_tiles import TileList, Tiles
from engine.kernels.attention_tuning import DECODE_ROWS, Tuning, tuning
from engine.kernels.reference import ScoreRule
from quant.kernels.card import Card

LOG2E = 1.4426950408889634
E4M3_SCALE = 256.0  # an e4m3's bits in the place of a float16's, whose exponents have a bias of 15 instead of 7
PROGRAMS = 4  # for each multiprocessor: two at a time, twice, so that none waits long for the last
PARTS_BYTES = 1 << 27  # that all parts may take; beyond, a tile's program merges its own as it goes


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
    origin, length, parts = parts_of(start, end, PART, FIXED, PIECE)
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
            peak, total, mixed = attended(
                own_q, position + token, keys, values, table, block_stride, low, seen_by_all, seen_from, window, scale,
                cap, peak, total, mixed, CAPPED, WINDOWED, False, HEAD_DIM, BLOCK_SIZE, PIECE, COLUMNS,
            )  # fmt: skip
            low = seen_by_all
        peak, total, mixed = attended(
            own_q, position + token, keys, values, table, block_stride, low, high, seen_from, window, scale,
            cap, peak, total, mixed, CAPPED, WINDOWED, True, HEAD_DIM, BLOCK_SIZE, PIECE, COLUMNS,
        )  # fmt: skip
        if DIRECT:
            sink = (
                tl.load(sinks + head, mask=real, other=0.0) * LOG2E
                if SINKS
                else tl.full((ROWS,), float("-inf"), tl.float32)
            )
            result = output(peak, total, mixed, sink, value_scale)
            tl.store(out + line[:, None] * HEAD_DIM + column[None, :], result.to(out.dtype.element_ty), mask=there)
        else:
            slot = slot_row * slots + tl.minimum(part, slots - 1)
            mixture = mixtures + slot[:, None] * HEAD_DIM + column[None, :]
            if FIXED:  # what this program has left there before
                earlier = (part > program) & (slots == 1)
                tl.debug_barrier()
                peak, total, mixed = merged(
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
            peak, total, mixed = merged(
                peak,
                total,
                mixed,
                tl.load(peaks + 2 * slot, mask=more, other=float("-inf")),
                tl.load(peaks + 2 * slot + 1, mask=more, other=0.0),
                tl.load(mixtures + slot[:, None] * HEAD_DIM + column, mask=more[:, None] & inside, other=0.0),
            )
    sink = tl.load(sinks + row % HEADS) * LOG2E if SINKS else tl.full((ROWS,), float("-inf"), tl.float32)
    result = output(peak, total, mixed, sink, value_scale).to(out.dtype.element_ty)
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
