"""A step as a program: one instruction for each operation of a model, over buffers at fixed addresses.

It is the CPU's counterpart of a CUDA graph. A program is recorded once and serves every batch: what differs from step
to step (tokens, positions, block tables, which rows become logits) stands in the step header, which instructions read.
Every address an instruction holds is checked here, against the regions it may touch with the largest batch there can
be; nothing is checked when it runs. Refuses to know how an operation computes (`interpreter`) and which ones a model
needs (`operations`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.backends.cpu.attention import PIECE, QUERIES, SCORE_ROW
from engine.backends.cpu.kv_store import KVType, head_bytes
from engine.backends.cpu.records import record_bytes
from engine.config import BLOCK_SIZE
from quant.cpu.activations import Form, row_bytes
from quant.cpu.arena import Arena
from quant.cpu.ggml_formats import GROUP, PAIR

TOKENS = 128  # rows of activations that meet a pair of tiles before the next pair comes
SEGMENT = 4096  # logits of one unit of the search for the largest


class Op(IntEnum):
    """What an instruction does. Its units of work are claimed by threads, one range after another."""

    EMBED = 0  # a row of a table for each token, times a number
    NORM = 1  # root mean square normalization, written in the form its reader wants
    LAYER_NORM = 2  # layer normalization, in the same way
    WRITE = 3  # float rows, written in another form
    MATMUL = 4  # one weight times all rows
    GATED = 5  # gate and up projection, their product in the form of the next reader
    GATE = 6  # their product of rows that hold both side by side
    ROPE_STORE = 7  # normalize and turn q and k, store k and v
    ATTEND = 8  # attention: whole for tiles of several tokens, piece by piece for single ones
    MERGE = 9  # pieces of single tokens become rows
    ARGMAX = 10  # cap logits, and find the largest of each segment of a row
    PICK = 11  # the largest of all segments


_WORDS = (
    "op",
    "barrier",  # 1: nobody goes on before all have finished it
    "local",  # 1: in a step of one token every thread computes it for itself, into its own copy
    "selected",  # 1: a row for each wanted logit, not for each token
    "gather",  # 1: row m of the result comes from the token that output row m stands for
    "x",
    "x_stride",  # bytes
    "x_copy",  # bytes between the threads' own copies, 0 where all share one
    "out",
    "out_stride",
    "out_copy",
    "form",  # Form of the rows that a product reads, or that anything else writes
    "out_form",  # Form that a gated product writes
    "kernel",  # address of what reads or writes a row
    "one",  # addresses of the kernels that multiply one token, two, four and six
    "two",
    "four",
    "six",
    "weight",
    "tile_bytes",
    "groups",  # of 32 columns, in a row of x
    "rows",  # of the weight
    "add",  # 1: onto what is there
    "bias",  # address of what is added to each row of a product or of a layer norm, float32; 0: nothing
    "up_one",
    "up_two",
    "up_four",
    "up_six",
    "up",
    "up_tile_bytes",
    "order",  # address of int32: the column of x that each column is taken from; 0: they are in order
    "vector",  # address of a norm's weight, float32
    "epsilon",  # bits of a float32
    "group",  # KV group of the layer
    "cache",  # address of this layer in block 0
    "block_bytes",
    "kv_type",  # KVType of the cache
    "head_bytes",  # of one KV head of one block
    "kv_heads",
    "heads",  # query heads that share a KV head
    "head_dim",
    "scale",  # of scores or of an embedding, bits of a float32
    "softcap",  # of scores or logits, bits of a float32; 0: none
    "window",  # positions that a token sees, its own included
    "q_norm",  # addresses of the weights that heads are normalized with, float32; 0: they are not
    "k_norm",
    "norm_stride",  # bytes from the weights of a head to those of the next; 0: all heads have the same
    "centered",  # 1: the mean of a head is subtracted first
    "rotary",  # elements of a head that turn
    "neighbours",  # 1: rotary pairs are neighbours
    "cosine",
    "sine",
    "scores",  # addresses of the kernels that attend over this type of cache
    "soften",
    "gather_values",
    "parts",  # records of pieces, [request][KV head][piece][head]
    "max_pieces",
)
INSTRUCTION = np.dtype([(name, np.int64) for name in _WORDS])
Instruction = dict[str, int]  # the words of one instruction, by name

COUNTS = (
    "tokens",
    "outputs",  # rows whose logits are wanted
    "tiles",
    "local",  # 1: a step of one token and a short context
)
HEADER_WORDS = (
    *COUNTS,
    "token_ids",  # addresses of int64 arrays from here on
    "positions",
    "slots",  # [groups][tokens]
    "output_rows",
    "tile_list",  # [tiles][3]: first token, tokens, request
    "tables",  # [groups][requests][blocks]
    "slot_group",  # bytes from the slots of one KV group to those of the next
    "table_group",  # in the same way
    "table_stride",  # bytes
    "scratch",  # each thread's own memory
    "scratch_stride",
)
HEADER = np.dtype([(name, np.int64) for name in HEADER_WORDS])


class Record(Protocol):
    """An instruction or the header, as compiled code sees it: its words are attributes."""

    def __getattr__(self, word: str) -> int: ...


Records = Sequence[Record]


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest batch that a program has to serve, and what it reads besides."""

    tokens: int
    outputs: int  # rows of logits
    requests: int
    context: int  # tokens of one request, and rows of the rotary table
    num_blocks: tuple[int, ...]  # of each KV group
    threads: int

    @property
    def pieces(self) -> int:
        return -(-self.context // PIECE)

    @property
    def table_blocks(self) -> int:
        """Block ids of one request, whole pieces: scores are computed for SPAN blocks at a time."""
        return self.pieces * PIECE // BLOCK_SIZE


def float_bits(value: float) -> int:
    """A float32 as an int64 word."""
    return int(np.float32(value).view(np.uint32))


ONE_BITS = float_bits(1.0)


class Program:
    """The instructions so far. `finish` proves them sound and gives the array that the interpreter runs."""

    def __init__(self, arena: Arena, limits: Limits) -> None:
        self.arena = arena
        self.limits = limits
        self._rows: list[Instruction] = []

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, op: Op, **words: int) -> None:
        """One more instruction. Words that are not given are 0, except for `barrier`."""
        if unknown := words.keys() - set(_WORDS):
            raise KeyError(f"an instruction has no words {sorted(unknown)}")
        self._rows.append({**dict.fromkeys(_WORDS, 0), "op": int(op), "barrier": 1, **words})

    def scratch_bytes(self) -> int:
        """What one thread needs of its own for any instruction."""
        return max((_scratch(row) for row in self._rows), default=0)

    def finish(self) -> NDArray[np.void]:
        """All instructions. Raises IndexError for one that could touch memory outside of a region of the arena."""
        ranges = self.arena.address_ranges()
        for number, row in enumerate(self._rows):
            op = Op(row["op"])
            if not 0 <= row["group"] < len(self.limits.num_blocks):
                raise IndexError(f"instruction {number} ({op.name}): group {row['group']} does not exist")
            for name, address, size in _TOUCHED[op](row, self.limits):
                if not ranges.contains(address, size):
                    raise IndexError(f"instruction {number} ({op.name}): {name} and {size} bytes are not in one region")
        return np.array([tuple(row[name] for name in _WORDS) for row in self._rows], INSTRUCTION)


# -- what an instruction touches: (word, address, bytes) for the largest batch

Touched = Iterator[tuple[str, int, int]]


def _rows_of(row: Instruction, limits: Limits) -> int:
    return limits.outputs if row["selected"] else limits.tokens


def _read_rows(row: Instruction, limits: Limits, width: int) -> Touched:
    """Rows of x in the form of the instruction, and each thread's own copy of one."""
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
    yield "head_bytes", row["cache"], row["head_bytes"] - head  # heads do not overlap


def _rope_store(row: Instruction, limits: Limits) -> Touched:
    yield from _qkv(row, limits)
    yield "rotary", row["x"], row["head_dim"] - row["rotary"]  # no more than there are
    for name in ("cosine", "sine") if row["rotary"] else ():
        yield name, row[name], 2 * row["rotary"] * limits.context
    if row["q_norm"] or row["k_norm"]:
        for name, heads in (("q_norm", row["kv_heads"] * row["heads"]), ("k_norm", row["kv_heads"])):
            yield name, row[name], (heads - 1) * row["norm_stride"] + 4 * row["head_dim"]
        yield "norm_stride", row["q_norm"], row["norm_stride"]  # not less than 0


def _parts(row: Instruction, limits: Limits) -> Touched:
    records = limits.requests * row["kv_heads"] * row["max_pieces"] * row["heads"]
    yield "parts", row["parts"], records * record_bytes(row["head_dim"])
    yield "window", row["parts"], min(row["window"], 1) - 1  # or there would be less than one piece


def _attend(row: Instruction, limits: Limits) -> Touched:
    yield from _qkv(row, limits)
    yield from _parts(row, limits)
    yield from _written_rows(row, limits, 4 * row["head_dim"] * row["kv_heads"] * row["heads"])


def _merge(row: Instruction, limits: Limits) -> Touched:
    yield from _parts(row, limits)
    yield from _rewrite(row, limits)


def _argmax(row: Instruction, limits: Limits) -> Touched:
    yield "x", row["x"], (limits.outputs - 1) * row["x_stride"] + 4 * row["rows"]
    yield "out", row["out"], 8 * limits.outputs * -(-row["rows"] // SEGMENT)


def _pick(row: Instruction, limits: Limits) -> Touched:
    yield "x", row["x"], 8 * limits.outputs * -(-row["rows"] // SEGMENT)
    yield "out", row["out"], 8 * limits.outputs


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
    Op.ARGMAX: _argmax,
    Op.PICK: _pick,
}


def _scratch(row: Instruction) -> int:
    """Bytes of its own that a thread needs for an instruction."""
    op, record = Op(row["op"]), record_bytes(row["head_dim"])
    if op is Op.LAYER_NORM or (op is Op.WRITE and row["order"]):
        return 4 * GROUP * row["groups"]
    if op is Op.GATED:
        return 2 * 4 * PAIR * TOKENS
    if op is Op.ATTEND:
        return QUERIES * (SCORE_ROW + (row["heads"] + 1) * record)
    if op is Op.MERGE:
        return record + 4 * row["head_dim"] * row["kv_heads"] * row["heads"]
    return 0
