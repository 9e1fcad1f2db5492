"""The memory that instructions access in the largest batch, and the scratch memory that they need.

Each function yields (word, address, bytes) for the accesses of one type of instruction. A number of bytes below zero
marks an instruction whose words do not fit together.
"""

import ctypes
from collections.abc import Callable, Iterator

from engine.backends.cpu.attention import QUERIES, SCORE_ROW
from engine.backends.cpu.convolution import STRIP_BYTES
from engine.backends.cpu.expert_units import scores_bytes
from engine.backends.cpu.instructions import BLOCK_WORDS, SEGMENT, TOKENS, Instruction, Limits, Op, most_blocks
from engine.backends.cpu.kv_store import KVType, head_bytes
from engine.backends.cpu.partials import partial_bytes
from quant.cpu.activations import Form, row_bytes
from quant.cpu.ggml_formats import GROUP, PAIR

Touched = Iterator[tuple[str, int, int]]


def _rows_of(row: Instruction, limits: Limits) -> int:
    return (limits.outputs if row["selected"] else limits.tokens) * max(row["each"], 1)


def _read_rows(row: Instruction, limits: Limits, width: int) -> Touched:
    """Yield the accesses to rows of x in the form of the instruction, and to the threads' own copies."""
    size = row_bytes(Form(row["form"]), width)
    yield "x", row["x"], (_rows_of(row, limits) - 1) * row["x_stride"] + size
    yield "x_copy", row["x"], (limits.threads - 1) * row["x_copy"] + size


def _written_rows(row: Instruction, limits: Limits, size: int) -> Touched:
    yield "out", row["out"], (_rows_of(row, limits) - 1) * row["out_stride"] + size
    yield "out_copy", row["out"], (limits.threads - 1) * row["out_copy"] + size


def _tiles(row: Instruction, address: str, tile_bytes: str) -> Touched:
    yield address, row[address], 2 * -(-row["rows"] // PAIR) * row[tile_bytes]


def _embed(row: Instruction, limits: Limits) -> Touched:
    yield from _tiles(row, "weight", "tile_bytes")
    yield from _written_rows(row, limits, 4 * GROUP * row["groups"])


def _rewrite(row: Instruction, limits: Limits) -> Touched:
    width = GROUP * row["groups"]
    count = limits.tokens if row["gather"] else _rows_of(row, limits)
    yield "x", row["x"], (count - 1) * row["x_stride"] + 4 * width
    yield from _written_rows(row, limits, row_bytes(Form(row["form"]), width))


def _write(row: Instruction, limits: Limits) -> Touched:
    yield from _rewrite(row, limits)
    if row["order"]:
        yield "order", row["order"], 4 * GROUP * row["groups"]


def _norm(row: Instruction, limits: Limits) -> Touched:
    yield from _rewrite(row, limits)
    yield "vector", row["vector"], 4 * GROUP * row["groups"]


def _layer_norm(row: Instruction, limits: Limits) -> Touched:
    yield from _norm(row, limits)
    if row["bias"]:
        yield "bias", row["bias"], 4 * GROUP * row["groups"]


def _matmul(row: Instruction, limits: Limits) -> Touched:
    yield from _tiles(row, "weight", "tile_bytes")
    yield from _read_rows(row, limits, GROUP * row["groups"])
    yield from _written_rows(row, limits, 4 * row["rows"])
    if row["bias"]:
        yield "bias", row["bias"], 4 * row["rows"]


def _gated(row: Instruction, limits: Limits) -> Touched:
    yield from _tiles(row, "weight", "tile_bytes")
    yield from _tiles(row, "up", "up_tile_bytes")
    yield from _read_rows(row, limits, GROUP * row["groups"])
    yield from _written_rows(row, limits, row_bytes(Form(row["out_form"]), row["rows"]))


def _gate(row: Instruction, limits: Limits) -> Touched:
    width = GROUP * row["groups"]
    for name in ("x", "up"):
        yield name, row[name], (_rows_of(row, limits) - 1) * row[f"{name}_stride"] + 4 * width
    yield from _written_rows(row, limits, row_bytes(Form(row["form"]), width))


def _qkv(row: Instruction, limits: Limits) -> Touched:
    width = 4 * row["head_dim"] * row["kv_heads"] * (row["heads"] + (0 if row["queries_only"] else 2))
    yield "x", row["x"], (_rows_of(row, limits) - 1) * row["x_stride"] + width
    head = head_bytes(KVType(row["kv_type"]), row["head_dim"])
    block = (row["kv_heads"] - 1) * row["head_bytes"] + head
    yield "cache", row["cache"], (limits.num_blocks[row["group"]] - 1) * row["block_bytes"] + block
    yield "head_bytes", row["cache"], row["head_bytes"] - head  # the heads of a block must not overlap


def _rope_store(row: Instruction, limits: Limits) -> Touched:
    yield from _qkv(row, limits)
    pairs = row["rotary_dim"] // 2
    last = 2 * pairs if row["interleaved"] else row["distance"] + pairs
    yield "rotary_dim", row["x"], row["head_dim"] - last  # must be at most head_dim
    yield "distance", row["x"], 0 if row["interleaved"] else row["distance"] - pairs  # pairs must not overlap
    for name in ("cosine", "sine") if row["rotary_dim"] else ():
        yield name, row[name], 2 * row["rotary_dim"] * limits.context
    if row["q_norm"] or row["k_norm"]:
        for name, heads in (("q_norm", row["kv_heads"] * row["heads"]), ("k_norm", row["kv_heads"])):
            yield name, row[name], (heads - 1) * row["norm_stride"] + 4 * row["head_dim"]
        if row["v_norm"]:
            yield "v_norm", row["v_norm"], 4 * row["head_dim"]
        yield "norm_stride", row["q_norm"], row["norm_stride"]  # must not be negative


def _partials(row: Instruction, limits: Limits) -> Touched:
    count = limits.slots * row["kv_heads"] * row["max_pieces"] * row["heads"]
    yield "partials", row["partials"], count * partial_bytes(row["head_dim"])
    yield "max_pieces", row["partials"], row["max_pieces"] - limits.pieces  # must be at least those of a context
    if row["sinks"]:
        yield "sinks", row["sinks"], 4 * row["kv_heads"] * row["heads"]
    # the window must be at least 1, so that there is at least one piece
    yield "window", row["partials"], min(row["window"], 1) - 1


def _attend(row: Instruction, limits: Limits) -> Touched:
    yield from _qkv(row, limits)
    yield from _partials(row, limits)
    yield from _written_rows(row, limits, 4 * row["head_dim"] * row["kv_heads"] * row["heads"])


def _merge(row: Instruction, limits: Limits) -> Touched:
    yield from _partials(row, limits)
    yield from _rewrite(row, limits)


def _argmax_segments(row: Instruction, limits: Limits) -> Touched:
    yield "x", row["x"], (limits.outputs - 1) * row["x_stride"] + 4 * row["rows"]
    yield "out", row["out"], 8 * limits.outputs * -(-row["rows"] // SEGMENT)


def _argmax_rows(row: Instruction, limits: Limits) -> Touched:
    yield "x", row["x"], 8 * limits.outputs * -(-row["rows"] // SEGMENT)
    yield "out", row["out"], 8 * limits.outputs


def _convolve(row: Instruction, limits: Limits) -> Touched:
    size = 4 * GROUP * row["groups"]
    yield "x", row["x"], (limits.tokens - 1) * row["x_stride"] + (size if row["plain"] else 3 * size)
    yield "taps", row["x"], min(row["taps"], 2) - 2  # must be at least 2
    yield "out", row["out"], (limits.tokens - 1) * row["out_stride"] + size
    yield "vector", row["vector"], row["taps"] * size
    blocks = limits.num_blocks[row["group"]] - 1
    yield "cache", row["cache"], blocks * row["block_bytes"] + (row["taps"] - 1) * size


def _scale(row: Instruction, limits: Limits) -> Touched:
    size, rows = 4 * GROUP * row["groups"], _rows_of(row, limits) - 1
    yield "x", row["x"], rows * row["x_stride"] + size
    yield "gate", row["gate"], rows * row["gate_stride"] + size
    yield "out", row["out"], rows * row["out_stride"] + size


def _delta_rates(row: Instruction, limits: Limits) -> Touched:
    size = 4 * row["value_heads"]
    yield "x", row["x"], (limits.tokens - 1) * row["x_stride"] + 2 * size
    yield "out", row["out"], (limits.tokens - 1) * row["out_stride"] + 2 * size
    yield "rate", row["rate"], size
    yield "bias", row["bias"], size


def _delta(row: Instruction, limits: Limits) -> Touched:
    heads, key_heads, keys, values = (row[name] for name in ("value_heads", "key_heads", "key_dim", "value_dim"))
    width, last = 4 * heads * values, limits.tokens - 1
    yield "x", row["x"], last * row["x_stride"] + 4 * 2 * key_heads * keys + width
    yield "key_heads", row["x"], -(heads % key_heads)  # each key head must have as many value heads
    yield "out", row["out"], last * row["out_stride"] + width
    yield "gate", row["gate"], last * row["gate_stride"] + width
    yield "rates", row["rates"], last * row["rates_stride"] + 4 * 2 * heads
    yield "vector", row["vector"], 4 * values
    for name in ("q_norm", "k_norm"):
        yield name, row[name], 4 * keys
    blocks = limits.num_blocks[row["group"]] - 1
    yield "cache", row["cache"], blocks * row["block_bytes"] + keys * width


# -- experts


def _route(row: Instruction, limits: Limits) -> Touched:
    tokens, experts, choices = _rows_of(row, limits), row["experts"], row["choices"]
    yield "x", row["x"], (tokens - 1) * row["x_stride"] + 4 * (experts + row["gates_shared"])
    yield "settings", row["settings"], 8
    yield "choices", row["settings"], min(choices - 1, experts - choices)  # must be from 1 to experts
    yield "expert_groups", row["settings"], -(experts % row["expert_groups"])  # groups must be of equal size
    yield "ids", row["ids"], 8 * tokens * choices
    yield "weights", row["weights"], 4 * tokens * (choices + 1)
    if row["choice_bias"]:
        yield "choice_bias", row["choice_bias"], 4 * experts
    if row["expert_scale"]:
        yield "expert_scale", row["expert_scale"], 4 * experts


def _choices(row: Instruction, limits: Limits) -> int:
    return _rows_of(row, limits) * row["choices"]


def _sort_routes(row: Instruction, limits: Limits) -> Touched:
    rows = _choices(row, limits)
    for name in ("ids", "row_of", "token_of"):
        yield name, row[name], 8 * rows
    yield from _blocks(row, rows)


def _blocks(row: Instruction, rows: int) -> Touched:
    yield "blocks", row["blocks"], 8 * (1 + BLOCK_WORDS * most_blocks(rows, row["experts"]))


def _gather_rows(row: Instruction, limits: Limits) -> Touched:
    rows = _rows_of(row, limits)
    yield "token_of", row["token_of"], 8 * rows
    yield "x", row["x"], (rows // row["each"] - 1) * row["x_stride"] + 4 * row["words"]
    yield "out", row["out"], (rows - 1) * row["out_stride"] + 4 * row["words"]


def _order_rows(row: Instruction, limits: Limits) -> Touched:
    rows, size = _rows_of(row, limits), 4 * GROUP * row["groups"]
    yield from _blocks(row, rows)
    yield "orders", row["orders"], 8 * row["experts"]
    for address in (ctypes.c_int64 * row["experts"]).from_address(row["orders"]):  # the table was checked just before
        yield "orders", address, size
    if row["token_of"]:
        yield "token_of", row["token_of"], 8 * rows
    yield "x", row["x"], ((rows // row["each"] if row["token_of"] else rows) - 1) * row["x_stride"] + size
    yield "x_copy", row["x"], (limits.threads - 1) * row["x_copy"] + size
    yield "out", row["out"], (rows - 1) * row["out_stride"] + size


def _expert_tiles(row: Instruction, table: str, tile_bytes: str) -> Touched:
    yield table, row[table], 8 * row["experts"]
    for address in (ctypes.c_int64 * row["experts"]).from_address(row[table]):  # the table was checked just before
        yield table, address, 2 * -(-row["rows"] // PAIR) * row[tile_bytes]


def _expert_gated(row: Instruction, limits: Limits) -> Touched:
    yield from _expert_tiles(row, "weight", "tile_bytes")
    yield from _expert_tiles(row, "up", "up_tile_bytes")
    yield from _blocks(row, _rows_of(row, limits))
    width = GROUP * row["groups"]
    size = row_bytes(Form(row["form"]), width)
    yield "x", row["x"], (_rows_of(row, limits) - 1) * row["x_stride"] + size
    if row["single"]:
        yield "single", row["single"], (limits.threads - 1) * row["x_copy"] + size
    yield "rows", row["x"], -(row["rows"] % PAIR)  # must be a multiple of PAIR
    yield from _expert_biases(row, 2 * row["rows"])
    yield from _written_rows(row, limits, row_bytes(Form(row["out_form"]), row["rows"]))


def _expert_biases(row: Instruction, width: int) -> Touched:
    if row["bias"]:
        yield "bias", row["bias"], 4 * row["experts"] * width


def _expert_matmul(row: Instruction, limits: Limits) -> Touched:
    yield from _expert_tiles(row, "weight", "tile_bytes")
    yield from _blocks(row, _rows_of(row, limits))
    yield from _read_rows(row, limits, GROUP * row["groups"])
    yield from _expert_biases(row, row["rows"])
    yield from _written_rows(row, limits, 4 * row["rows"])


def _combine(row: Instruction, limits: Limits) -> Touched:
    tokens, rows, size = _rows_of(row, limits), _choices(row, limits), 4 * GROUP * row["groups"]
    yield "weights", row["weights"], 4 * tokens * (row["choices"] + 1)
    yield "row_of", row["row_of"], 8 * rows
    yield "x", row["x"], (rows - 1) * row["x_stride"] + size
    if row["shared"]:
        yield "shared", row["shared"], (tokens - 1) * row["shared_stride"] + size
    yield from _written_rows(row, limits, size)


TOUCHED: dict[Op, Callable[[Instruction, Limits], Touched]] = {
    Op.EMBED: _embed,
    Op.NORM: _norm,
    Op.LAYER_NORM: _layer_norm,
    Op.WRITE: _write,
    Op.MATMUL: _matmul,
    Op.GATED: _gated,
    Op.GATE: _gate,
    Op.ROPE_STORE: _rope_store,
    Op.ATTEND: _attend,
    Op.MERGE: _merge,
    Op.ARGMAX_SEGMENTS: _argmax_segments,
    Op.ARGMAX_ROWS: _argmax_rows,
    Op.ROUTE: _route,
    Op.SORT_ROUTES: _sort_routes,
    Op.GATHER_ROWS: _gather_rows,
    Op.EXPERT_GATED: _expert_gated,
    Op.EXPERT_MATMUL: _expert_matmul,
    Op.COMBINE: _combine,
    Op.ORDER_ROWS: _order_rows,
    Op.CONVOLVE: _convolve,
    Op.SCALE: _scale,
    Op.DELTA_RATES: _delta_rates,
    Op.DELTA: _delta,
}


def scratch_bytes(row: Instruction) -> int:
    """Return the scratch memory in bytes that a thread needs for an instruction."""
    op, partial = Op(row["op"]), partial_bytes(row["head_dim"])
    if op is Op.LAYER_NORM or (op is Op.WRITE and row["order"]):
        return 4 * GROUP * row["groups"]
    if op in (Op.GATED, Op.EXPERT_GATED):
        return 2 * 4 * PAIR * TOKENS
    if op is Op.CONVOLVE:
        return row["taps"] * STRIP_BYTES
    if op is Op.DELTA:
        return 2 * 4 * row["key_dim"]
    if op is Op.ROUTE:
        return 2 * scores_bytes(row["experts"]) + max(4 * row["expert_groups"], 8)
    if op is Op.SORT_ROUTES:
        return 8 * row["experts"]
    if op is Op.COMBINE:
        return 4 * GROUP * row["groups"]
    if op is Op.ATTEND:
        return QUERIES * (SCORE_ROW + (row["heads"] + 1) * partial)
    if op is Op.MERGE:
        return partial + 4 * row["head_dim"] * row["kv_heads"] * row["heads"]
    return 0
