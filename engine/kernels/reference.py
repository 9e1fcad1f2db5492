"""Plain torch twins of the engine's kernels: normalization, rotary embedding, KV store, paged attention, gated MLP.

Each result row depends on its own token and context alone, bit for bit: work is cut into pieces of fixed shape, and
pieces are merged one after another in order of position. So a token's bits are the same alone and in a batch, in a
chunk of any size, over a cached or a computed prefix.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.config import BLOCK_SIZE, Gate, NormKind
from engine.operations import Norm

QUERY_TILE = 16  # queries of one request that are attended together
PIECE = 128  # context positions that are reduced together
PIECE_BLOCKS = PIECE // BLOCK_SIZE


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """x [..., width] float32 -> the same shape, every row normalized."""
    if norm.kind is NormKind.LAYER:
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.epsilon) * norm.weight
    return x if norm.bias is None else x + norm.bias


def normalize_heads(x: Tensor, norm: Norm, head_dim: int) -> Tensor:
    """x [tokens, heads * head_dim]: each head normalized, or all heads together; see `HeadNorms`."""
    heads = x.view(len(x), -1, head_dim) if norm.weight.shape[-1] == head_dim else x
    return normalize(heads, norm).reshape(x.shape)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Turn pairs of each head by their position's angle (arXiv:2104.09864).

    x [tokens, heads, head_dim]; cos, sin [tokens, n / 2]: the first n elements of a head turn. Pairs are neighbours, or
    n / 2 apart.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    x, rest = x.tensor_split([2 * cos.shape[-1]], dim=-1)
    if interleaved:
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def store_kv(pool: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k, v [tokens, kv_heads, head_dim] into their slots of one layer's pool (see `LayerKV`).

    A pool of uint8 holds 8-bit floats, e4m3: what is beyond their range becomes their largest.
    """
    block, place = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    values = as_floats(pool)
    if pool.dtype == torch.uint8:
        most = torch.finfo(values.dtype).max
        k, v = k.clamp(-most, most), v.clamp(-most, most)
    values[block, 0, :, place] = k.to(values.dtype)
    values[block, 1, :, place] = v.to(values.dtype)


def as_floats(pool: Tensor) -> Tensor:
    """The same memory, by what it means: uint8 is e4m3 (arXiv:2209.05433)."""
    return pool.view(torch.float8_e4m3fn) if pool.dtype == torch.uint8 else pool


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """What becomes of q times k, and which k there are."""

    scale: float
    softcap: float = 0.0  # see `soft_cap`
    window: int | None = None  # positions that are seen, the own one included; None: all

    def first(self, position: int) -> int:
        """The first position that one sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), which stays within the cap (arXiv:2408.00118); x where the cap is 0."""
    return cap * torch.tanh(x / cap) if cap else x


def paged_attention(
    q: Tensor,
    positions: Tensor,
    pool: Tensor,
    table: Tensor,
    context: int,
    rule: ScoreRule,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of one request's queries over its blocks.

    q [n, heads, head_dim] float32 at consecutive `positions` [n]; pool as in `LayerKV`; table [blocks] of the request;
    `context` tokens are valid, and slots behind them, or before the window, may hold anything, NaN included; sinks
    [heads], each a score that takes part in its head's softmax and has no value.
    -> [n, heads, head_dim]. Operations: 4 * n * heads * head_dim * context.
    """
    first = rule.first(int(positions[0]))
    pieces = [_piece(pool, table, start, first, context) for start in range(first // PIECE * PIECE, context, PIECE)]
    starts = range(0, len(q), QUERY_TILE)
    return torch.cat(
        [_attend_tile(q[at : at + QUERY_TILE], positions[at : at + QUERY_TILE], pieces, rule, sinks) for at in starts]
    )


def batch_attention(
    q: Tensor,
    pool: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    rule: ScoreRule,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention` of all requests: q [tokens, heads, head_dim], request r's from query_starts[r] on, which are
    the last of its context. Requests without a context stand for nothing: 0. -> [tokens, heads * head_dim]."""
    out = torch.zeros_like(q)
    for request, context in enumerate(context_lengths.tolist()):
        start, stop = query_starts[request : request + 2].tolist()
        if context:
            positions = torch.arange(context - (stop - start), context)
            out[start:stop] = paged_attention(q[start:stop], positions, pool, tables[request], context, rule, sinks)
    return out.flatten(1)


Piece = tuple[Tensor, Tensor, Tensor]  # k and v [kv_heads, PIECE, head_dim], positions [PIECE]


def _attend_tile(q: Tensor, positions: Tensor, pieces: list[Piece], rule: ScoreRule, sinks: Tensor | None) -> Tensor:
    """Up to QUERY_TILE queries, padded to exactly that many; query heads that share a KV head become rows of it."""
    count, heads, head_dim = q.shape
    kv_heads = pieces[0][0].shape[0]
    padded = F.pad(q * rule.scale, (0, 0, 0, 0, 0, QUERY_TILE - count))
    padded = padded.view(QUERY_TILE, kv_heads, heads // kv_heads, head_dim)
    rows = padded.permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    # Rows of padding see what the last query sees: a row that sees nothing would divide by zero.
    last = F.pad(positions, (0, QUERY_TILE - count), value=int(positions[-1])).repeat(heads // kv_heads)
    sunk = None if sinks is None else sinks.view(kv_heads, -1).repeat_interleave(QUERY_TILE, -1)
    mixed = _attend_pieces(rows, last, pieces, rule, sunk).view(heads, QUERY_TILE, head_dim)
    return mixed.transpose(0, 1)[:count]


def _piece(pool: Tensor, table: Tensor, start: int, first: int, context: int) -> Piece:
    """The context from `start` on.

    What lies before `first` or behind the context is zero, by selection: it may be NaN, and zero times NaN is NaN.
    """
    blocks = table[start // BLOCK_SIZE : start // BLOCK_SIZE + PIECE_BLOCKS]
    blocks = F.pad(blocks, (0, PIECE_BLOCKS - len(blocks)))
    positions = torch.arange(start, start + PIECE)
    kv = as_floats(pool)[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3).float()  # [2, kv_heads, PIECE, head_dim]
    kv = torch.where(((positions >= first) & (positions < context)).unsqueeze(-1), kv, 0.0)
    return kv[0], kv[1], positions


def _attend_pieces(q: Tensor, last: Tensor, pieces: list[Piece], rule: ScoreRule, sinks: Tensor | None) -> Tensor:
    """Softmax over all pieces by a running maximum (arXiv:2205.14135).

    q [kv_heads, rows, head_dim]; row r sees positions up to last[r]; sinks [kv_heads, rows]. A piece that a row sees
    nothing of leaves that row's bits as they are.
    """
    peak = torch.full(q.shape[:2], -torch.inf)
    total = torch.zeros(q.shape[:2])
    mixed = torch.zeros_like(q)
    for k, v, positions in pieces:
        seen = positions <= last.unsqueeze(-1)
        if rule.window is not None:
            seen &= positions > (last - rule.window).unsqueeze(-1)
        scores = torch.where(seen, soft_cap(q @ k.mT, rule.softcap), -torch.inf)
        new_peak = torch.maximum(peak, scores.amax(-1))
        base = torch.where(new_peak == -torch.inf, 0.0, new_peak)  # of a row that has seen nothing yet
        weights = torch.exp(scores - base.unsqueeze(-1))
        kept = torch.exp(peak - base)
        total = total * kept + weights.sum(-1)
        mixed = mixed * kept.unsqueeze(-1) + weights @ v
        peak = new_peak
    if sinks is not None:
        base = torch.maximum(peak, sinks)
        mixed = mixed * torch.exp(peak - base).unsqueeze(-1)
        total = total * torch.exp(peak - base) + torch.exp(sinks - base)
    return mixed / total.unsqueeze(-1)


_GATES: dict[Gate, Callable[[Tensor], Tensor]] = {
    Gate.SILU: F.silu,
    Gate.GELU: partial(F.gelu, approximate="tanh"),
}


def gated(gate_up: Tensor, gate: Gate) -> Tensor:
    """[tokens, 2 * width], gate beside up -> gate(first half) * second half, [tokens, width] (arXiv:2002.05202)."""
    first, second = gate_up.chunk(2, dim=-1)
    return _GATES[gate](first) * second
