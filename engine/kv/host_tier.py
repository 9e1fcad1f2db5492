"""HostTier: the host pools, which hold blocks of preempted requests, and copies of cached blocks.

When a request is preempted, its blocks are copied here. Full blocks are published under their keys, so that other
requests find them. Cached blocks that the device pools are about to evict are copied in advance, at most
DEMOTED_AT_ONCE per group in one copy. A device without host pools copies nothing.
"""

from collections.abc import Sequence
from itertools import islice

from engine.config import BLOCK_SIZE, EngineConfig
from engine.cost_model import CostModel
from engine.kv.blocks import NULL_BLOCK, BlockPool
from engine.kv.groups import Group
from engine.kv.request_blocks import RequestBlocks, SavedBlocks
from engine.kv.transfers import Demoting, MoveBlock, PoolBlock, Saving, TransferHandle, Transfers

DEMOTED_AT_ONCE = 8  # maximum number of cached blocks per group in one copy
# The goal is that 1 / READY_FRACTION of a device pool can be allocated at no cost, because a block is empty or has a
# copy in the host pool.
READY_FRACTION = 4


class HostTier:
    """The host pools, one per group, and the copies to and from them."""

    def __init__(
        self,
        config: EngineConfig,
        groups: Sequence[Group],
        pools: Sequence[BlockPool],
        transfers: Transfers,
        costs: CostModel,
    ) -> None:
        self.pools = pools
        self._block_bytes = [group.block_bytes for group in config.groups]
        self._transfers = transfers
        self._groups = groups
        self._costs = costs
        self._is_demoting = False

    def num_bytes(self, held: RequestBlocks) -> int:
        """Return the size of the blocks that a request needs to resume."""
        return sum(
            size * len(group.live_blocks(held)) for size, group in zip(self._block_bytes, self._groups, strict=True)
        )

    def save(self, held: RequestBlocks) -> bool:
        """Start copying the blocks that a request needs to resume.

        The caller may release the device blocks immediately. Returns False and changes nothing if the host pools lack
        free blocks.
        """
        live = [group.live_blocks(held) for group in self._groups]
        if not self.pools or any(len(it) > pool.num_free for it, pool in zip(live, self.pools, strict=True)):
            return False
        computed = held.request.num_computed
        moves: list[MoveBlock] = []
        indices: list[int] = []  # index in the block table, for each move
        saved: list[list[tuple[int, int]]] = []
        for number, (blocks, pool) in enumerate(zip(live, self.pools, strict=True)):
            saved.append([])
            for index, block in blocks:
                target = self._known(pool, number, held, index, computed)
                if target == NULL_BLOCK:
                    (target,) = pool.allocate(1)
                    moves.append(MoveBlock(number, block, target, to_host=True))
                    indices.append(index)
                else:
                    pool.hold(target)
                saved[-1].append((index, target))
        held.saved = SavedBlocks(computed, tuple(saved), is_there=not moves)
        if moves:
            self._transfers.move(moves, Saving(held, held.saved, moves, indices))
        return True

    def finish_saving(self, saving: Saving, handle: TransferHandle) -> None:
        """Handle the end of a copy of a preempted request's blocks to the host pools."""
        ok = self.observe(saving.moves, handle)
        saving.saved.is_there, saving.saved.is_lost = ok, not ok
        for move, index in zip(saving.moves, saving.indices, strict=True) if ok else ():
            if self._has_key(move.group, saving.held, index, saving.saved.num_computed):
                self.pools[move.group].publish(move.target, *saving.held.content(index))

    def sources(self, held: RequestBlocks, saved: SavedBlocks) -> list[dict[int, PoolBlock]]:
        """Return the sources of the saved blocks by block index, one dictionary per group.

        A source is in the device pool if the block is still cached there, otherwise in the host pool.
        """
        found: list[dict[int, PoolBlock]] = []
        for number, (group, blocks, pool) in enumerate(zip(self._groups, saved.blocks, self.pools, strict=True)):
            found.append({})
            for index, block in blocks:
                here = self._known(group.pool, number, held, index, saved.num_computed)
                found[-1][index] = (group.pool, here) if here else (pool, block)
        return found

    def drop(self, held: RequestBlocks) -> None:
        """Release the saved blocks of a request."""
        if held.saved is not None:
            for pool, blocks in zip(self.pools, held.saved.blocks, strict=True):
                pool.release([block for _, block in blocks])
            held.saved = None

    def demote(self) -> None:
        """Start copying cached blocks that the device pools will evict soon. Each block is copied once."""
        if not self.pools or self._is_demoting:
            return
        moves: list[MoveBlock] = []
        for number, (group, host) in enumerate(zip(self._groups, self.pools, strict=True)):
            for block in _to_demote(group.pool):
                if host.num_free and not host.find(*group.pool.content(block)):
                    (target,) = host.allocate(1)
                    moves.append(MoveBlock(number, block, target, to_host=True))
                group.pool.mark_on_host(block)
        if moves:
            self._is_demoting = True
            self._transfers.move(moves, Demoting(moves), cold=True)
        for move in moves:
            self.pools[move.group].release([move.target])  # the pending copy holds the block from here on

    def finish_demoting(self, demoting: Demoting, handle: TransferHandle) -> None:
        """Handle the end of a copy of cached blocks to the host pools."""
        self._is_demoting = False
        for move in demoting.moves if self.observe(demoting.moves, handle) else ():
            source = self._groups[move.group].pool
            if source.is_findable(move.source):  # the block may have been unpublished during the copy
                self.pools[move.group].publish(move.target, *source.content(move.source))

    def observe(self, moves: Sequence[MoveBlock], handle: TransferHandle) -> bool:
        """Record the cost of a copy between the pools. Returns whether it succeeded."""
        if not handle.failed:
            self._costs.observe_copy(sum(self._block_bytes[move.group] for move in moves), handle.seconds)
        return not handle.failed

    def _known(self, pool: BlockPool, number: int, held: RequestBlocks, index: int, computed: int) -> int:
        """Return the block in `pool` with the content of a request's block, or NULL_BLOCK."""
        return pool.find(*held.content(index)) if self._has_key(number, held, index, computed) else NULL_BLOCK

    def _has_key(self, number: int, held: RequestBlocks, index: int, computed: int) -> bool:
        """Whether the request's block at `index` is full and has a key."""
        full = (index + 1) * BLOCK_SIZE <= computed and index < len(held.keys)
        return full and not self._groups[number].is_state


def _to_demote(pool: BlockPool) -> list[int]:
    """Return the blocks to copy to the host pool: those that will be evicted next and have no copy yet.

    The result is empty if enough blocks are ready (see READY_FRACTION).
    """
    missing = pool.num_usable // READY_FRACTION - (pool.num_free - pool.num_cached)
    next_taken = islice(pool.in_eviction_order(), max(0, missing))
    return list(islice((block for block in next_taken if not pool.is_on_host(block)), DEMOTED_AT_ONCE))
