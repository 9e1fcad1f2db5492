"""The draw of one row's token on a GPU. The twin is `drawing.draw`, whose words hold here too: the same uniform
numbers give the same token, unless one falls on the edge between two tokens by less than float32 tells.
"""

import triton
import triton.language as tl

from engine.kernels.row_passes import (
    BELOW_ALL,
    as_integers,
    beyond,
    end_among,
    end_of,
    id_of,
    logit_of,
    mass,
    rank_of,
    up_to,
    weights_of,
)


@triton.jit
def draw_shortlisted(
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
    """What the `count` tokens of a shortlist give, int32; -1 where they do not hold all that is kept.

    `complete` says that no other token weighs anything; `total` is what all weigh together. Without top-k, only
    tokens more likely than the one at PREFIX count, as for the twin, which then goes on as `draw` does. Sums of
    integers are exact: the list is in any order.
    """
    places = tl.arange(0, CAPACITY)
    ranks = tl.load(shortlist + places, mask=places < count, other=BELOW_ALL)
    known = places < count
    first, last = tl.max(ranks), tl.min(tl.where(known, ranks, -BELOW_ALL))
    unlimited = top_k >= vocabulary
    if unlimited & (vocabulary > PREFIX):
        complete = count < 0
        if count >= PREFIX:
            edge = end_among(ranks, known.to(tl.int64), first, last, PREFIX)
            known = known & ((ranks >> ID_BITS) > (edge >> ID_BITS))
    found = tl.sum(known.to(tl.int32))
    weights = tl.where(known, weights_of(logit_of(ranks, ID_BITS), peak, scale, least), 0.0)
    weights = as_integers(weights)
    if top_k < found:
        edge = end_among(ranks, known.to(tl.int64), first, last, top_k)
        weights = tl.where(ranks >= edge, weights, 0)
    ended = (tl.sum((weights > 0).to(tl.int32)) < found) | (top_k <= found) | complete
    total = tl.where(ended, tl.sum(weights), total)
    if top_p < 1:
        edge = end_among(ranks, weights, first, last, up_to(top_p, total))
        weights = tl.where(ranks >= edge, weights, 0)
    kept = tl.sum((weights > 0).to(tl.int32))
    drawn = end_among(ranks, weights, first, last, beyond(uniform, tl.sum(weights)))
    return tl.where(ended | (unlimited & (kept < found)), id_of(drawn, ID_BITS), -1)


@triton.jit
def draw_as_it_lies(
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
    """A token of the whole row in order of ids, int32, given the weight of each chunk: first the chunk, then the token.

    -1 where there is none, which takes a row without weight.
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
    # A chunk's sum and its tokens' may differ in the last bit: then it is the last token that weighs something.
    return tl.where(token < vocabulary, token, tl.max(tl.where(weights > 0, ids, -1)))


@triton.jit
def draw_by_bisection(
    row: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    pick: tl.tensor,
    scale: tl.tensor,
    least: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    uniform: tl.tensor,
    BLOCK: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> tl.tensor:
    """What the whole row gives in order of ranks, int32, without sorting it; `pick` is the most likely token."""
    first = rank_of(peak, pick, ID_BITS)
    lowest = rank_of(tl.full([], -float("inf"), tl.float32), vocabulary - 1, ID_BITS)
    last = lowest
    if top_k < vocabulary:
        last = end_of(row, vocabulary, peak, scale, least, first, last, top_k, True, BLOCK, ID_BITS)
    if top_p < 1:
        total = mass(row, vocabulary, peak, scale, least, lowest - 1, last, False, BLOCK, ID_BITS)
        limit = up_to(top_p, total)
        last = end_of(row, vocabulary, peak, scale, least, first, last, limit, False, BLOCK, ID_BITS)
    kept = mass(row, vocabulary, peak, scale, least, lowest - 1, last, False, BLOCK, ID_BITS)
    limit = beyond(uniform, kept)
    drawn = end_of(row, vocabulary, peak, scale, least, first, last, limit, False, BLOCK, ID_BITS)
    return id_of(drawn, ID_BITS)


@triton.jit
def draw(
    row: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    pick: tl.tensor,
    sums: tl.tensor,
    shortlist: tl.tensor,
    count: tl.tensor,
    complete: tl.tensor,
    scale: tl.tensor,
    least: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    uniforms: tl.tensor,
    TRIES: tl.constexpr,
    PREFIX: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> tl.tensor:
    """From the shortlist where it tells; else, without top-k, from the row as it lies, again if top-p drops the token;
    else by bisection. int32."""
    unlimited = top_k >= vocabulary
    filtered = (top_k < vocabulary) | (top_p < 1)
    token = tl.full([], -1, tl.int32)
    total = as_integers(tl.sum(sums))
    if filtered & (count <= CAPACITY):
        token = draw_shortlisted(
            shortlist, count, vocabulary, peak, scale, least, top_k, top_p, total, complete, tl.load(uniforms),
            PREFIX, CAPACITY, ID_BITS,
        )  # fmt: skip
    attempt = 0
    while unlimited & (token < 0) & (attempt < TRIES):
        drawn = draw_as_it_lies(row, vocabulary, peak, scale, least, sums, tl.load(uniforms + attempt), BLOCK, CHUNKS)
        if filtered & (drawn >= 0):
            rank = rank_of(tl.load(row + drawn), drawn, ID_BITS)
            before = mass(row, vocabulary, peak, scale, least, rank, BELOW_ALL, False, BLOCK, ID_BITS)
            drawn = tl.where(before < up_to(top_p, total), drawn, -1)
        token = drawn
        attempt += 1
    if token < 0:
        token = draw_by_bisection(
            row, vocabulary, peak, pick, scale, least, top_k, top_p, tl.load(uniforms), BLOCK, ID_BITS
        )
    return token
