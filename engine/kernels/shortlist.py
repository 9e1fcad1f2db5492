"""Find the most likely tokens of a row from the largest logits of its groups. See `engine.kernels.chunk_passes`."""

import triton
import triton.language as tl

from engine.kernels.chunk_passes import id_in_group
from engine.kernels.row_passes import from_ordered_ints, rank_of


@triton.jit
def load_groups(groups: tl.tensor, count: tl.tensor, GROUPS: tl.constexpr, CHUNKS: tl.constexpr) -> tl.tensor:
    """Return the largest logits of the groups of a row with `count` chunks: ordered int32 [CHUNKS * GROUPS]."""
    numbers = tl.arange(0, CHUNKS * GROUPS)
    return tl.load(groups + numbers, mask=numbers < count * GROUPS, other=-0x7F800001)  # -inf


@triton.jit
def shortlist_threshold(keys: tl.tensor, need: tl.tensor) -> tl.tensor:
    """Return a threshold that at least `need` tokens reach if there are as many groups, because as many maxima do.

    `keys` are the largest logits of the groups as ordered int32. The search stops early at a logit that at most 5/4 of
    `need` maxima reach.
    """
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
def write_shortlist(
    row: tl.tensor,
    vocabulary: tl.tensor,
    keys: tl.tensor,
    floor: tl.tensor,
    near: tl.tensor,
    shortlist: tl.tensor,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> tl.tensor:
    """Write the ranks of up to CAPACITY tokens that reach `floor` to `shortlist`, in any order.

    Returns the number of all such tokens, or another number above CAPACITY if there are more. Tokens with a logit of
    -inf are left out. Only groups whose maximum reaches `floor` are read; `near` is memory for their numbers, int32
    [CHUNKS * GROUPS].
    """
    best = from_ordered_ints(keys)
    reached = (best >= floor) & (best > -float("inf"))
    tl.store(near + tl.cumsum(reached.to(tl.int32)) - 1, tl.arange(0, CHUNKS * GROUPS), mask=reached)
    tl.debug_barrier()
    found = tl.sum(reached.to(tl.int32))
    count = found
    if found <= CAPACITY:
        count = write_members(row, vocabulary, floor, near, found, shortlist, BLOCK, GROUPS, CAPACITY, ID_BITS)
        tl.debug_barrier()
    return count


@triton.jit
def write_members(
    row: tl.tensor,
    vocabulary: tl.tensor,
    floor: tl.tensor,
    near: tl.tensor,
    found: tl.tensor,
    shortlist: tl.tensor,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> tl.tensor:
    """Write the ranks of the tokens that reach `floor`, of the first `found` groups in `near`. Returns their number."""
    size: tl.constexpr = BLOCK // GROUPS
    places = tl.arange(0, BLOCK)
    count = 0
    for start in range(0, found, GROUPS):
        index = start + places // size
        group = tl.load(near + index, mask=index < found, other=0)
        ids = id_in_group(group, places % size, BLOCK, GROUPS)
        values = tl.load(row + ids, mask=(index < found) & (ids < vocabulary), other=-float("inf"))
        kept = (values >= floor) & (values > -float("inf"))
        entries = count + tl.cumsum(kept.to(tl.int32)) - 1
        tl.store(shortlist + entries, rank_of(values, ids, ID_BITS), mask=kept & (entries < CAPACITY))
        count += tl.sum(kept.to(tl.int32))
    return count
