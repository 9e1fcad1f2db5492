"""Plain torch twins of the engine's kernels: normalization, rotary embedding, KV store, paged attention, gated MLP.

Each result row depends on its own token and context alone, bit for bit: work is cut into pieces of fixed shape, and
pieces are merged one after another in order of position. So a token's bits are the same alone and in a batch, in a
chunk of any size, over a cached or a computed prefix.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.config import BLOCK_SIZE

QUERY_TILE = 16  # queries of one request that are attended together
PIECE = 128  # context positions that are reduced together
PIECE_BLOCKS = PIECE // BLOCK_SIZE


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [tokens, hidden] float32 -> the same shape; root mean square normalization (arXiv:1910.07467)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Turn pairs of each head by their position's angle (arXiv:2104.09864).

    x [tokens, heads, head_dim]; cos, sin [tokens, head_dim / 2]. Pairs are neighbours, or half a head apart.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if interleaved:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def store_kv(pool: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k, v [tokens, kv_heads, head_dim] into their slots of one layer's pool (see `LayerKV`)."""
    block, place = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    pool[block, 0, :, place] = k.to(pool.dtype)
    pool[block, 1, :, place] = v.to(pool.dtype)


def paged_attention(q: Tensor, positions: Tensor, pool: Tensor, table: Tensor, context: int, scale: float) -> Tensor:
    """Causal attention of one request's queries over its blocks.

    q [n, heads, head_dim] float32 at `positions` [n]; pool as in `LayerKV`; table [blocks] of the request; `context`
    tokens are valid, and slots behind them may hold anything, NaN included. -> [n, heads, head_dim].
    Operations: 4 * n * heads * head_dim * context.
    """
    pieces = [_piece(pool, table, start, context) for start in range(0, context, PIECE)]
    starts = range(0, len(q), QUERY_TILE)
    return torch.cat(
        [_attend_tile(q[at : at + QUERY_TILE] * scale, positions[at : at + QUERY_TILE], pieces) for at in starts]
    )


def _attend_tile(q: Tensor, positions: Tensor, pieces: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Up to QUERY_TILE queries, padded to exactly that many; query heads that share a KV head become rows of it."""
    count, heads, head_dim = q.shape
    kv_heads = pieces[0][0].shape[0]
    padded = F.pad(q, (0, 0, 0, 0, 0, QUERY_TILE - count)).view(QUERY_TILE, kv_heads, heads // kv_heads, head_dim)
    rows = padded.permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    last = F.pad(positions, (0, QUERY_TILE - count)).repeat(heads // kv_heads)
    mixed = _attend_pieces(rows, last, pieces).view(heads, QUERY_TILE, head_dim)
    return mixed.transpose(0, 1)[:count]


def _piece(pool: Tensor, table: Tensor, start: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """k and v [kv_heads, PIECE, head_dim] and the positions [PIECE] of the context from `start` on.

    What lies behind the context is zero, by selection: it may be NaN, and zero times NaN is NaN.
    """
    blocks = table[start // BLOCK_SIZE : start // BLOCK_SIZE + PIECE_BLOCKS]
    blocks = F.pad(blocks, (0, PIECE_BLOCKS - len(blocks)))
    positions = torch.arange(start, start + PIECE)
    kv = pool[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3).float()  # [2, kv_heads, PIECE, head_dim]
    kv = torch.where((positions < context).unsqueeze(-1), kv, 0.0)
    return kv[0], kv[1], positions


def _attend_pieces(q: Tensor, last: Tensor, pieces: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Softmax over all pieces by a running maximum (arXiv:2205.14135).

    q [kv_heads, rows, head_dim]; row r sees positions up to last[r]. A piece that a row sees nothing of leaves that
    row's bits as they are.
    """
    peak = torch.full(q.shape[:2], -torch.inf)
    total = torch.zeros(q.shape[:2])
    mixed = torch.zeros_like(q)
    for k, v, positions in pieces:
        scores = torch.where(positions <= last.unsqueeze(-1), q @ k.mT, -torch.inf)
        new_peak = torch.maximum(peak, scores.amax(-1))
        weights = torch.exp(scores - new_peak.unsqueeze(-1))
        kept = torch.exp(peak - new_peak)
        total = total * kept + weights.sum(-1)
        mixed = mixed * kept.unsqueeze(-1) + weights @ v
        peak = new_peak
    return mixed / total.unsqueeze(-1)


def silu_gate(gate_up: Tensor) -> Tensor:
    """[tokens, 2 * width], gate beside up -> silu(gate) * up, [tokens, width] (arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
