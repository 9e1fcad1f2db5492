"""The host pools: a second home for blocks, of requests that yielded and of prefixes that nobody holds. No torch.

What a request needs to go on is copied here when it yields; full blocks under their keys, so that they serve everyone
else, too. Content that the device pools are about to give up is copied ahead, a little at a time. Where a device has no
host pool there are no pools here, and nothing is ever copied. Refuses to know who yields, and to whom.
"""

from collections.abc import Sequence
from itertools import islice

from engine.config import BLOCK_SIZE
from engine.cost_model import CostModel
from engine.kv.blocks import NULL_BLOCK, BlockPool
from engine.kv.groups import Group, content
from engine.kv.mover import Move, MoveTicket
from engine.kv.transfers import PoolBlock, Transfers
from engine.request import Request, SavedBlocks

DEMOTED_AT_ONCE = 8  # cold blocks of a group that are copied together
READY = 4  # one in so many blocks of a device pool should be ready to be taken, without content or with a copy of it


class HostTier:
    """One pool for each group, and the copies to and from them."""

    def __init__(
        self, groups: Sequence[Group], pools: Sequence[BlockPool], transfers: Transfers, costs: CostModel
    ) -> None:
        self.pools = pools
        self._transfers = transfers
        self._groups = groups
        self._costs = costs
        self._is_demoting = False

    def save(self, request: Request) -> bool:
        """Copy what a request needs to go on; it may let go of its blocks at once.

        False, and nothing has changed, where there is no room.
        """
        live = [group.live(request) for group in self._groups]
        if not self.pools or any(len(it) > pool.num_free for it, pool in zip(live, self.pools, strict=True)):
            return False
        moves: list[Move] = []
        places: list[int] = []  # of what is moved
        saved: list[list[tuple[int, int]]] = []
        for number, (blocks, pool) in enumerate(zip(live, self.pools, strict=True)):
            saved.append([])
            for place, block in blocks:
                target = self._known(pool, number, request, place, request.num_computed)
                if target == NULL_BLOCK:
                    (target,) = pool.allocate(1)
                    moves.append(Move(number, block, target, to_host=True))
                    places.append(place)
                else:
                    pool.hold(target)
                saved[-1].append((place, target))
        record = request.saved = SavedBlocks(request.num_computed, tuple(saved))

        def then(ticket: MoveTicket | None) -> None:
            ok = self.observe(moves, ticket)
            record.is_there, record.is_lost = ok, not ok
            for move, place in zip(moves, places, strict=True) if ok else ():
                if self._has_key(move.group, request, place, record.num_computed):
                    self.pools[move.group].publish(move.target, *content(request, place))

        self._transfers.move(moves, then)
        return True

    def sources(self, request: Request, record: SavedBlocks) -> list[dict[int, PoolBlock]]:
        """For each group, by place: where what was saved is now; on the device where that still has it."""
        found: list[dict[int, PoolBlock]] = []
        for number, (group, blocks, pool) in enumerate(zip(self._groups, record.blocks, self.pools, strict=True)):
            found.append({})
            for place, block in blocks:
                here = self._known(group.pool, number, request, place, record.num_computed)
                found[-1][place] = (group.pool, here) if here else (pool, block)
        return found

    def drop(self, request: Request) -> None:
        """Let go of what was saved of a request."""
        if request.saved is not None:
            for pool, blocks in zip(self.pools, request.saved.blocks, strict=True):
                pool.release([block for _, block in blocks])
            request.saved = None

    @staticmethod
    def is_on_its_way(request: Request) -> bool:
        """Whether a request's blocks are still being copied to here."""
        return request.saved is not None and not (request.saved.is_there or request.saved.is_lost)

    def demote(self) -> None:
        """Copy the content that device pools are about to give up, a few blocks at a time, each once."""
        if not self.pools or self._is_demoting:
            return
        moves: list[Move] = []
        for number, (group, host) in enumerate(zip(self._groups, self.pools, strict=True)):
            for block in _to_demote(group.pool):
                if host.num_free and not host.find(*group.pool.content(block)):
                    (target,) = host.allocate(1)
                    moves.append(Move(number, block, target, to_host=True))
                group.pool.mark_copied(block)

        def then(ticket: MoveTicket | None) -> None:
            self._is_demoting = False
            for move in moves if self.observe(moves, ticket) else ():
                source = self._groups[move.group].pool
                if source.is_findable(move.source):  # it may have been forgotten meanwhile
                    self.pools[move.group].publish(move.target, *source.content(move.source))

        self._is_demoting = True
        self._transfers.move(moves, then, cold=True)
        for move in moves:
            self.pools[move.group].release([move.target])  # the copy holds it now

    def observe(self, moves: Sequence[Move], ticket: MoveTicket | None) -> bool:
        """Some moves have ended: whether they went well."""
        if ticket is not None and not ticket.failed:
            self._costs.observe_copy(len(moves), ticket.seconds)
        return ticket is None or not ticket.failed

    def _known(self, pool: BlockPool, number: int, request: Request, place: int, computed: int) -> int:
        """The block of a pool with what is at a place of a request, or NULL_BLOCK."""
        return pool.find(*content(request, place)) if self._has_key(number, request, place, computed) else NULL_BLOCK

    def _has_key(self, number: int, request: Request, place: int, computed: int) -> bool:
        """Whether a place of a request has a full block, which can be found by its key."""
        full = (place + 1) * BLOCK_SIZE <= computed and place < len(request.block_keys)
        return full and not self._groups[number].is_state


def _to_demote(pool: BlockPool) -> list[int]:
    """The coldest blocks whose content has no copy, where too few are ready to be taken."""
    missing = pool.num_usable // READY - (pool.num_free - pool.num_cached)
    next_taken = islice(pool.coldest(), max(0, missing))
    return list(islice((block for block in next_taken if not pool.is_copied(block)), DEMOTED_AT_ONCE))
