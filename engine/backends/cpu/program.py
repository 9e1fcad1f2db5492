"""A step as a program: one instruction per operation of the model, over buffers at fixed addresses.

It is the CPU counterpart of a CUDA graph: a program is recorded once and computes every batch. The step header holds
the values that differ from step to step (tokens, positions, block tables, rows that become logits), and instructions
read it. For every instruction, this module checks that its addresses stay within their memory regions with the largest
batch; nothing is checked when it runs. `operations` records programs and `interpreter` runs them.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.backends.cpu.attention import PIECE, QUERIES, SCORE_ROW
from engine.backends.cpu.kv_store import KVType, head_bytes
from engine.backends.cpu.partials import partial_bytes
from engine.config import BLOCK_SIZE
from quant.cpu.activations import Form, row_bytes
from quant.cpu.arena import Arena
from quant.cpu.ggml_formats import GROUP, PAIR

TOKENS = 128  # rows of activations that are multiplied by a pair of tiles before the next pair is loaded
SEGMENT = 4096  # logits per unit of the argmax
# Steps of at most this many tokens divide all tiles into pieces. Longer steps have enough tiles for all threads.
DIVIDED_TOKENS = 32
TILE_WORDS = 4  # int64 words of a tile in the step header
WHOLE = -1  # the slot of a tile that is not divided
BLOCK_WORDS = 3  # int64 words of a block of rows of one expert: expert, first row, number of rows


class Op(IntEnum):
    """Instruction types. Threads claim ranges of an instruction's units of work."""

    EMBED = 0  # read one table row per token, times a scale
    NORM = 1  # RMS normalization; the result has the Form that the next instruction reads
    LAYER_NORM = 2  # layer normalization; the result is as for NORM
    WRITE = 3  # convert float rows to another form
    MATMUL = 4  # multiply all rows by one weight
    GATED = 5  # gate and up projection, then the gated product; the result is as for NORM
    GATE = 6  # gated product of rows that hold gate and up side by side
    ROPE_STORE = 7  # normalize and rotate q and k, store k and v
    ATTEND = 8  # attention of tiles (see `attention_units`)
    MERGE = 9  # combine the pieces of divided tiles, and write rows
    ARGMAX_SEGMENTS = 10  # apply the soft cap to logits, and find the largest in each segment of a row
    ARGMAX_ROWS = 11  # find the largest logit of a row among its segments
    ROUTE = 12  # choose the experts of each token, and their weights (see `expert_units`)
    SORT_ROUTES = 13  # sort the choices of all tokens by expert
    GATHER_ROWS = 14  # copy rows into the order of their experts; nothing in a step of one token
    EXPERT_GATED = 15  # as GATED, for the rows of each expert
    EXPERT_MATMUL = 16  # multiply the rows of each expert by its weight
    COMBINE = 17  # add the weighted rows of each token's experts


_WORDS = (
    "op",
    "barrier",  # 1: no thread continues before all threads have finished the instruction
    "local",  # 1: in a step of one token, every thread computes the whole instruction into its own copy
    "selected",  # 1: the instruction computes one row per output row, instead of one per token
    "gather",  # 1: row m of the result is computed from the token that output row m belongs to
    "x",
    "x_stride",  # bytes between the rows of x
    "x_copy",  # bytes between the threads' copies of row 0; 0: all threads share it
    "out",
    "out_stride",
    "out_copy",
    "form",  # Form of the rows that a product reads or another instruction writes
    "out_form",  # Form that a gated product writes
    "kernel",  # address of the kernel that reads or writes one row
    "one",  # addresses of the kernels that multiply one, two, four, or six tokens
    "two",
    "four",
    "six",
    "weight",
    "tile_bytes",
    "groups",  # number of groups of 32 columns in a row of x
    "rows",  # number of rows of the weight
    "add",  # 1: add to the existing values
    "bias",  # address of the float32 bias added to each row of a product or layer norm; 0: none
    "up_one",
    "up_two",
    "up_four",
    "up_six",
    "up",
    "up_tile_bytes",
    "order",  # address of int32 column indices: the column of x for each column; 0: identity
    "vector",  # address of a norm's weight, float32
    "epsilon",  # epsilon of a norm, bits of a float32
    "group",  # KV group of the layer, an index
    "cache",  # address of this layer in block 0
    "block_bytes",
    "kv_type",  # KVType of the cache
    "head_bytes",  # bytes of one KV head in one block
    "kv_heads",
    "heads",  # number of query heads per KV head
    "head_dim",
    "scale",  # factor of scores or of an embedding, bits of a float32
    "softcap",  # soft cap of scores or logits, bits of a float32; 0: none
    "window",  # number of positions that a token sees, including its own
    "q_norm",  # addresses of the head norms' weights, float32; 0: heads are not normalized
    "k_norm",
    "norm_stride",  # bytes between the norm weights of adjacent heads; 0: all heads share them
    "centered",  # 1: subtract the mean of a head first
    "rotary_dim",  # number of elements of a head that are rotated
    "interleaved",  # 1: rotate adjacent pairs; 0: pairs half of rotary_dim apart
    "cosine",
    "sine",
    "scores",  # addresses of the attention kernels for this cache type
    "softmax",
    "weighted_sum",
    "partials",  # address of the partial results, [slot][KV head][piece][head]
    "max_pieces",
    "words",  # number of 4-byte words of a row that is copied
    "each",  # number of rows per token or output row; 0: 1
    "experts",  # number of experts; `weight` and `up` are the addresses of their tables of weight addresses, int64
    "choices",  # number of experts chosen for a token
    "sigmoid",  # 1: scores are sigmoids of the logits; 0: their softmax
    "normalized",  # 1: divide the weights by their sum
    "expert_groups",  # number of groups of experts
    "active_groups",  # number of groups that experts are chosen from
    "settings",  # address of float32: a number added to the sum of the weights, the scale of the weights
    "gates_shared",  # 1: the last logit gives the weight of the shared MLP
    "ids",  # address of the chosen experts, int64 [tokens][choices]
    "weights",  # address of their weights and of that of the shared MLP, float32 [tokens][choices + 1]
    "place_of",  # address of the row of each choice in the order of experts, int64 [tokens][choices]
    "token_of",  # address of the token of each of these rows, int64 [tokens * choices]
    "blocks",  # address of the number of blocks, int64, and of the blocks [BLOCK_WORDS]
    "single",  # address of x in a step of one token
    "shared",  # address of the rows of the shared MLP, float32; 0: none
    "shared_stride",
)
INSTRUCTION = np.dtype([(name, np.int64) for name in _WORDS])
Instruction = dict[str, int]  # instruction words by name

COUNTS = (
    "tokens",
    "outputs",  # number of output rows: rows whose logits are needed
    "tiles",
    "local",  # 1: a step of one token with a short context
)
HEADER_WORDS = (
    *COUNTS,
    "token_ids",  # the words from here to `tables` are addresses of int64 arrays
    "positions",
    "slots",  # [groups][tokens]
    "output_rows",
    "tile_list",  # [tiles][TILE_WORDS]: first token, number of tokens, request, first slot or WHOLE
    "tables",  # [groups][requests][blocks]
    "slot_group",  # bytes between the slots of two KV groups
    "table_group",  # bytes between the tables of two KV groups
    "table_stride",  # bytes between the tables of two requests
    "scratch",  # address of the threads' scratch memory
    "scratch_stride",
)
HEADER = np.dtype([(name, np.int64) for name in HEADER_WORDS])


class Record(Protocol):
    """An instruction or the step header in compiled code, with its words as attributes."""

    def __getattr__(self, word: str) -> int: ...


Records = Sequence[Record]


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest batch that a program computes, and the sizes of the tables and pools that it reads."""

    tokens: int
    outputs: int  # rows of logits per step
    requests: int
    context: int  # maximum tokens per request, and number of rows of the rotary table
    num_blocks: tuple[int, ...]  # number of blocks in the pool of each KV group
    threads: int

    @property
    def pieces(self) -> int:
        return -(-self.context // PIECE)

    @property
    def slots(self) -> int:
        """Return the number of tokens with partial results: those of a short step, or one for each request."""
        return max(self.requests, DIVIDED_TOKENS)

    @property
    def table_blocks(self) -> int:
        """Return the length of a request's block table, rounded up to whole pieces.

        Scores are computed for several blocks at a time.
        """
        return self.pieces * PIECE // BLOCK_SIZE


def float_bits(value: float) -> int:
    """Return the bits of a float32 as an int64 word."""
    return int(np.float32(value).view(np.uint32))


ONE_BITS = float_bits(1.0)


class Program:
    """The instructions recorded so far. `finish` checks them and returns the array that the interpreter runs."""

    def __init__(self, arena: Arena, limits: Limits) -> None:
        self.arena = arena
        self.limits = limits
        self._rows: list[Instruction] = []

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, op: Op, **words: int) -> None:
        """Append an instruction. Words that are not given are 0, except for `barrier`, which is 1."""
        if unknown := words.keys() - set(_WORDS):
            raise KeyError(f"unknown instruction words: {sorted(unknown)}")
        self._rows.append({**dict.fromkeys(_WORDS, 0), "op": int(op), "barrier": 1, **words})

    def scratch_bytes(self) -> int:
        """Return the scratch memory in bytes that one thread needs for the instructions recorded so far."""
        return max((_scratch(row) for row in self._rows), default=0)

    def finish(self) -> NDArray[np.void]:
        """Return all instructions. Raises IndexError if one could access memory outside of its regions of the arena."""
        ranges = self.arena.address_ranges()
        for number, row in enumerate(self._rows):
            op = Op(row["op"])
            if not 0 <= row["group"] < len(self.limits.num_blocks):
                raise IndexError(f"instruction {number} ({op.name}): group {row['group']} does not exist")
            for name, address, size in _TOUCHED[op](row, self.limits):
                if not ranges.contains(address, size):
                    raise IndexError(
                        f"instruction {number} ({op.name}): {name}: {size} bytes are not in one memory region"
                    )
        return np.array([tuple(row[name] for name in _WORDS) for row in self._rows], INSTRUCTION)


# -- memory accesses of an instruction in the largest batch: (word, address, bytes)

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
    yield "x", row["x"], (_rows_of(row, limits) - 1) * row["x_stride"] + 2 * 4 * width
    yield from _written_rows(row, limits, row_bytes(Form(row["form"]), width))


def _qkv(row: Instruction, limits: Limits) -> Touched:
    width = 4 * row["head_dim"] * row["kv_heads"] * (row["heads"] + 2)
    yield "x", row["x"], (limits.tokens - 1) * row["x_stride"] + width
    head = head_bytes(KVType(row["kv_type"]), row["head_dim"])
    block = (row["kv_heads"] - 1) * row["head_bytes"] + head
    yield "cache", row["cache"], (limits.num_blocks[row["group"]] - 1) * row["block_bytes"] + block
    yield "head_bytes", row["cache"], row["head_bytes"] - head  # the heads of a block must not overlap


def _rope_store(row: Instruction, limits: Limits) -> Touched:
    yield from _qkv(row, limits)
    yield "rotary_dim", row["x"], row["head_dim"] - row["rotary_dim"]  # must be at most head_dim
    for name in ("cosine", "sine") if row["rotary_dim"] else ():
        yield name, row[name], 2 * row["rotary_dim"] * limits.context
    if row["q_norm"] or row["k_norm"]:
        for name, heads in (("q_norm", row["kv_heads"] * row["heads"]), ("k_norm", row["kv_heads"])):
            yield name, row[name], (heads - 1) * row["norm_stride"] + 4 * row["head_dim"]
        yield "norm_stride", row["q_norm"], row["norm_stride"]  # must not be negative


def _partials(row: Instruction, limits: Limits) -> Touched:
    count = limits.slots * row["kv_heads"] * row["max_pieces"] * row["heads"]
    yield "partials", row["partials"], count * partial_bytes(row["head_dim"])
    yield "max_pieces", row["partials"], row["max_pieces"] - limits.pieces  # must be at least those of a context
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


# -- experts


def _route(row: Instruction, limits: Limits) -> Touched:
    tokens, experts, choices = _rows_of(row, limits), row["experts"], row["choices"]
    yield "experts", row["x"], min(experts - choices, choices - 1, row["expert_groups"] - 1)  # must not be negative
    yield "x", row["x"], (tokens - 1) * row["x_stride"] + 4 * (experts + row["gates_shared"])
    yield "settings", row["settings"], 8
    yield "ids", row["ids"], 8 * tokens * choices
    yield "weights", row["weights"], 4 * tokens * (choices + 1)
    if row["vector"]:
        yield "vector", row["vector"], 4 * experts


def most_blocks(rows: int, experts: int) -> int:
    """Return the largest number of blocks that `rows` rows of `experts` experts are divided into."""
    return min(rows, experts) + rows // TOKENS


def _choices(row: Instruction, limits: Limits) -> int:
    return _rows_of(row, limits) * row["choices"]


def _sort_routes(row: Instruction, limits: Limits) -> Touched:
    rows = _choices(row, limits)
    for name in ("ids", "place_of", "token_of"):
        yield name, row[name], 8 * rows
    yield from _blocks(row, rows)


def _blocks(row: Instruction, rows: int) -> Touched:
    yield "blocks", row["blocks"], 8 * (1 + BLOCK_WORDS * most_blocks(rows, row["experts"]))


def _gather_rows(row: Instruction, limits: Limits) -> Touched:
    rows = _rows_of(row, limits)
    yield "token_of", row["token_of"], 8 * rows
    yield "x", row["x"], (rows // row["each"] - 1) * row["x_stride"] + 4 * row["words"]
    yield "out", row["out"], (rows - 1) * row["out_stride"] + 4 * row["words"]


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
    yield "single", row["single"], (limits.threads - 1) * row["x_copy"] + size
    yield "rows", row["x"], -(row["rows"] % PAIR)  # must be a multiple of PAIR
    yield from _written_rows(row, limits, row_bytes(Form(row["out_form"]), row["rows"]))


def _expert_matmul(row: Instruction, limits: Limits) -> Touched:
    yield from _expert_tiles(row, "weight", "tile_bytes")
    yield from _blocks(row, _rows_of(row, limits))
    yield from _read_rows(row, limits, GROUP * row["groups"])
    yield from _written_rows(row, limits, 4 * row["rows"])


def _combine(row: Instruction, limits: Limits) -> Touched:
    tokens, rows, size = _rows_of(row, limits), _choices(row, limits), 4 * GROUP * row["groups"]
    yield "weights", row["weights"], 4 * tokens * (row["choices"] + 1)
    yield "place_of", row["place_of"], 8 * rows
    yield "x", row["x"], (rows - 1) * row["x_stride"] + size
    if row["shared"]:
        yield "shared", row["shared"], (tokens - 1) * row["shared_stride"] + size
    yield from _written_rows(row, limits, size)


_TOUCHED: dict[Op, Callable[[Instruction, Limits], Touched]] = {
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
}


def _scratch(row: Instruction) -> int:
    """Return the scratch memory in bytes that a thread needs for an instruction."""
    op, partial = Op(row["op"]), partial_bytes(row["head_dim"])
    if op is Op.LAYER_NORM or (op is Op.WRITE and row["order"]):
        return 4 * GROUP * row["groups"]
    if op in (Op.GATED, Op.EXPERT_GATED):
        return 2 * 4 * PAIR * TOKENS
    if op is Op.ROUTE:
        return 2 * (4 * row["experts"] + 64) + max(4 * row["expert_groups"], 8)
    if op is Op.SORT_ROUTES:
        return 8 * row["experts"]
    if op is Op.COMBINE:
        return 4 * GROUP * row["groups"]
    if op is Op.ATTEND:
        return QUERIES * (SCORE_ROW + (row["heads"] + 1) * partial)
    if op is Op.MERGE:
        return partial + 4 * row["head_dim"] * row["kv_heads"] * row["heads"]
    return 0
