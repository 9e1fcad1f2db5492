"""The instructions of a recorded step, and the step header that they read.

The words of an instruction are int64: addresses, strides in bytes, and counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np

from engine.backends.cpu.attention import PIECE
from engine.config import BLOCK_SIZE
from quant.cpu.activations import Form
from quant.cpu.linear import Part

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
    GATE = 6  # gated product of rows of gates and rows of values
    ROPE_STORE = 7  # normalize q, k, and v, rotate q and k, store k and v
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
    ORDER_ROWS = 18  # copy float rows, each in the column order of its expert
    CONVOLVE = 19  # short convolution, and update of the states (see `convolution`)
    SCALE = 20  # x * sigmoid(gate)
    DELTA_RATES = 21  # the step sizes and decays of a delta rule
    DELTA = 22  # gated delta rule, and update of the states (see `delta_rule`)


WORDS = (
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
    # address of the float32 bias added to each row of a product or layer norm, or of the biases of all experts; 0: none
    "bias",
    "up_one",
    "up_two",
    "up_four",
    "up_six",
    "up",
    "up_tile_bytes",
    "up_stride",  # bytes between the rows of values of GATE
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
    "scale",  # factor of scores, of an embedding, or of the result of a norm, bits of a float32
    "softcap",  # soft cap of scores or logits, bits of a float32; 0: none
    "window",  # number of positions that a token sees, including its own
    "q_norm",  # addresses of the head norms' weights, float32; 0: heads are not normalized
    "k_norm",
    "v_norm",
    "queries_only",  # 1: rows have no k and v, because those of an earlier layer are used
    "norm_stride",  # bytes between the norm weights of adjacent heads; 0: all heads share them
    "centered",  # 1: subtract the mean of a head first
    "rotary_dim",  # number of elements of a head that are rotated
    "interleaved",  # 1: rotate adjacent pairs; 0: pairs `distance` elements apart
    "distance",
    "cosine",
    "sine",
    "scores",  # addresses of the attention kernels for this cache type
    "softmax",
    "weighted_sum",
    "partials",  # address of the partial results, [slot][KV head][piece][head]
    "max_pieces",
    "sinks",  # address of one more score for the softmax of each head, float32; 0: none
    "words",  # number of 4-byte words of a row that is copied
    "each",  # number of rows per token or output row; 0: 1
    "experts",  # number of experts; `weight` and `up` are the addresses of their tables of weight addresses, int64
    "choices",  # number of experts chosen for a token
    "sigmoid",  # 1: scores are sigmoids of the logits; 0: their softmax
    "normalized",  # 1: divide the weights by their sum
    "expert_groups",  # number of groups of experts
    "active_groups",  # number of groups that experts are chosen from
    "settings",  # address of float32: a number added to the sum of the weights, the scale of the weights
    "choice_bias",  # address of float32 [experts], added to scores for the choice only; 0: none
    "expert_scale",  # address of float32 [experts], factors of the weights; 0: none
    "gates_shared",  # 1: the last logit gives the weight of the shared MLP
    "ids",  # address of the chosen experts, int64 [tokens][choices]
    "weights",  # address of their weights and of that of the shared MLP, float32 [tokens][choices + 1]
    "row_of",  # address of the row of each choice in the order of experts, int64 [tokens][choices]
    "token_of",  # address of the token of each of these rows, int64 [tokens * choices]; 0: rows are in this order
    "orders",  # address of the addresses of the experts' column orders, int64 [experts] (see `order`)
    "blocks",  # address of the number of blocks, int64, and of the blocks [BLOCK_WORDS]
    "single",  # address of x in a step of one token; 0: as in other steps
    "shared",  # address of the rows of the shared MLP, float32; 0: none
    "shared_stride",
    "taps",  # number of tokens that a convolution reads
    "plain",  # 1: a convolution of the rows themselves, with SiLU; 0: of b * x, scaled by c
    "gate",  # address of float32 rows whose sigmoid scales a result
    "gate_stride",
    "rates",  # address of rows with the step size of each value head, then its decay
    "rates_stride",
    "rate",  # address of the logarithm of each head's largest decay, float32 [value_heads]
    "key_heads",
    "value_heads",
    "key_dim",
    "value_dim",
    "tiled",  # 1: value head n has key head n % key_heads; 0: adjacent value heads share one
    "length_epsilon",  # added to the mean square of a key, bits of a float32
)
INSTRUCTION = np.dtype([(name, np.int64) for name in WORDS])
Instruction = dict[str, int]  # instruction words by name

COUNTS = (
    "tokens",
    "outputs",  # number of output rows: rows whose logits are needed
    "tiles",
    "output_tiles",
    "requests",
    "local",  # 1: a step of one token with a short context
)
HEADER_WORDS = (
    *COUNTS,
    "token_ids",  # the words from here to `tables` are addresses of int64 arrays
    "positions",
    "slots",  # [groups][tokens]
    "output_rows",
    "output_positions",
    "tile_list",  # [tiles][TILE_WORDS]: first token, number of tokens, request, first slot or WHOLE
    "output_tile_list",  # [outputs][TILE_WORDS]: the same for each output row, which is a tile of one row
    "query_starts",  # [requests + 1]: first token of each request
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


def product_words(part: Part, form: Form, prefix: str = "") -> dict[str, int]:
    """Return the words of the kernels that multiply a part of a weight by rows in `form`, and of its tiles.

    `prefix` is "up_" for the second weight of an instruction.
    """
    names = (f"{prefix}{name}" for name in ("one", "two", "four", "six"))
    return {**dict(zip(names, part.tile_kernels(form), strict=True)), f"{prefix}tile_bytes": part.tile_bytes}


def most_blocks(rows: int, experts: int) -> int:
    """Return the largest number of blocks that `rows` rows of `experts` experts are divided into."""
    return min(rows, experts) + rows // TOKENS
