"""Building blocks of the sampling kernels: passes over one row of logits.

Tokens are ordered by descending logit, ties by ascending id. A token's rank is an int64 that is larger for tokens
earlier in this order: its logit as an ordered integer, then its reversed id. A token's weight is exp((logit - peak) /
temperature), or 0 if min-p drops it. `scale` is log2(e) / temperature, so the peak has weight 1. Weights are compared
as 64-bit fixed-point integers, in which ONE represents 1.0. All sums have a fixed shape, so results depend only on the
row.

Functions of several kernels use no global constants: Triton's keys of compiled kernels then depend on the order in
which kernels are launched, and kernels that were compiled in advance are not found.
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
def scale_of(temperature: tl.tensor, COOLEST: tl.constexpr) -> tl.tensor:
    return 1.4426950408889634 / tl.maximum(temperature, COOLEST)  # log2(e) / temperature


@triton.jit
def weights_of(values: tl.tensor, peak: tl.tensor, scale: tl.tensor, least: tl.tensor) -> tl.tensor:
    weights = tl.exp2((values - peak) * scale)
    return tl.where(weights >= least, weights, 0.0)


@triton.jit
def to_fixed_point(weights: tl.tensor) -> tl.tensor:
    """Convert weights to int64 fixed point, rounded down."""
    return (weights.to(tl.float64) * ONE).to(tl.int64)


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
