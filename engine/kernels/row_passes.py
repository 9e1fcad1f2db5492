"""Building blocks of the sampling kernels: passes over one row of logits.

Tokens are ordered by descending logit, ties by ascending id. A token's rank is an int64 that is larger for tokens
earlier in this order: its logit as an ordered integer, then its reversed id. A token's weight is exp((logit - peak) /
temperature), or 0 if min-p drops it. `scale` is log2(e) / temperature, so the peak has weight 1. Weights are compared
as 64-bit fixed-point integers, in which ONE represents 1.0. All sums have a fixed shape, so results depend only on the
row.
"""

import triton
import triton.language as tl

ONE = tl.constexpr(2.0**40)  # 1.0 in fixed point; its rounding error is below that of a float32 sum
BELOW_ALL = tl.constexpr(-(1 << 62))  # less than any rank


@triton.jit
def to_ordered_ints(values: tl.tensor) -> tl.tensor:
    """Map floats to int32 that compare in the same order; -0.0 equals 0.0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_ordered_ints(keys: tl.tensor) -> tl.tensor:
    """Map integers back to floats; the inverse of `to_ordered_ints`."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def rank_of(values: tl.tensor, ids: tl.tensor, ID_BITS: tl.constexpr) -> tl.tensor:
    return (to_ordered_ints(values).to(tl.int64) << ID_BITS) + ((1 << ID_BITS) - 1 - ids)


@triton.jit
def id_of(ranks: tl.tensor, ID_BITS: tl.constexpr) -> tl.tensor:
    return ((1 << ID_BITS) - 1 - (ranks & ((1 << ID_BITS) - 1))).to(tl.int32)


@triton.jit
def logit_of(ranks: tl.tensor, ID_BITS: tl.constexpr) -> tl.tensor:
    return from_ordered_ints((ranks >> ID_BITS).to(tl.int32))


@triton.jit
def weights_of(values: tl.tensor, peak: tl.tensor, scale: tl.tensor, least: tl.tensor) -> tl.tensor:
    weights = tl.exp2((values - peak) * scale)
    return tl.where(weights >= least, weights, 0.0)


@triton.jit
def to_fixed_point(weights: tl.tensor) -> tl.tensor:
    """Convert weights to int64 fixed point, rounded down."""
    return (weights.to(tl.float64) * ONE).to(tl.int64)


@triton.jit
def lane_maxima(row: tl.tensor, vocabulary: tl.tensor, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the largest logit of each lane, float32 [BLOCK], and the lowest id that has it.

    Lane i covers the ids i, i + BLOCK, and so on. NaN propagates. Cost: 3 operations per token.
    """
    lanes = tl.arange(0, BLOCK)
    best = tl.load(row + lanes, mask=lanes < vocabulary, other=-float("inf"))
    ids = lanes
    for start in range(BLOCK, vocabulary, BLOCK):
        values = tl.load(row + start + lanes, mask=start + lanes < vocabulary, other=-float("inf"))
        ids = tl.where(values > best, start + lanes, ids)
        best = tl.maximum(best, values, propagate_nan=tl.PropagateNan.ALL)
    return best, ids


@triton.jit
def find_argmax(best: tl.tensor, ids: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the largest logit, the lowest id that has it, and whether no logit is NaN."""
    peak = tl.max(best)
    return peak, tl.min(tl.where(best == peak, ids, 0x7FFFFFFF)), tl.sum((best != best).to(tl.int32)) == 0


@triton.jit
def shortlist_threshold(best: tl.tensor, need: tl.tensor) -> tl.tensor:
    """Return a threshold that at least `need` lane maxima reach, and therefore at least `need` tokens.

    The search stops early at a logit that at most 5/4 of `need` maxima reach.
    """
    keys = to_ordered_ints(best)
    low, high = tl.min(keys).to(tl.int64), tl.max(keys).to(tl.int64)
    count = tl.sum((keys >= low).to(tl.int32))
    while (low < high) & (count > need + need // 4):
        middle = (low + high + 1) >> 1
        reached = tl.sum((keys >= middle).to(tl.int32))
        enough = reached >= need
        count = tl.where(enough, reached, count)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return from_ordered_ints(low.to(tl.int32))


@triton.jit
def sum_chunks(
    row: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    scale: tl.tensor,
    least: tl.tensor,
    floor: tl.tensor,
    shortlist: tl.tensor,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the weight of each chunk of BLOCK tokens, float32 [CHUNKS], and the number of tokens that reach `floor`.

    The ranks of the first CAPACITY of those tokens are written to `shortlist`, in any order. Tokens with a logit of
    -inf are left out.
    """
    lanes = tl.arange(0, BLOCK)
    chunks = tl.arange(0, CHUNKS)
    sums = tl.zeros([CHUNKS], tl.float32)
    near = tl.zeros([BLOCK], tl.int64)
    for chunk in range(tl.cdiv(vocabulary, BLOCK)):
        ids = chunk * BLOCK + lanes
        values = tl.load(row + ids, mask=ids < vocabulary, other=-float("inf"))
        sums = tl.where(chunks == chunk, tl.sum(weights_of(values, peak, scale, least)), sums)
        near |= tl.where((values >= floor) & (values > -float("inf")), tl.full([], 1, tl.int64) << chunk, 0)
    return sums, write_shortlist(row, near, shortlist, BLOCK, CAPACITY, ID_BITS)


@triton.jit
def write_shortlist(
    row: tl.tensor,
    near: tl.tensor,
    shortlist: tl.tensor,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> tl.tensor:
    """Write the ranks of up to CAPACITY tokens to `shortlist`. Returns the number of all tokens marked in `near`.

    `near` is int64 [BLOCK]: bit c of entry i is set for token c * BLOCK + i. Each round handles the lowest bit of every
    entry. Most entries have at most one bit, so there are few rounds.
    """
    count = 0
    left = tl.sum((near != 0).to(tl.int32))
    while left > 0:
        lowest = near & -near
        # the bit's index is the exponent of its value as a float
        chunk = ((lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        ranks = rank_of(tl.load(row + ids, mask=near != 0, other=0.0), ids, ID_BITS)
        entries = count + tl.cumsum((near != 0).to(tl.int32)) - 1
        tl.store(shortlist + entries, ranks, mask=(near != 0) & (entries < CAPACITY))
        count += left
        near &= near - 1
        left = tl.sum((near != 0).to(tl.int32))
    tl.debug_barrier()
    return count


@triton.jit
def weight_above(
    row: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    scale: tl.tensor,
    least: tl.tensor,
    above: tl.tensor,
    last: tl.tensor,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> tl.tensor:
    """Return the total weight of the tokens whose rank is above `above` and at least `last`, as int64.

    With COUNTED, return their number instead. The result never decreases when `above` decreases, because all sums have
    the same shape. About 14 operations per token.
    """
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        ids = start + lanes
        values = tl.load(row + ids, mask=ids < vocabulary, other=-float("inf"))
        ranks = rank_of(values, ids, ID_BITS)
        weights = (ids < vocabulary).to(tl.float32) if COUNTED else weights_of(values, peak, scale, least)
        sums += tl.where((ranks > above) & (ranks >= last), weights, 0.0)
    total = tl.sum(sums)
    return total.to(tl.int64) if COUNTED else to_fixed_point(total)


@triton.jit
def find_cutoff(
    row: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    scale: tl.tensor,
    least: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    limit: tl.tensor,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> tl.tensor:
    """Return the lowest rank from `first` down to `last` such that the weight above it is less than `limit`.

    The search bisects ranks: one `weight_above` pass per bit of a rank, about 50 in total.
    """
    low, high = last, first
    while low < high:
        middle = (low + high) >> 1
        fits = weight_above(row, vocabulary, peak, scale, least, middle, last, COUNTED, BLOCK, ID_BITS) < limit
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return high


@triton.jit
def find_cutoff_in_list(
    ranks: tl.tensor, weights: tl.tensor, first: tl.tensor, last: tl.tensor, limit: tl.tensor
) -> tl.tensor:
    """Like `find_cutoff`, but for tokens in a list.

    `ranks` and `weights` are int64, in any order, and include `first` and `last`. Both ends of the interval are always
    ranks in the list, so for a hundred tokens the search takes few steps.
    """
    low, high = last, first
    while low < high:
        middle = (low + high) >> 1
        above = ranks > middle
        if tl.sum(tl.where(above, weights, 0)) < limit:
            high = tl.max(tl.where(above, BELOW_ALL, ranks))
        else:
            low = tl.min(tl.where(above, ranks, -BELOW_ALL))
    return high


@triton.jit
def draw_limit(uniform: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """Return the limit with which `find_cutoff` selects the token for a uniform number in [0, 1).

    The selected token is the last one whose preceding weight is at most uniform * weight. The limit is that integer
    plus 1.
    """
    return tl.minimum((uniform * weight.to(tl.float64)).to(tl.int64) + 1, weight)


@triton.jit
def top_p_limit(share: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """Return the limit with which `find_cutoff` selects the last token that top-p keeps.

    Top-p keeps `share` of the total `weight`.
    """
    return tl.ceil(share * weight.to(tl.float64)).to(tl.int64)
