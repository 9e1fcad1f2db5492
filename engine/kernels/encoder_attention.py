"""Attention of encoders on a GPU: every token of a text sees all of it. The twin is torch's
`scaled_dot_product_attention`, a text at a time.

Texts lie one after another, without padding. A program takes one tile of queries (see `attention_tiles`) and one head.
Tiles and pieces have one size and are counted from the text's beginning: a text's bits are its own. The floor is the
operations: 4 * hidden for each query and token of its text.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention_tiles import TileQueries, Tiles
from engine.kernels.running_softmax import weighed

QUERIES = TileQueries(64, 64)
PIECE = 64  # tokens of a text that are multiplied at a time
LOG2E = 1.4426950408889634


@triton.jit
def _encoder_attention_kernel(
    qkv: tl.tensor,
    starts: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    tile, head = tiles + 3 * tl.program_id(0), tl.program_id(1)
    text, first = tl.load(tile), tl.load(tile + 1)
    start, stop = tl.load(starts + text), tl.load(starts + text + 1)
    column = tl.arange(0, COLUMNS)[None, :]
    row = (start + first + tl.arange(0, QUERIES))[:, None]
    there = (row < stop) & (column < HEAD_DIM)
    hidden: tl.constexpr = HEADS * HEAD_DIM
    own = qkv + head * HEAD_DIM + column
    q = tl.load(own + row.to(tl.int64) * (3 * hidden), mask=there, other=0.0)
    peak = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, COLUMNS), tl.float32)
    for at in range(start, stop, PIECE):
        token = at + tl.arange(0, PIECE)
        line = own + token.to(tl.int64)[:, None] * (3 * hidden)
        valid = (token < stop)[:, None] & (column < HEAD_DIM)
        k = tl.load(line + hidden, mask=valid, other=0.0)
        scores = tl.where((token < stop)[None, :], tl.dot(q, tl.trans(k)), float("-inf"))
        weights, kept, peak, total = weighed(scores, scale, peak, total)
        v = tl.load(line + 2 * hidden, mask=valid, other=0.0)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * kept[:, None])
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * hidden + head * HEAD_DIM + column, result, mask=there)


def encoder_attention(qkv: Tensor, starts: Tensor, heads: int, tiles: Tiles) -> Tensor:
    """qkv bfloat16 [tokens, 3 * hidden], q, k and v side by side; text t has tokens starts[t] .. starts[t + 1], int32
    [texts + 1]; tiles: of the same texts, by QUERIES. -> bfloat16 [tokens, hidden]."""
    hidden = qkv.shape[1] // 3
    head_dim = hidden // heads
    columns = max(16, triton.next_power_of_2(head_dim))
    out = torch.empty(qkv.shape[0], hidden, dtype=qkv.dtype, device=qkv.device)
    for it in tiles.lists:
        _encoder_attention_kernel[len(it.tiles), heads](
            qkv,
            starts,
            it.tiles,
            out,
            head_dim**-0.5 * LOG2E,
            HEADS=heads,
            HEAD_DIM=head_dim,
            COLUMNS=columns,
            QUERIES=it.queries,
            PIECE=PIECE,
            num_warps=4 if columns <= 64 else 8,
            num_stages=2,
        )
    return out
