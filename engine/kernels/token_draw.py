"""Draw the token of one row on a GPU. Reference implementation: `engine.sampling.drawing.draw`.

The same uniform numbers give the same token, unless a number is within float32 rounding of the boundary between two
tokens.
"""

import triton
import triton.language as tl

from engine.kernels.row_passes import (
    BELOW_ALL,
    draw_limit,
    find_cutoff,
    find_cutoff_in_list,
    id_of,
    logit_of,
    rank_of,
    to_fixed_point,
    top_p_limit,
    weight_above,
    weights_of,
)


@triton.jit
def draw_from_shortlist(
    shortlist: tl.tensor,
    count: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    scale: tl.tensor,
    least: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    total: tl.tensor,
    complete: tl.tensor,
    uniform: tl.tensor,
    PREFIX: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> tl.tensor:
    """Draw from a shortlist of `count` tokens. Returns int32; -1 if kept tokens may be missing from the shortlist.

    `complete`: no other token has any weight. `total`: the weight of the whole row. Without top-k, only tokens more
    likely than the one at index PREFIX are used, as in the reference implementation, and `draw` continues if those are
    not enough. Integer sums are exact, so the list may be in any order.
    """
    entries = tl.arange(0, CAPACITY)
    ranks = tl.load(shortlist + entries, mask=entries < count, other=BELOW_ALL)
    known = entries < count
    first, last = tl.max(ranks), tl.min(tl.where(known, ranks, -BELOW_ALL))
    unlimited = top_k >= vocabulary
    if unlimited & (vocabulary > PREFIX):
        complete = count < 0
        if count >= PREFIX:
            edge = find_cutoff_in_list(ranks, known.to(tl.int64), first, last, PREFIX)
            known = known & ((ranks >> ID_BITS) > (edge >> ID_BITS))
    found = tl.sum(known.to(tl.int32))
    weights = tl.where(known, weights_of(logit_of(ranks, ID_BITS), peak, scale, least), 0.0)
    weights = to_fixed_point(weights)
    if top_k < found:
        edge = find_cutoff_in_list(ranks, known.to(tl.int64), first, last, top_k)
        weights = tl.where(ranks >= edge, weights, 0)
    ended = (tl.sum((weights > 0).to(tl.int32)) < found) | (top_k <= found) | complete
    total = tl.where(ended, tl.sum(weights), total)
    if top_p < 1:
        edge = find_cutoff_in_list(ranks, weights, first, last, top_p_limit(top_p, total))
        weights = tl.where(ranks >= edge, weights, 0)
    kept = tl.sum((weights > 0).to(tl.int32))
    drawn = find_cutoff_in_list(ranks, weights, first, last, draw_limit(uniform, tl.sum(weights)))
    return tl.where(ended | (unlimited & (kept < found)), id_of(drawn, ID_BITS), -1)


@triton.jit
def draw_in_id_order(
    row: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    scale: tl.tensor,
    least: tl.tensor,
    sums: tl.tensor,
    uniform: tl.tensor,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    """Draw from the whole row in order of ids, given the weight of each chunk: first the chunk, then the token.

    Returns int32; -1 if no token has any weight.
    """
    chunks, sums = tl.arange(0, CHUNKS), sums.to(tl.float64)
    cumulative = tl.cumsum(sums)
    target = uniform * tl.max(cumulative)
    chunk = tl.min(tl.where(cumulative > target, chunks, CHUNKS - 1))
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(row + ids, mask=ids < vocabulary, other=-float("inf"))
    weights = weights_of(values, peak, scale, least).to(tl.float64)
    reached = tl.cumsum(weights) + tl.sum(tl.where(chunks < chunk, sums, 0.0))
    token = tl.min(tl.where((reached > target) & (weights > 0), ids, vocabulary))
    # The sum of a chunk and the sum of its tokens may differ in the last bit. In that case, take the last token with a
    # weight.
    return tl.where(token < vocabulary, token, tl.max(tl.where(weights > 0, ids, -1)))


@triton.jit
def draw_by_bisection(
    row: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    best_id: tl.tensor,
    scale: tl.tensor,
    least: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    uniform: tl.tensor,
    BLOCK: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> tl.tensor:
    """Draw from the whole row in order of ranks, without sorting it. Returns int32. `best_id` is the most likely
    token.
    """
    first = rank_of(peak, best_id, ID_BITS)
    lowest = rank_of(tl.full([], -float("inf"), tl.float32), vocabulary - 1, ID_BITS)
    last = lowest
    if top_k < vocabulary:
        last = find_cutoff(row, vocabulary, peak, scale, least, first, last, top_k, True, BLOCK, ID_BITS)
    if top_p < 1:
        total = weight_above(row, vocabulary, peak, scale, least, lowest - 1, last, False, BLOCK, ID_BITS)
        limit = top_p_limit(top_p, total)
        last = find_cutoff(row, vocabulary, peak, scale, least, first, last, limit, False, BLOCK, ID_BITS)
    kept = weight_above(row, vocabulary, peak, scale, least, lowest - 1, last, False, BLOCK, ID_BITS)
    limit = draw_limit(uniform, kept)
    drawn = find_cutoff(row, vocabulary, peak, scale, least, first, last, limit, False, BLOCK, ID_BITS)
    return id_of(drawn, ID_BITS)


@triton.jit
def draw(
    row: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    best_id: tl.tensor,
    sums: tl.tensor,
    shortlist: tl.tensor,
    count: tl.tensor,
    complete: tl.tensor,
    scale: tl.tensor,
    least: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    uniforms: tl.tensor,
    ATTEMPTS: tl.constexpr,
    PREFIX: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> tl.tensor:
    """Draw a token with the cheapest method that applies. Returns int32.

    The shortlist is used if it holds all tokens that the filters keep. Otherwise, without top-k, the whole row is used
    in order of ids, and the draw is repeated if top-p drops the token. The last resort is bisection.
    """
    unlimited = top_k >= vocabulary
    filtered = (top_k < vocabulary) | (top_p < 1)
    token = tl.full([], -1, tl.int32)
    total = to_fixed_point(tl.sum(sums))
    if filtered & (count <= CAPACITY):
        token = draw_from_shortlist(
            shortlist, count, vocabulary, peak, scale, least, top_k, top_p, total, complete, tl.load(uniforms),
            PREFIX, CAPACITY, ID_BITS,
        )  # fmt: skip
    attempt = 0
    while unlimited & (token < 0) & (attempt < ATTEMPTS):
        drawn = draw_in_id_order(row, vocabulary, peak, scale, least, sums, tl.load(uniforms + attempt), BLOCK, CHUNKS)
        if filtered & (drawn >= 0):
            rank = rank_of(tl.load(row + drawn), drawn, ID_BITS)
            before = weight_above(row, vocabulary, peak, scale, least, rank, BELOW_ALL, False, BLOCK, ID_BITS)
            drawn = tl.where(before < top_p_limit(top_p, total), drawn, -1)
        token = drawn
        attempt += 1
    if token < 0:
        token = draw_by_bisection(
            row, vocabulary, peak, best_id, scale, least, top_k, top_p, tl.load(uniforms), BLOCK, ID_BITS
        )
    return token
