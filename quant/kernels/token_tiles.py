"""Group the tokens of a step by expert, for products in which each token uses some of several equal matrices.

A token has one slot for each expert that it uses: slot = token * active + choice. A tile is at most a fixed number of
slots of the same expert. The number of tiles on the grid depends only on the number of slots, so that a launch can be
recorded: tiles that are not needed have no expert, and their programs end at once.

The kernel reads 4 bytes per slot and expert from the L2 cache, and writes 4 bytes per slot: 4096 tokens with 8 of 128
experts take 17 MB of reads. A step of few tokens needs no kernel: each slot is a tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

NO_EXPERT = -1
BLOCK = 1024  # slots that a program reads at a time
LEAST_BINS = 128


@triton.jit
def slots_of_tile(
    experts: tl.tensor, slots: tl.tensor, tile: tl.tensor, index: tl.tensor, tokens: tl.tensor, TOKENS: tl.constexpr
) -> tl.tensor:
    """Return the slots at `index` of a tile, or its tokens if there are no experts.

    `tokens`: their number, which is also returned for an index after the last slot.
    """
    if experts is None:
        found = tile * TOKENS + index
    elif slots is None:
        found = tl.where(index == 0, tile, tokens)
    else:
        found = tl.load(slots + tile * TOKENS + index)
    return found


@triton.jit
def input_rows(experts: tl.tensor, slots: tl.tensor, sharing: tl.tensor) -> tl.tensor:
    """Return the rows of x that slots multiply: `sharing` adjacent slots have the same row."""
    return slots if experts is None else slots // sharing


@triton.jit(do_not_specialize=["count", "experts", "tiles"])
def _tiles_kernel(
    ids: tl.tensor,
    tile_experts: tl.tensor,
    slots: tl.tensor,
    count: tl.tensor,
    experts: tl.tensor,
    tiles: tl.tensor,
    TOKENS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the tiles of one expert: a counting sort, in which every program counts the slots of all experts."""
    expert = tl.program_id(0)
    block, bins = tl.arange(0, BLOCK), tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, count, BLOCK):
        found = tl.load(ids + start + block, mask=start + block < count, other=BINS - 1)
        counts += tl.histogram(found, BINS)
    own_tiles = tl.where(bins < experts, (counts + TOKENS - 1) // TOKENS, 0)
    first = tl.sum(tl.where(bins < expert, own_tiles, 0), 0)
    own = tl.sum(tl.where(bins == expert, counts, 0), 0)
    last = first + (own + TOKENS - 1) // TOKENS
    for start in range(first, last, BLOCK):
        tl.store(tile_experts + start + block, expert + block * 0, mask=start + block < last)
    padding = first * TOKENS + own + tl.arange(0, TOKENS)
    tl.store(slots + padding, count + padding * 0, mask=padding < last * TOKENS)
    free = first * TOKENS
    for start in range(0, count, BLOCK):
        found = tl.load(ids + start + block, mask=start + block < count, other=BINS - 1)
        is_own = (found == expert).to(tl.int32)
        tl.store(slots + free + tl.cumsum(is_own, 0) - 1, start + block, mask=is_own != 0)
        free += tl.sum(is_own, 0)
    if expert == experts - 1:
        for start in range(last, tiles, BLOCK):
            tl.store(tile_experts + start + block, block * 0 - 1, mask=start + block < tiles)


@dataclass(frozen=True, slots=True)
class TokenTiles:
    """The slots of a step in tiles."""

    experts: Tensor  # int32 [tiles]; NO_EXPERT: the tile has no slots
    # int32 [tiles * tokens], padded with `count` in each tile; None: each slot is a tile
    slots: Tensor | None
    tokens: int  # slots of a tile
    count: int  # slots
    active: int  # slots of a token
    ids: Tensor  # int32 [slots]: the expert of each slot

    @property
    def number(self) -> int:
        """Number of tiles."""
        return len(self.experts)


def token_tiles(ids: Tensor, experts: int, tokens: int) -> TokenTiles:
    """Return tiles of `tokens` slots, a power of two. `ids`: the experts of each token, int32 [tokens, active].

    Ids must be in range(experts).
    """
    count, active = ids.numel(), ids.shape[1]
    if tokens == 1 or not count:
        return TokenTiles(ids.flatten(), None, 1, count, active, ids.flatten())
    tiles = most_tiles(count, experts, tokens)
    tile_experts = torch.empty(tiles, dtype=torch.int32, device=ids.device)
    slots = torch.empty(tiles * tokens, dtype=torch.int32, device=ids.device)
    bins = max(LEAST_BINS, triton.next_power_of_2(experts + 1))
    _tiles_kernel[experts,](ids, tile_experts, slots, count, experts, tiles, TOKENS=tokens, BINS=bins, BLOCK=BLOCK)
    return TokenTiles(tile_experts, slots, tokens, count, active, ids.flatten())


def most_tiles(count: int, experts: int, tokens: int) -> int:
    """Return the largest number of tiles that `count` slots can need: each expert in use may have a partial tile."""
    return (count + min(count, experts) * (tokens - 1)) // tokens
