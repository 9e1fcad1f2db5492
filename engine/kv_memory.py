"""KVMemory: the blocks of every request, in all groups and both tiers, device pools and host pools. No torch.

A request joins with the longest prefix that every group has, takes blocks as it goes on, shares all it has with those
that fork off, and gives everything back at once. What is in the host pool is copied to the device on the way in; a
request that yields may have its blocks copied out, full ones under their keys, so that they serve everyone else, too.

Copies are under way while other things happen: both sides are held until they have ended (see `engine.mover`). Refuses
to know who should run and who should yield.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.blocks import NULL_BLOCK, BlockKey, BlockPool, block_key, root_key
from engine.config import BLOCK_SIZE, EngineConfig
from engine.cost_model import CostModel
from engine.host_tier import HostTier
from engine.kv_groups import Group, blocks_for, content, make_groups
from engine.mover import Move, Mover
from engine.request import BlockCopy, Request
from engine.transfers import Source


@dataclass(frozen=True, slots=True)
class Prefix:
    """What is cached of a request's beginning."""

    blocks: int
    sources: Sequence[dict[int, Source]]  # of each group, by place: what tokens behind it look at


class KVMemory:
    """`arrived` is told, when copies are polled, of each request whose blocks came from the host pool, or did not."""

    def __init__(
        self, config: EngineConfig, mover: Mover | None, costs: CostModel, arrived: Callable[[Request, bool], None]
    ) -> None:
        self.groups = make_groups(config)
        self.host = HostTier(config, self.groups, mover, costs)
        self._config = config
        self._arrived = arrived

    # -- what there is

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """Of both tiers."""
        return (*(group.pool for group in self.groups), *self.host.pools)

    @property
    def most_tokens(self) -> int:
        """That one request can hold, alone."""
        whole = [group.pool.num_usable for group in self.groups if group.needs_all]
        return min(whole, default=self._config.num_blocks - 1) * BLOCK_SIZE

    def has_room(self, request: Request, stop: int) -> bool:
        """Whether the request's tokens up to `stop` can get their blocks now."""
        return all(group.needed(request, stop) <= group.pool.num_free for group in self.groups)

    def will_have_room(self, request: Request, stop: int) -> bool:
        """The same, once the copies under way have ended."""
        return all(
            group.needed(request, stop) <= group.pool.num_free + self.host.transfers.returning(number)
            for number, group in enumerate(self.groups)
        )

    def check(self) -> None:
        """Raise RuntimeError where a pool is not what it should be."""
        for pool in self.pools:
            pool.check()

    # -- joining and going on

    def look_up(self, request: Request, most: int) -> Prefix:
        """The longest prefix of a request that every group has, at most `most` blocks of it. Nobody holds it yet."""
        self._extend_keys(request, request.num_tokens // BLOCK_SIZE)
        found, blocks = [], most
        for number in range(len(self.groups)):
            found.append(self._find(number, request, blocks))
            while not _all_seen(self.groups[number], found[-1], blocks):
                blocks -= 1
        while not all(_all_seen(group, places, blocks) for group, places in zip(self.groups, found, strict=True)):
            blocks -= 1
        seen = [
            {place: source for place, source in places.items() if place < blocks and group.looks_at(place, blocks)}
            for group, places in zip(self.groups, found, strict=True)
        ]
        return Prefix(blocks, seen)

    def join(self, request: Request, prefix: Prefix, stop: int) -> bool:
        """Give a request a prefix that was just looked up. False, and nothing has changed, where the blocks that it
        still needs up to `stop` are not free.

        Where some of it lies in the host pool, `request.is_arriving` until `arrived` is told.
        """
        request.num_computed = request.num_scheduled = prefix.blocks * BLOCK_SIZE
        request.num_published = prefix.blocks
        return self._bring(request, prefix.blocks, prefix.sources, stop)

    def take(self, request: Request, stop: int) -> tuple[BlockCopy, ...]:
        """Blocks for the request's tokens up to `stop`: there is room. The copies go before the step."""
        return tuple(copy for group in self.groups for copy in group.take(request, stop))

    def cut(self, request: Request, stop: int) -> int:
        return min(group.cut(request, stop) for group in self.groups)

    def collected(self, copies: Sequence[BlockCopy]) -> None:
        """The step that some copies went before has completed."""
        for copy in copies:
            if copy.source != NULL_BLOCK:
                self.groups[copy.group].pool.release([copy.source])

    def undo(self, request: Request, copies: Sequence[BlockCopy]) -> None:
        """The step that some copies would have gone before has not happened."""
        for copy in reversed(copies):
            self.groups[copy.group].undo(request, copy)

    def publish(self, request: Request) -> None:
        """Make the blocks that are full now findable."""
        self._extend_keys(request, request.num_computed // BLOCK_SIZE)
        for group in self.groups:
            group.publish(request)
        request.num_published = request.num_computed // BLOCK_SIZE

    def fork(self, parent: Request, child: Request, tokens: int) -> None:
        """Let `child` go on behind the first `tokens` computed tokens of `parent`, whose blocks they share."""
        for group, table, own in zip(self.groups, parent.block_tables, child.block_tables, strict=True):
            own[:] = table[: 1 if group.is_state else blocks_for(tokens)]
            for block in own:
                if block != NULL_BLOCK:
                    group.pool.hold(block)
        child.block_keys[:] = parent.block_keys[: tokens // BLOCK_SIZE]
        child.num_computed = child.num_scheduled = tokens
        child.num_published = min(parent.num_published, len(child.block_keys))

    def release(self, request: Request) -> None:
        """Everything a request holds in either tier. No step under way uses it; copies hold for themselves."""
        self._empty_tables(request)
        self.host.drop(request)
        request.is_arriving = False

    # -- to the host pool and back

    def save(self, request: Request) -> bool:
        """Copy what the request needs to go on to the host pool, and release its blocks here when that is done.

        False, and nothing has changed, where the host pool has no room.
        """
        if not self.host.save(request):
            return False
        self._empty_tables(request)
        return True

    def restore(self, request: Request, stop: int) -> bool:
        """Bring a saved request's blocks back; False where there is no room yet. `request.is_arriving` until then."""
        record = request.saved
        if record is None or not record.is_there:
            return False
        request.num_computed = request.num_scheduled = record.num_computed
        request.num_published = min(len(request.block_keys), record.num_computed // BLOCK_SIZE)
        return self._bring(request, blocks_for(record.num_computed), self.host.sources(request, record), stop)

    # -- pieces

    def _extend_keys(self, request: Request, blocks: int) -> None:
        keys = request.block_keys
        parent = BlockKey(keys[-1]) if keys else root_key(*self._config.cache_salt, request.origin.cache_salt)
        for place in range(len(keys), blocks):
            parent = block_key(parent, request.token_ids(place * BLOCK_SIZE, (place + 1) * BLOCK_SIZE))
            keys.append(parent)

    def _find(self, number: int, request: Request, most: int) -> dict[int, Source]:
        """Where the request's first blocks are, in either tier. Up to the first that is missing, if all are needed."""
        found: dict[int, Source] = {}
        group, tiers = self.groups[number], [self.groups[number].pool, *self.host.pools[number : number + 1]]
        for place in range(most):
            key, token_ids = content(request, place)
            here = next(((pool, block) for pool in tiers if (block := pool.find(key, token_ids))), None)
            if here is not None:
                found[place] = here
            elif group.looks_at(place, most):
                return found
        return found

    def _bring(self, request: Request, blocks: int, wanted: Sequence[dict[int, Source]], stop: int) -> bool:
        """Make tables of `blocks` blocks from what is wanted, by place; the rest of them is not looked at any more."""
        coming: list[list[tuple[int, int]]] = []  # of each group: (place in the table, block of the host pool)
        for group, table, sources in zip(self.groups, request.block_tables, wanted, strict=True):
            table[:] = [NULL_BLOCK] * (len(sources) if group.is_state else blocks)
            coming.append([])
            for place, (pool, block) in sources.items():
                at = 0 if group.is_state else place
                if pool is group.pool:
                    pool.hold(block)
                    table[at] = block
                else:
                    coming[-1].append((at, block))
        if not all(
            len(new) + group.needed(request, stop) <= group.pool.num_free
            for group, new in zip(self.groups, coming, strict=True)
        ):
            self._empty_tables(request)
            return False
        self._fetch(request, coming)
        return True

    def _fetch(self, request: Request, coming: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Copy blocks of the host pool into fresh ones of the request's tables."""
        moves: list[Move] = []
        for number, (group, table, blocks) in enumerate(zip(self.groups, request.block_tables, coming, strict=True)):
            for at, source in blocks:
                (table[at],) = group.pool.allocate(1)
                moves.append(Move(number, source, table[at], to_host=False))

        def then(ok: bool) -> None:
            if not request.is_arriving:
                return  # it was ended meanwhile
            request.is_arriving = False
            self.host.drop(request)
            if ok:
                self.publish(request)
            else:
                self._empty_tables(request)
                for move in moves:  # else it would be tried again, and again
                    self.host.pools[move.group].unpublish(move.source)
            self._arrived(request, ok)

        if moves:
            request.is_arriving, request.num_published = True, 0
            self.host.transfers.start(moves, then)
        else:
            self.host.drop(request)

    def _empty_tables(self, request: Request) -> None:
        for group, table in zip(self.groups, request.block_tables, strict=True):
            group.pool.release([block for block in table if block != NULL_BLOCK])
            table.clear()
        request.num_computed = request.num_scheduled = request.num_published = 0


def _all_seen(group: Group, found: dict[int, Source], blocks: int) -> bool:
    """Whether everything that tokens behind the first `blocks` blocks look at is among what was found."""
    for place in range(blocks - 1, -1, -1):
        if not group.looks_at(place, blocks):
            return True
        if place not in found:
            return False
    return True
