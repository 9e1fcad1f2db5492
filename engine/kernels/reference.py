"""Reference implementations in torch of the engine's kernels: norms, rotary embedding, KV store, attention, gated MLP,
expert routing.

Each result row depends bit for bit only on its own token and context: work is divided into pieces of fixed shape, and
pieces are merged in order of position. A token's bits are therefore the same whether it is computed alone or in a
batch, with prefill chunks of any size, and with a cached or a computed prefix.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.config import BLOCK_SIZE
from engine.kv.blocks import NULL_BLOCK
from engine.mixer_config import DeltaConfig
from engine.model_config import Gate, NormKind, Routing, Score
from engine.operations import DeltaRule, Norm

CLAMP, CLAMPED_SLOPE = 7.0, 1.702  # the limit of Gate.CLAMPED's inputs, and the factor of its exponent
DELTA_EPSILON = 1e-6  # added to the squared lengths of queries and keys

QUERY_TILE = 16  # queries of one request per tile
PIECE = 128  # context positions per matrix product
PIECE_BLOCKS = PIECE // BLOCK_SIZE


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """Normalize the rows of x, float32 [..., width]."""
    if norm.kind is NormKind.LAYER:
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.epsilon) * norm.weight
    return x if norm.bias is None else x + norm.bias


def normalize_heads(x: Tensor, norm: Norm, head_dim: int) -> Tensor:
    """Normalize each head of x [tokens, heads * head_dim], or all heads together (see `HeadNorms`)."""
    heads = x.view(len(x), x.shape[1] // head_dim, head_dim) if norm.weight.shape[-1] == head_dim else x
    return normalize(heads, norm).reshape(x.shape)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, distance: int = 0) -> Tensor:
    """Rotate pairs of elements in each head by the angles of their position (arXiv:2104.09864).

    x is [tokens, heads, head_dim]; cos and sin are [tokens, n]. If `interleaved`, pairs are adjacent elements, the
    first 2 * n of each head; otherwise the first n, each with the one that is `distance` elements further (0: n).
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    pairs, out = cos.shape[-1], x.clone()
    distance = distance or pairs
    firsts, seconds = slice(0, pairs), slice(distance, distance + pairs)
    if interleaved:
        firsts, seconds = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    first, second = x[..., firsts], x[..., seconds]
    out[..., firsts], out[..., seconds] = first * cos - second * sin, first * sin + second * cos
    return out


def store_kv(pool: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v [tokens, kv_heads, head_dim] into their slots in the pool of one layer (see `LayerKV`).

    A uint8 pool holds e4m3 floats. Values out of range are clamped.
    """
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    values = as_floats(pool)
    if pool.dtype == torch.uint8:
        most = torch.finfo(values.dtype).max
        k, v = k.clamp(-most, most), v.clamp(-most, most)
    values[blocks, 0, :, offsets] = k.to(values.dtype)
    values[blocks, 1, :, offsets] = v.to(values.dtype)


def as_floats(pool: Tensor) -> Tensor:
    """View a uint8 pool as e4m3 (arXiv:2209.05433); return any other pool as it is."""
    return pool.view(torch.float8_e4m3fn) if pool.dtype == torch.uint8 else pool


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """How scores are computed from q * k, and which positions are visible to a query."""

    scale: float
    softcap: float = 0.0  # soft cap of scores (see `soft_cap`); 0: none
    window: int | None = None  # number of visible positions, including the query's own; None: all

    def first(self, position: int) -> int:
        """Return the first position that the query at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), which is between -cap and cap (arXiv:2408.00118). If the cap is 0, return x."""
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
    """Compute causal attention of the queries of one request over its blocks. Returns [n, heads, head_dim].

    - q: float32 [n, heads, head_dim], at consecutive `positions` [n]
    - pool: see `LayerKV`
    - table: the request's block ids [blocks]
    - context: number of valid tokens; slots after them or before the window may hold anything, including NaN
    - sinks: [heads], scores without a value that take part in the softmax of their head

    Operations: 4 * n * heads * head_dim * context.
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
    """Run `paged_attention` for all requests of a step. Returns [tokens, heads * head_dim].

    q is [tokens, heads, head_dim]; the queries of request r start at query_starts[r] and are the last tokens of its
    context. Requests without a context are padding, and their output is 0.
    """
    out = torch.zeros_like(q)
    for request, context in enumerate(context_lengths.tolist()):
        start, stop = query_starts[request : request + 2].tolist()
        if context:
            positions = torch.arange(context - (stop - start), context)
            out[start:stop] = paged_attention(q[start:stop], positions, pool, tables[request], context, rule, sinks)
    return out.flatten(1)


Piece = tuple[Tensor, Tensor, Tensor]  # k and v [kv_heads, PIECE, head_dim], positions [PIECE]


def _attend_tile(q: Tensor, positions: Tensor, pieces: list[Piece], rule: ScoreRule, sinks: Tensor | None) -> Tensor:
    """Compute attention for up to QUERY_TILE queries, padded to that number. Query heads that share a KV head become
    rows of the tile.
    """
    count, heads, head_dim = q.shape
    kv_heads = pieces[0][0].shape[0]
    padded = F.pad(q * rule.scale, (0, 0, 0, 0, 0, QUERY_TILE - count))
    padded = padded.view(QUERY_TILE, kv_heads, heads // kv_heads, head_dim)
    rows = padded.permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    # Padding rows see the same positions as the last query: a row that sees no position would divide by zero.
    last = F.pad(positions, (0, QUERY_TILE - count), value=int(positions[-1])).repeat(heads // kv_heads)
    sunk = None if sinks is None else sinks.view(kv_heads, -1).repeat_interleave(QUERY_TILE, -1)
    mixed = _attend_pieces(rows, last, pieces, rule, sunk).view(heads, QUERY_TILE, head_dim)
    return mixed.transpose(0, 1)[:count]


def _piece(pool: Tensor, table: Tensor, start: int, first: int, context: int) -> Piece:
    """Return the piece of the context whose first position is `start`.

    Keys and values before `first` or after the context are replaced by zero. A mask in the softmax would not be enough:
    they may be NaN, and zero times NaN is NaN.
    """
    blocks = table[start // BLOCK_SIZE : start // BLOCK_SIZE + PIECE_BLOCKS]
    blocks = F.pad(blocks, (0, PIECE_BLOCKS - len(blocks)))
    positions = torch.arange(start, start + PIECE)
    kv = as_floats(pool)[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3).float()  # [2, kv_heads, PIECE, head_dim]
    kv = torch.where(((positions >= first) & (positions < context)).unsqueeze(-1), kv, 0.0)
    return kv[0], kv[1], positions


def _attend_pieces(q: Tensor, last: Tensor, pieces: list[Piece], rule: ScoreRule, sinks: Tensor | None) -> Tensor:
    """Compute the softmax over all pieces, with a running maximum (arXiv:2205.14135).

    q is [kv_heads, rows, head_dim]; row r sees positions up to last[r]; sinks are [kv_heads, rows]. A piece in which a
    row sees no position leaves that row's bits unchanged.
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
        base = torch.where(new_peak == -torch.inf, 0.0, new_peak)  # 0 for a row that has seen no position yet
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


def short_convolution(
    rows: Tensor, pool: Tensor, tables: Tensor, query_starts: Tensor, context_lengths: Tensor, weight: Tensor
) -> Tensor:
    """See `engine.kernels.short_convolution.short_convolution`. `rows` and the result are float32."""
    taps, width = weight.shape
    before, gate, after = rows.chunk(3, dim=1)
    inputs, states, out = before * after, pool.view(len(pool), taps - 1, width), torch.empty_like(gate)
    for number, context in enumerate(context_lengths.tolist()):
        (start, stop), (source, target) = query_starts[number : number + 2].tolist(), tables[number, :2].tolist()
        padded = torch.cat([states[source], inputs[start:stop]])
        out[start:stop] = _convolved(padded, weight)
        if context and target != NULL_BLOCK:
            states[target] = padded[len(padded) - (taps - 1) :]
    return gate * out


def _convolved(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return the convolution of [tokens + taps - 1, width] with [taps, width], [tokens, width]."""
    tokens = len(inputs) - len(weight) + 1
    out = weight[0] * inputs[:tokens]
    for tap in range(1, len(weight)):
        out += weight[tap] * inputs[tap : tap + tokens]
    return out


def gated_delta_rule(
    rows: Tensor, pool: Tensor, tables: Tensor, query_starts: Tensor, context_lengths: Tensor, delta: DeltaRule
) -> Tensor:
    """Compute the delta rule of every token (arXiv:2412.06464), and update the states.

    See `short_convolution` for the arguments that are the same. rows: float32 [tokens, in_width], as in
    `Operations.delta_rule`. Returns float32 [tokens, width].
    """
    shape, out = delta.config, torch.empty(len(rows), delta.config.width)
    parts = [shape.conv_width, shape.width, shape.value_heads, shape.value_heads]
    mixed, gate, step_logits, decay_logits = torch.split(rows, parts, dim=1)
    kept = (shape.taps - 1) * shape.conv_width
    for number, context in enumerate(context_lengths.tolist()):
        (start, stop), (source, target) = query_starts[number : number + 2].tolist(), tables[number, :2].tolist()
        padded = torch.cat([pool[source, :kept].view(shape.taps - 1, -1), mixed[start:stop]])
        convolved = F.silu(_convolved(padded, delta.conv))
        state = pool[source, kept:].view(shape.value_heads, shape.key_dim, shape.value_dim).clone()
        for token in range(start, stop):
            q, k, v = _delta_heads(convolved[token - start], shape)
            # token by token, because the bits of exp depend on the number of elements
            state *= torch.exp(delta.rate * F.softplus(decay_logits[token] + delta.time_bias)).view(-1, 1, 1)
            change = (v - (state * k.unsqueeze(-1)).sum(1)) * sigmoid(step_logits[token]).unsqueeze(-1)
            state += k.unsqueeze(-1) * change.unsqueeze(1)
            out[token] = normalize((state * q.unsqueeze(-1)).sum(1), delta.norm).flatten()
        if context and target != NULL_BLOCK:
            pool[target, :kept] = padded[len(padded) - (shape.taps - 1) :].flatten()
            pool[target, kept:] = state.flatten()
    return out * F.silu(gate)


def _delta_heads(row: Tensor, shape: DeltaConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k, [value_heads, key_dim], and v, [value_heads, value_dim], of one token."""
    keys = shape.key_heads * shape.key_dim
    q, k, v = torch.split(row, [keys, keys, shape.width])
    each = shape.value_heads // shape.key_heads
    q, k = (
        x * torch.rsqrt(x.square().sum(-1, keepdim=True) + DELTA_EPSILON)
        for x in (q.view(shape.key_heads, -1), k.view(shape.key_heads, -1))
    )
    q, k = (x.repeat(each, 1) if shape.tiled else x.repeat_interleave(each, 0) for x in (q, k))
    return q * shape.key_dim**-0.5, k, v.view(shape.value_heads, -1)


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return F.silu(CLAMPED_SLOPE * gate) / CLAMPED_SLOPE * (up + 1)  # silu has equal bits for any number of elements


_GATES: dict[Gate, Callable[[Tensor, Tensor], Tensor]] = {
    Gate.SILU: lambda gate, up: F.silu(gate) * up,
    Gate.GELU: lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    Gate.CLAMPED: _clamped,
}


def gated(gate_up: Tensor, gate: Gate, biases: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
    """Return the gated product of each row (arXiv:2002.05202): in most gates, gate(first half) * second half.

    [tokens, 2 * width] -> [tokens, width]. See `engine.kernels.activations.gated` for `biases` and `rows`.
    """
    if biases is not None and rows is not None:
        gate_up = gate_up + biases[rows.long()]
    first, second = gate_up.chunk(2, dim=-1)
    return gated_product(first, second, gate)


def gated_product(x: Tensor, values: Tensor, gate: Gate) -> Tensor:
    """Return the gated product of two tensors of the same shape."""
    return _GATES[gate](x, values)


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid. The bits of torch.sigmoid depend on the number of elements, unless it is a multiple of 16."""
    return 1 / (1 + torch.exp(-x))


_SCORES: dict[Score, Callable[[Tensor], Tensor]] = {
    Score.SOFTMAX: partial(torch.softmax, dim=-1),
    Score.SIGMOID: sigmoid,
}


def route(
    logits: Tensor, routing: Routing, choice_bias: Tensor | None = None, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token, in ascending order, and their weights.

    logits: float32 [tokens, experts]; choice_bias and expert_scale: float32 [experts]. Returns int64 and float32
    [tokens, active].
    """
    scores = _SCORES[routing.score](logits)
    choice = scores if choice_bias is None else scores + choice_bias
    if routing.groups > 1:
        choice = _in_best_groups(choice, routing)
    ids = _largest(choice, routing.active).sort(dim=-1).values
    weights = scores.gather(-1, ids)
    if routing.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
    weights = weights * routing.scale
    return ids, weights if expert_scale is None else weights * expert_scale[ids]


def _in_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """Replace the scores of experts by -inf, except in the groups whose two largest scores have the largest sums
    (arXiv:2412.19437).
    """
    groups = choice.view(len(choice), routing.groups, routing.experts // routing.groups)
    best = _largest(groups.topk(min(2, groups.shape[-1])).values.sum(-1), routing.active_groups)
    kept = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter(1, best, True)
    return torch.where(kept.unsqueeze(-1), groups, -torch.inf).flatten(1)


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest values of each row. Among equal values, the lower index is first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def expert_sum(
    outputs: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    shared_weights: Tensor | None,
    biases: Tensor | None = None,
    experts: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, plus that of the shared MLP, [tokens, width].

    outputs: [tokens * active, width]; weights: [tokens, active]; shared: [tokens, width]; shared_weights: [tokens];
    biases: [number of experts, width]; experts: [tokens, active].
    """
    each = outputs.view(*weights.shape, -1)
    if biases is not None and experts is not None:
        each = each + biases[experts.long()]
    total = (weights.unsqueeze(-1) * each).sum(1)
    if shared is None:
        return total
    return total + (shared if shared_weights is None else shared * shared_weights.unsqueeze(-1))
