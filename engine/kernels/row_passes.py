"""Passes over one row of logits, which kernels are made of: its peaks, its weights, its most likely tokens, and where a
given weight ends.

Tokens are ordered from the most likely down, ties by id. A token's rank is one 64-bit integer that grows with its place
in that order backwards: the logit as an ordered integer, then the id, reversed. A token weighs exp((logit - peak) /
temperature), and nothing where min-p drops it; a `scale` is log2(e) / temperature, so that the peak weighs 1. Where
weights are compared, they are 64-bit integers, of which ONE stands for 1. All sums have a fixed shape: what is found
depends on nothing but the row. Refuses to know requests.
"""

import triton
import triton.language as tl

ONE = tl.constexpr(2.0**40)  # what is lost is less than what float32 loses of a sum
BELOW_ALL = tl.constexpr(-(1 << 62))  # less than any rank


@triton.jit
def ordered(values: tl.tensor) -> tl.tensor:
    """Integers, int32, that compare as the floats do; -0.0 is 0.0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(keys: tl.tensor) -> tl.tensor:
    """The floats of such integers."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def rank_of(values: tl.tensor, ids: tl.tensor, ID_BITS: tl.constexpr) -> tl.tensor:
    return (ordered(values).to(tl.int64) << ID_BITS) + ((1 << ID_BITS) - 1 - ids)


@triton.jit
def id_of(ranks: tl.tensor, ID_BITS: tl.constexpr) -> tl.tensor:
    return ((1 << ID_BITS) - 1 - (ranks & ((1 << ID_BITS) - 1))).to(tl.int32)


@triton.jit
def logit_of(ranks: tl.tensor, ID_BITS: tl.constexpr) -> tl.tensor:
    return unordered((ranks >> ID_BITS).to(tl.int32))


@triton.jit
def weights_of(values: tl.tensor, peak: tl.tensor, scale: tl.tensor, least: tl.tensor) -> tl.tensor:
    weights = tl.exp2((values - peak) * scale)
    return tl.where(weights >= least, weights, 0.0)


@triton.jit
def as_integers(weights: tl.tensor) -> tl.tensor:
    """int64, rounded down."""
    return (weights.to(tl.float64) * ONE).to(tl.int64)


@triton.jit
def peaks(row: tl.tensor, vocabulary: tl.tensor, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The largest of every BLOCK-th logit, float32 [BLOCK], NaN where there is one, and the lowest id that has it.

    3 operations for each token.
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
def top_of(best: tl.tensor, ids: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The largest logit, the lowest id that has it, and whether all are numbers."""
    peak = tl.max(best)
    return peak, tl.min(tl.where(best == peak, ids, 0x7FFFFFFF)), tl.sum((best != best).to(tl.int32)) == 0


@triton.jit
def floor_of(best: tl.tensor, need: tl.tensor) -> tl.tensor:
    """A logit that at least `need` of the peaks reach, so that as many tokens do, and not many more than those."""
    keys = ordered(best)
    low, high = tl.min(keys).to(tl.int64), tl.max(keys).to(tl.int64)
    count = tl.sum((keys >= low).to(tl.int32))
    while (low < high) & (count > need + need // 4):
        middle = (low + high + 1) >> 1
        reached = tl.sum((keys >= middle).to(tl.int32))
        enough = reached >= need
        count = tl.where(enough, reached, count)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return unordered(low.to(tl.int32))


@triton.jit
def weigh(
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
    """The weight of each chunk of BLOCK tokens, float32 [CHUNKS], and how many tokens reach the floor.

    The ranks of the first CAPACITY of those go to `shortlist`, in any order. Tokens that are impossible never do.
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
    return sums, gather(row, near, shortlist, BLOCK, CAPACITY, ID_BITS)


@triton.jit
def gather(
    row: tl.tensor,
    near: tl.tensor,
    shortlist: tl.tensor,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> tl.tensor:
    """The ranks of the first CAPACITY tokens of which `near`, int64 [BLOCK], has a bit: of each place in a chunk, bit c
    stands for chunk c. How many there are in all.

    Few places have more than one, so that this goes round a few times.
    """
    count = 0
    left = tl.sum((near != 0).to(tl.int32))
    while left > 0:
        lowest = near & -near
        # The bit's number is the exponent of its value.
        chunk = ((lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        ranks = rank_of(tl.load(row + ids, mask=near != 0, other=0.0), ids, ID_BITS)
        places = count + tl.cumsum((near != 0).to(tl.int32)) - 1
        tl.store(shortlist + places, ranks, mask=(near != 0) & (places < CAPACITY))
        count += left
        near &= near - 1
        left = tl.sum((near != 0).to(tl.int32))
    tl.debug_barrier()
    return count


@triton.jit
def mass(
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
    """What the tokens above one rank weigh together, as far down as the rank `last`, int64; or how many there are,
    COUNTED.

    It never falls when `above` does, as all sums are of the same shape. About 14 operations for each token.
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
    return total.to(tl.int64) if COUNTED else as_integers(total)


@triton.jit
def end_of(
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
    """The rank of the last token, from `first` down to `last`, above which lies less than `limit`: see `mass`.

    By bisection of ranks: one pass for each of their bits, of which there are about 50.
    """
    low, high = last, first
    while low < high:
        middle = (low + high) >> 1
        fits = mass(row, vocabulary, peak, scale, least, middle, last, COUNTED, BLOCK, ID_BITS) < limit
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return high


@triton.jit
def end_among(ranks: tl.tensor, weights: tl.tensor, first: tl.tensor, last: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """The same of tokens given by ranks and weights, int64, in any order; `first` and `last` are among them.

    As both ends of what is left are tokens always, a few steps tell a hundred tokens apart.
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
def beyond(uniform: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """A limit for the token that a number in [0, 1) falls on, of tokens that weigh so much together: what lies above it
    is at most that share of the weight, which as integers is less than one more."""
    return tl.minimum((uniform * weight.to(tl.float64)).to(tl.int64) + 1, weight)


@triton.jit
def up_to(share: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """A limit for the last token above which lies less than a share of a weight."""
    return tl.ceil(share * weight.to(tl.float64)).to(tl.int64)
