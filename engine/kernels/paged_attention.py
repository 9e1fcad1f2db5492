"""Attention over the paged KV cache on a GPU, for any mix of prefill and decode.

Reference implementation: `reference.batch_attention`.

A program handles one tile of queries (see `attention_tiles`) and one KV head. It iterates over the tile's context in
pieces with a running softmax (arXiv:2205.14135). All query heads that share the KV head are rows of the tile, so keys
and values are read once for all of them. If the tiles alone do not fill the GPU, contexts are divided into parts: the
program of each part stores its peak, total, and weighted sum (arXiv:2311.01282). For small tiles with few
parts, the program that is done last merges them, which saves a launch; otherwise, a second kernel does.

With `deterministic`, parts have a fixed length and are counted from the start of the context, whichever program
computes them. All tiles have one shape and use one compiled kernel. A piece or part in which a row sees no position
leaves that row's bits unchanged, and both kernels merge parts in order of position with the same instructions. A
token's bits therefore depend only on its own context.

Lower bound for decode: read keys and values once, 2 * kv_heads * head_dim * context elements per request. For long
prompts: 4 * heads * head_dim operations per query and visible position.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.config import BLOCK_SIZE
from engine.kernels.attention_tiles import TileList, Tiles
from engine.kernels.attention_tuning import DECODE_ROWS, Tuning, tuning
from engine.kernels.online_softmax import attend_part, context_parts, merge_parts, normalize_output
from engine.kernels.reference import ScoreRule
from quant.kernels.card import Card
from quant.kernels.early_start import launch_options, wait_for_inputs

LOG2E = 1.4426950408889634
E4M3_SCALE = 256.0  # bits of e4m3, read as those of float16, are too small by this: the exponent biases are 7 and 15
PROGRAMS = 4  # programs per multiprocessor: two waves of two, so that the last wave is short
# number of programs up to which the last one merges the parts; the other kernel loads more parts at a time
MOST_ARRIVALS = 16
# size limit of the stored parts in bytes; above it, the program of a tile merges its own parts one by one
PARTS_BYTES = 1 << 27


@triton.jit
def _store_output(
    out: tl.tensor,
    line: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    real: tl.tensor,
    head: tl.tensor,
    sinks: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    value_scale: tl.tensor,
    LOG2E: tl.constexpr,
    SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Store the output of rows whose whole context has been processed."""
    sink = tl.full((peak.shape[0],), float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0) * LOG2E
    result = normalize_output(peak, total, acc, sink, value_scale)
    tl.store(out + line[:, None] * HEAD_DIM + column[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _merged(
    accs: tl.tensor,
    peaks: tl.tensor,
    first_slot: tl.tensor,  # [ROWS], int64: slots of the first part of each row
    parts: tl.tensor,  # [ROWS]: number of parts of each row
    most: tl.tensor,  # the largest of these numbers
    column: tl.tensor,  # [COLUMNS]
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> tl.tensor:
    """Return the peak, total, and acc of rows over all parts, in order of position. TOGETHER parts are loaded at once.

    Other programs may have written them during this launch, so they are not read from the multiprocessor's cache.
    """
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, most, TOGETHER):
        for offset in tl.static_range(TOGETHER):
            slot = first_slot + begin + offset
            more = begin + offset < parts
            inside = more[:, None] & (column < HEAD_DIM)[None, :]
            acc_at = accs + slot[:, None] * HEAD_DIM + column[None, :]
            peak, total, acc = merge_parts(
                peak,
                total,
                acc,
                tl.load(peaks + 2 * slot, mask=more, other=float("-inf"), cache_modifier=".cg"),
                tl.load(peaks + 2 * slot + 1, mask=more, other=0.0, cache_modifier=".cg"),
                tl.load(acc_at, mask=inside, other=0.0, cache_modifier=".cg"),
            )
    return peak, total, acc


@triton.jit(do_not_specialize=["table_stride", "num_slots", "arrives"])  # one compiled kernel for all context lengths
def _attention_kernel(
    q: tl.tensor,
    pool: tl.tensor,
    tables: tl.tensor,
    query_starts: tl.tensor,
    context_lengths: tl.tensor,
    tiles: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    accs: tl.tensor,
    peaks: tl.tensor,
    merges: tl.tensor,
    arrivals: tl.tensor,  # None: the last program of a tile never merges its parts
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    # parts that can be stored per row; 1: the program of the tile merges them; 0: it has one part, and writes `out`
    num_slots: tl.tensor,
    arrives: tl.tensor,  # whether the last program of a tile merges its parts, and writes `out`
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    value_scale: tl.tensor,
    LOG2E: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    MANY: tl.constexpr,  # whether the tile has enough queries that most pieces are visible to all of them
    FIXED: tl.constexpr,
    CONVERTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    PART: tl.constexpr,
    TOGETHER: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    wait_for_inputs(EARLY)
    tile = tiles + 3 * tl.program_id(0)
    kv_head, program = tl.program_id(1), tl.program_id(2)
    request, first, list_offset = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    queries_start, context = tl.load(query_starts + request), tl.load(context_lengths + request)
    count = tl.load(query_starts + request + 1) - queries_start
    tokens = tl.minimum(QUERIES, count - first)
    position = context - count + first
    end = position + tokens

    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = token < tokens
    inside = real[:, None] & (column < HEAD_DIM)[None, :]
    line = (queries_start + first + token).to(tl.int64) * (KV_HEADS * GROUP) + head
    q_rows = tl.load(q + line[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0.0)
    if pool.dtype.element_ty != tl.bfloat16:
        q_rows = tl.clamp(q_rows.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    keys = pool + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values = keys + KV_HEADS * BLOCK_SIZE * HEAD_DIM
    table = tables + request.to(tl.int64) * table_stride

    seen_from = tl.maximum(position - window + 1, 0) if WINDOWED else 0
    start = seen_from // PIECE * PIECE
    origin, length, parts = context_parts(start, end, PART, FIXED, PIECE)
    if FIXED:
        slot_row = (list_offset + token).to(tl.int64) * (KV_HEADS * GROUP) + head
        for part in range(program, parts, tl.num_programs(2)):
            peak, total, acc = attend_part(
                q_rows, position, token, keys, values, table, block_stride, start, end, origin, length, part, seen_from,
                window, scale, cap, CAPPED, WINDOWED, MANY, CONVERTS, HEAD_DIM, BLOCK_SIZE, ROWS, PIECE, COLUMNS,
            )  # fmt: skip
            slot = slot_row * num_slots + tl.minimum(part, num_slots - 1)
            acc_at = accs + slot[:, None] * HEAD_DIM + column[None, :]
            earlier = (part > program) & (num_slots == 1)  # then merge with the part that this program stored
            tl.debug_barrier()
            peak, total, acc = merge_parts(
                tl.load(peaks + 2 * slot, mask=real & earlier, other=float("-inf")),
                tl.load(peaks + 2 * slot + 1, mask=real & earlier, other=0.0),
                tl.load(acc_at, mask=inside & earlier, other=0.0),
                peak, total, acc,
            )  # fmt: skip
            tl.store(peaks + 2 * slot, peak, mask=real)
            tl.store(peaks + 2 * slot + 1, total, mask=real)
            tl.store(acc_at, acc, mask=inside)
    else:
        peak, total, acc = attend_part(
            q_rows, position, token, keys, values, table, block_stride, start, end, origin, length, program, seen_from,
            window, scale, cap, CAPPED, WINDOWED, MANY, CONVERTS, HEAD_DIM, BLOCK_SIZE, ROWS, PIECE, COLUMNS,
        )  # fmt: skip
        slot_row = (list_offset + token).to(tl.int64) * (KV_HEADS * GROUP) + head
        if num_slots == 0:
            _store_output(
                out, line, column, inside, real, head, sinks, peak, total, acc, value_scale, LOG2E, SINKS, HEAD_DIM
            )
        elif program < parts:
            slot = slot_row * num_slots + program
            acc_at = accs + slot[:, None] * HEAD_DIM + column[None, :]
            tl.store(peaks + 2 * slot, peak, mask=real)
            tl.store(peaks + 2 * slot + 1, total, mask=real)
            tl.store(acc_at, acc, mask=inside)
    if (program == 0) & (num_slots > 0) & (arrives == 0):
        tl.store(merges + 2 * slot_row, line, mask=real)
        tl.store(merges + 2 * slot_row + 1, tl.minimum(parts, num_slots), mask=real)
    if arrivals is not None and arrives:
        arrived_at = arrivals + tl.program_id(0) * KV_HEADS + kv_head
        tl.debug_barrier()  # all threads have stored their part
        if tl.atomic_add(arrived_at, 1, sem="acq_rel", scope="gpu") == tl.num_programs(2) - 1:
            tl.store(arrived_at, 0)  # for the next launch
            peak, total, acc = _merged(
                accs,
                peaks,
                slot_row * num_slots,
                tl.where(real, parts, 0),
                parts,
                column,
                ROWS,
                COLUMNS,
                HEAD_DIM,
                TOGETHER,
            )
            _store_output(
                out, line, column, inside, real, head, sinks, peak, total, acc, value_scale, LOG2E, SINKS, HEAD_DIM
            )


@triton.jit(do_not_specialize=["rows", "num_slots"])
def _merge_kernel(
    accs: tl.tensor,
    peaks: tl.tensor,
    merges: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    num_slots: tl.tensor,
    value_scale: tl.tensor,
    LOG2E: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    wait_for_inputs(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    column = tl.arange(0, COLUMNS)
    line = tl.load(merges + 2 * row, mask=real, other=0).to(tl.int64)
    parts = tl.load(merges + 2 * row + 1, mask=real, other=0)
    first_slot = row.to(tl.int64) * num_slots
    peak, total, acc = _merged(
        accs, peaks, first_slot, parts, tl.max(parts, 0), column, ROWS, COLUMNS, HEAD_DIM, TOGETHER
    )
    inside = real[:, None] & (column < HEAD_DIM)[None, :]
    _store_output(
        out, line, column, inside, real, row % HEADS, sinks, peak, total, acc, value_scale, LOG2E, SINKS, HEAD_DIM
    )


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
    arrivals: Tensor | None = None,
    card: Card,
    deterministic: bool,
) -> Tensor:
    """Compute causal attention of all tokens of a step over keys and values in the pool.

    - q: bfloat16 [tokens, heads, head_dim]
    - pool: one layer, [blocks, 2, kv_heads, BLOCK_SIZE, head_dim], bfloat16, float16, or uint8 for e4m3; there may be
      gaps between blocks
    - tables: int32 [requests, blocks]
    - query_starts: int32 [requests + 1]
    - context_lengths: int32 [requests]
    - sinks: float32 [heads]
    - arrivals: see `arrival_counts`; None: small tiles do not merge their parts themselves
    - tiles: those of the same step, made with the sizes of `tile_queries` for these heads, this card, and the same
      `deterministic`

    Returns bfloat16 [tokens, heads * head_dim].
    """
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=torch.bfloat16, device=q.device)
    for it in tiles.lists:
        _attend(q, pool, tables, query_starts, context_lengths, it, rule, sinks, arrivals, out, card, deterministic)
    return out


def arrival_counts(card: Card, device: torch.device) -> Tensor:
    """Return counters for `paged_attention`, int32. They are zero before and after each call.

    Calls that may overlap need different ones.
    """
    return torch.zeros(PROGRAMS * card.multiprocessors, dtype=torch.int32, device=device)


def _attend(
    q: Tensor,
    pool: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    tiles: TileList,
    rule: ScoreRule,
    sinks: Tensor | None,
    arrivals: Tensor | None,
    out: Tensor,
    card: Card,
    deterministic: bool,
) -> None:
    """Compute attention for the tokens of one tile list."""
    (_, heads, head_dim), kv_heads = q.shape, pool.shape[2]
    rows = max(DECODE_ROWS, triton.next_power_of_2(tiles.queries * (heads // kv_heads)))
    columns = triton.next_power_of_2(head_dim)
    tuned = tuning(rows, columns, card, deterministic=deterministic)
    programs, num_slots = _division(tiles, heads, kv_heads, head_dim, rule.window, tuned, card, deterministic)
    direct = programs == 1 and not deterministic
    if rows > DECODE_ROWS or deterministic:
        arrivals = None
    arrives = arrivals is not None and not direct and programs <= MOST_ARRIVALS
    lines = 1 if direct else tiles.tokens * heads
    accs = torch.empty(lines, num_slots, head_dim, dtype=torch.float32, device=q.device)
    peaks = torch.empty(lines, num_slots, 2, dtype=torch.float32, device=q.device)
    merges = torch.empty(lines, 2, dtype=torch.int32, device=q.device)
    early = launch_options(card.starts_early)
    converts = card.multiplies_float8
    float8 = E4M3_SCALE if pool.dtype == torch.uint8 and not converts else 1.0
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
        accs,
        peaks,
        merges,
        arrivals,
        pool.stride(0),
        tables.stride(0),
        0 if direct else num_slots,
        int(arrives),
        rule.window or 0,
        2 * scale / rule.softcap if rule.softcap else scale,
        rule.softcap * LOG2E,
        float8,
        LOG2E=LOG2E,
        CAPPED=rule.softcap != 0,
        WINDOWED=rule.window is not None,
        SINKS=sinks is not None,
        MANY=rows > DECODE_ROWS,
        FIXED=deterministic,
        CONVERTS=converts,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=BLOCK_SIZE,
        QUERIES=tiles.queries,
        ROWS=rows,
        COLUMNS=columns,
        PIECE=tuned.piece,
        PART=tuned.part,
        TOGETHER=tuned.arrived_parts,
        num_warps=tuned.warps,
        num_stages=tuned.stages,
        **early,
    )
    if not direct and not arrives:
        _merge_kernel[(triton.cdiv(lines, tuned.merged_rows),)](
            accs,
            peaks,
            merges,
            q if sinks is None else sinks,
            out,
            lines,
            num_slots,
            float8,
            LOG2E=LOG2E,
            SINKS=sinks is not None,
            HEADS=heads,
            HEAD_DIM=head_dim,
            COLUMNS=columns,
            ROWS=tuned.merged_rows,
            TOGETHER=tuned.merged_parts,
            num_warps=4,
            **early,
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
    """Return the number of programs per tile and KV head, and the number of parts that can be stored per row.

    Both depend only on sizes that the host knows, so they are also valid for a captured step.
    """
    span = tiles.max_context
    if window is not None:
        span = min(span, window + tiles.queries + tuned.piece)
    # one more, because a window may start within a part
    most = triton.cdiv(span, tuned.part) + (deterministic and window is not None)
    programs = max(1, min(most, PROGRAMS * card.multiprocessors // (len(tiles.tiles) * kv_heads)))
    if not deterministic:
        return programs, programs
    fits = 4 * tiles.tokens * heads * head_dim * most <= PARTS_BYTES
    return (programs, most) if programs > 1 and fits else (1, 1)
