"""KVMemory: the blocks of every request, in all groups and all tiers: device pools, host pools and files. No torch.

A request joins with the longest prefix that every group has, takes blocks as it goes on, shares all it has with those
that fork off, and gives everything back at once. What is in the host pool or in files is copied to the device on the
way in; a request that yields may have its blocks copied out, full ones under their keys, so that they serve everyone
else, too. Every block that a step has filled is written to a file soon after.

Copies are under way while other things happen: both sides are held until they have ended (see `kv.mover`). Refuses
to know who should run and who should yield.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.config import BLOCK_SIZE, EngineConfig
from engine.cost_model import CostModel
from engine.counters import Counters
from engine.kv.blocks import NULL_BLOCK, BlockPool
from engine.kv.disk.run_file import RUN_BLOCKS
from engine.kv.disk.store import DiskBlock
from engine.kv.disk.tier import DiskTier
from engine.kv.groups import blocks_for, make_groups
from engine.kv.host_tier import HostTier
from engine.kv.mover import Move, Mover, MoveTicket, Reading
from engine.kv.prefixes import Prefix, Prefixes, Source
from engine.kv.transfers import Transfers
from engine.request import Origin, Request
from engine.step import BlockCopy


@dataclass(slots=True)
class _Arrival:
    """A request's blocks on their way to the device."""

    request: Request
    parts: int  # copies that have not ended
    failed: bool = False
    seconds: float = 0.0


class KVMemory:
    """`arrived` is told, when copies are polled, of each request whose blocks came from elsewhere, or did not."""

    def __init__(
        self,
        config: EngineConfig,
        mover: Mover | None,
        costs: CostModel,
        counters: Counters,
        arrived: Callable[[Request, bool], None],
        clock: Callable[[], float],
    ) -> None:
        self.groups = make_groups(config)
        device = [group.pool for group in self.groups]
        hosts = [BlockPool(config.host_blocks) for _ in device] if mover and config.host_blocks else []
        self.transfers = Transfers(mover, device, hosts)
        self.host = HostTier(self.groups, hosts, self.transfers, costs)
        self.disk = DiskTier(config, device, self.transfers, counters, clock)
        self._prefixes = Prefixes(config, self.groups, hosts, self.disk, costs)
        self._config = config
        self._costs = costs
        self._counters = counters
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

    @property
    def context(self) -> int:
        """The most tokens that any request may ever hold."""
        return min(self._config.context_length, self.most_tokens)

    def room(self, request: Request) -> int:
        """The most tokens that a request may ever hold."""
        if request.params.max_tokens is None:
            return self.context
        return min(self.context, len(request.prompt_ids) + request.params.max_tokens)

    @property
    def is_busy(self) -> bool:
        """Whether copies are under way, or due."""
        return bool(self.transfers) or self.disk.has_due

    def has_room(self, request: Request, stop: int) -> bool:
        """Whether the request's tokens up to `stop` can get their blocks now."""
        return all(group.needed(request, stop) <= group.pool.num_free for group in self.groups)

    def will_have_room(self, request: Request, stop: int) -> bool:
        """The same, once the copies under way have ended."""
        return all(
            group.needed(request, stop) <= group.pool.num_free + self.transfers.returning(number)
            for number, group in enumerate(self.groups)
        )

    def check(self) -> None:
        """Raise RuntimeError where a pool is not what it should be."""
        for pool in self.pools:
            pool.check()

    # -- joining and going on

    def look_up(self, request: Request, most: int) -> Prefix:
        """The longest prefix of a request that is cached, at most `most` blocks of it. Nobody holds it yet."""
        return self._prefixes.look_up(request, most)

    def join(self, request: Request, prefix: Prefix, stop: int) -> bool:
        """Give a request a prefix that was just looked up. False, and nothing has changed, where the blocks that it
        still needs up to `stop` are not free.

        Where some of it is not on the device, `request.is_arriving` until `arrived` is told.
        """
        request.num_computed = request.num_scheduled = prefix.blocks * BLOCK_SIZE
        request.num_published = prefix.blocks
        if not self._bring(request, prefix.blocks, prefix.sources, stop):
            return False
        if not request.num_preemptions:
            request.cache = prefix.use([group.pool for group in self.groups])
        self.disk.touch(request, prefix.blocks)
        for number, places in enumerate(prefix.sources):
            self.disk.note(number, request, places)  # who computed it may have kept it from the files
        return True

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

    def publish(self, request: Request, *, filed: Sequence[Reading] = ()) -> None:
        """Make the blocks that are full now findable, and have them written to files, but for what came from there."""
        self._prefixes.extend_keys(request, request.num_computed // BLOCK_SIZE)
        places = [group.publish(request) for group in self.groups]
        request.num_published = request.num_computed // BLOCK_SIZE
        for reading in filed:
            for block in reading.targets:
                self.groups[reading.group].pool.mark_filed(block)
        for number, of_group in enumerate(places):
            self.disk.note(number, request, of_group)

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
        """Everything a request holds in any tier. No step under way uses it; copies hold for themselves."""
        self._empty_tables(request)
        self.host.drop(request)
        self.disk.ask_again(request)
        request.is_arriving = False

    def forget(self, token_ids: Sequence[int], origin: Origin, kept: int) -> None:
        """Make what was computed of some tokens unfindable in every tier, but for the first `kept` of them."""
        keys, first = self._prefixes.keys_of(token_ids, origin), kept // BLOCK_SIZE
        for pool in self.pools:
            for key in keys[first:]:
                if block := pool.named(key):
                    pool.unpublish(block)
        self.disk.forget(frozenset(keys[first:]), keys[::RUN_BLOCKS][first // RUN_BLOCKS :])

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

    # -- arriving

    def _bring(self, request: Request, blocks: int, wanted: Sequence[Mapping[int, Source]], stop: int) -> bool:
        """Make tables of `blocks` blocks from what is wanted, by place; the rest of them is not looked at any more."""
        coming: list[list[tuple[int, int | DiskBlock]]] = []  # of each group: place in the table, and where it is
        for group, table, sources in zip(self.groups, request.block_tables, wanted, strict=True):
            table[:] = [NULL_BLOCK] * (len(sources) if group.is_state else blocks)
            coming.append([])
            for place, source in sources.items():
                at = 0 if group.is_state else place
                if isinstance(source, DiskBlock):
                    coming[-1].append((at, source))
                elif source[0] is group.pool:
                    group.pool.hold(source[1])
                    table[at] = source[1]
                else:
                    coming[-1].append((at, source[1]))
        if not all(
            len(new) + group.needed(request, stop) <= group.pool.num_free
            for group, new in zip(self.groups, coming, strict=True)
        ):
            self._empty_tables(request)
            return False
        self._fetch(request, coming)
        return True

    def _fetch(self, request: Request, coming: Sequence[Sequence[tuple[int, int | DiskBlock]]]) -> None:
        """Copy blocks of the host pool and of files into fresh ones of the request's tables."""
        moves: list[Move] = []
        readings: list[Reading] = []
        for number, (group, table, blocks) in enumerate(zip(self.groups, request.block_tables, coming, strict=True)):
            files: list[tuple[DiskBlock, int]] = []
            for at, source in blocks:
                (table[at],) = group.pool.allocate(1)
                if isinstance(source, DiskBlock):
                    files.append((source, table[at]))
                else:
                    moves.append(Move(number, source, table[at], to_host=False))
            if files:
                sources, targets = zip(*files, strict=True)
                readings.append(Reading(number, sources, targets))
        if not moves and not readings:
            self.host.drop(request)
            return
        request.is_arriving, request.num_published = True, 0
        arrival = _Arrival(request, bool(moves) + bool(readings))
        if moves:
            self.transfers.move(moves, lambda ticket: self._moved(arrival, moves, readings, ticket))
        if readings:
            self.transfers.read(readings, lambda ticket: self._was_read(arrival, readings, ticket))

    def _moved(
        self, arrival: _Arrival, moves: Sequence[Move], readings: Sequence[Reading], ticket: MoveTicket | None
    ) -> None:
        if not self.host.observe(moves, ticket):
            for move in moves:  # else it would be tried again, and again
                self.host.pools[move.group].unpublish(move.source)
        self._came(arrival, readings, ticket)

    def _was_read(self, arrival: _Arrival, readings: Sequence[Reading], ticket: MoveTicket | None) -> None:
        if ticket is not None and not ticket.failed:
            self._costs.observe_read(ticket.num_bytes, ticket.seconds)
            self._counters.disk_read_bytes += ticket.num_bytes
        else:
            self._counters.disk_misses += 1
        self._came(arrival, readings, ticket)

    def _came(self, arrival: _Arrival, readings: Sequence[Reading], ticket: MoveTicket | None) -> None:
        """One of the copies for a request has ended. With the last of them it can go on, or starts again."""
        request = arrival.request
        arrival.parts -= 1
        if ticket is None or ticket.failed:
            arrival.failed = True
        else:
            arrival.seconds += ticket.seconds
        if arrival.parts or not request.is_arriving:  # it was ended meanwhile
            return
        request.is_arriving = False
        self.host.drop(request)
        self.disk.ask_again(request)
        if arrival.failed:
            self._empty_tables(request)
        else:
            request.cache.restore_seconds += 0.0 if request.num_preemptions else arrival.seconds
            self.publish(request, filed=readings)
        self._arrived(request, not arrival.failed)

    def _empty_tables(self, request: Request) -> None:
        for group, table in zip(self.groups, request.block_tables, strict=True):
            group.pool.release([block for block in table if block != NULL_BLOCK])
            table.clear()
        request.num_computed = request.num_scheduled = request.num_published = 0
