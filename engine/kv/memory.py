"""KVMemory: the blocks of every request, in all groups and tiers: device pools, host pools, and files.

A request attaches the longest cached prefix that every group has, allocates blocks as it grows, shares them with
requests that fork from it, and releases all of them together. Blocks in the host pools or in files are copied to the
device first. The blocks of a preempted request may be saved to the host pools; full ones are published there under
their keys, so that other requests find them. Each block that a step has filled is written to a file soon afterwards.

Copies run during steps. The source and target blocks of a copy are held until `poll` has handled the end of the copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.config import BLOCK_SIZE, EngineConfig
from engine.cost_model import CostModel
from engine.counters import Counters
from engine.kv.arrivals import Arrival, Arrivals
from engine.kv.blocks import NULL_BLOCK, BlockPool
from engine.kv.disk.segment_file import SEGMENT_BLOCKS
from engine.kv.disk.store import DiskStore
from engine.kv.disk.tier import DiskTier
from engine.kv.groups import make_groups
from engine.kv.host_tier import HostTier
from engine.kv.prefix_cache import Prefix, PrefixCache, Source
from engine.kv.request_blocks import ChainKey, RequestBlocks, blocks_for
from engine.kv.transfers import Arriving, BlockTransfer, Demoting, ReadBlocks, Saving, Transfers, WritingBack
from engine.request import Origin, Request, TokenSources
from engine.step import BlockCopy


@dataclass(frozen=True, slots=True)
class Arrived:
    """The outcome of copying a request's blocks to the device."""

    request: Request
    ok: bool  # whether all copies succeeded; if not, the request holds no blocks any more


class KVMemory:
    """Manages the blocks of requests, from the first match until the release."""

    def __init__(
        self,
        config: EngineConfig,
        block_transfer: BlockTransfer | None,
        store: DiskStore | None,
        costs: CostModel,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.groups = make_groups(config)
        device = [group.pool for group in self.groups]
        hosts = [BlockPool(size) for size in config.host_pool_sizes] if block_transfer else []
        self.transfers = Transfers(block_transfer, device, hosts)
        self.host = HostTier(config, self.groups, hosts, self.transfers, costs)
        self.disk = DiskTier(config, device, store, self.transfers, counters, clock)
        self._prefix_cache = PrefixCache(config, self.groups, hosts, self.disk, costs)
        self._arrivals = Arrivals(self.groups, self.transfers, self.host, costs, counters)
        self._config = config
        self._costs = costs
        self._counters = counters
        self._held: dict[int, RequestBlocks] = {}  # keyed by request id
        blocks = min((it.pool.num_usable for it in self.groups if it.needs_all), default=config.num_blocks - 1)
        # maximum number of tokens of a request that runs alone
        self.context = min(config.context_length, blocks * BLOCK_SIZE)

    def blocks_of(self, request: Request) -> RequestBlocks:
        """Return the blocks of a request. Its tables are empty if it is new or has been released."""
        held = self._held.get(request.id)
        if held is None:
            held = self._held[request.id] = RequestBlocks(request, tuple([] for _ in self.groups))
        return held

    # -- state

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """All device pools and host pools."""
        return (*(group.pool for group in self.groups), *self.host.pools)

    def max_tokens(self, request: Request) -> int:
        """Return the maximum number of tokens that a request can ever hold."""
        if request.params.max_tokens is None:
            return self.context
        return min(self.context, len(request.prompt_ids) + request.params.max_tokens)

    @property
    def is_busy(self) -> bool:
        """Whether copies are under way, or blocks are queued to be written."""
        return bool(self.transfers) or self.disk.has_dirty

    @property
    def is_empty(self) -> bool:
        """Whether no request holds a block in any pool."""
        return not self._held and all(pool.num_free == pool.num_usable for pool in self.pools)

    def can_allocate(self, request: Request, stop: int) -> bool:
        """Whether enough blocks are free for the request's tokens up to `stop`."""
        held = self.blocks_of(request)
        return all(group.num_needed(held, stop) <= group.pool.num_free for group in self.groups)

    def can_allocate_later(self, request: Request, stop: int) -> bool:
        """Whether enough blocks will be free for the request's tokens up to `stop` once the copies under way have
        ended.
        """
        held = self.blocks_of(request)
        return all(
            group.num_needed(held, stop) <= group.pool.num_free + self.transfers.num_returning(number)
            for number, group in enumerate(self.groups)
        )

    def check_pools(self) -> None:
        """Raise RuntimeError if a pool's bookkeeping is inconsistent."""
        for pool in self.pools:
            pool.check_consistency()

    def adopt(self, index: Sequence[BlockPool]) -> None:
        """Take over the index of device pools that were parked. Call this before any request exists."""
        for group, parked in zip(self.groups, index, strict=True):
            group.pool.adopt(parked)

    def close(self) -> None:
        """Stop all copies. Nothing may be copied afterwards, and nothing is found in files any more."""
        self.disk.close()
        self.transfers.close()

    # -- from the first match to the release

    def match(self, request: Request, most: int) -> Prefix | None:
        """Return the longest cached prefix of a request, at most `most` blocks; None if its saved blocks cover more
        tokens.

        The blocks of the prefix are not held: call `attach` before anything else allocates.
        """
        held = self.blocks_of(request)
        if held.saved is not None and not held.saved.is_lost:
            return None
        return self._prefix_cache.match(held, most)

    def attach(self, request: Request, prefix: Prefix | None, stop: int) -> bool:
        """Give a request the prefix that `match` returned, or its saved blocks if `match` returned None.

        Returns False and changes nothing if the blocks needed up to `stop` are not free, or if the saved blocks are
        still being copied. If some of the blocks are not on the device, `is_arriving` is true until `poll` reports the
        request.
        """
        held = self.blocks_of(request)
        if prefix is None:
            return self._restore(held, stop)
        request.num_computed = request.num_scheduled = prefix.blocks * BLOCK_SIZE
        held.num_published, held.junction, held.borders = prefix.blocks, prefix.junction * BLOCK_SIZE, None
        if not self._bring(held, prefix.blocks, prefix.sources, stop):
            return False
        if not request.is_restarted:
            request.cache = prefix.token_sources([group.pool for group in self.groups])
        self.disk.touch(held, prefix.blocks)
        for number, group in enumerate(self.groups):
            for block in group.attached(held, prefix.blocks):
                self._drop(number, block)
        for number, indices in enumerate(prefix.sources):
            # These blocks may not be in files yet, because they may have been computed by a request with `stored`
            # unset.
            self.disk.mark_dirty(number, held, indices)
        return True

    def is_computing(self, other: Request, request: Request, index: int) -> bool:
        """Whether `other` will publish the block that `request` needs at an index."""
        theirs, own = self.blocks_of(other), self.blocks_of(request)
        return theirs.num_published <= index < len(theirs.keys) and theirs.keys[index] == own.keys[index]

    def allocate(self, request: Request, stop: int) -> tuple[BlockCopy, ...]:
        """Allocate blocks for the request's tokens up to `stop`. Make the returned copies before the step.

        Requires that `can_allocate` is true.
        """
        held = self.blocks_of(request)
        return tuple(copy for group in self.groups for copy in group.allocate(held, stop))

    def limit_step(self, request: Request, stop: int) -> int:
        """Return the token index, at most `stop`, at which the request's next step must end."""
        held = self.blocks_of(request)
        return min(group.limit_step(held, stop) for group in self.groups)

    def release_sources(self, copies: Sequence[BlockCopy]) -> None:
        """Release the sources of copies whose step has completed."""
        for copy in copies:
            if copy.source != NULL_BLOCK:
                self.groups[copy.group].pool.release([copy.source])

    def undo(self, request: Request, copies: Sequence[BlockCopy]) -> None:
        """Undo the copies of a step that was not executed."""
        for copy in reversed(copies):
            self.groups[copy.group].undo(self.blocks_of(request), copy)

    def publish(self, request: Request, *, on_disk: Sequence[ReadBlocks] = ()) -> None:
        """Make a request's full blocks findable, and queue them to be written.

        Blocks that were read from files by the reads `on_disk` are not queued.
        """
        held, full = self.blocks_of(request), request.num_computed // BLOCK_SIZE
        self._prefix_cache.extend_keys(held, full)
        published = [group.publish(held) for group in self.groups]
        held.num_published = full
        for read in on_disk:
            for block in read.targets:
                self.groups[read.group].pool.mark_on_disk(block)
        for number, (kept, dropped) in enumerate(published):
            self.disk.mark_dirty(number, held, kept)
            for index in dropped:
                self._drop(number, held.chain_key(index))

    def _drop(self, number: int, block: ChainKey) -> None:
        """Make one block of a group unfindable in all tiers, unless it is in use."""
        pools = self.groups[number].pool, *self.host.pools[number : number + 1]
        found = [(pool, there) for pool in pools if (there := pool.block_of(block.key))]
        if any(pool.is_held(there) for pool, there in found):
            return
        is_on_disk = any(pool.is_on_disk(there) for pool, there in found)
        for pool, there in found:
            pool.unpublish(there)
        if is_on_disk:
            self.disk.discard(number, block)

    def fork(self, parent: Request, child: Request, tokens: int) -> None:
        """Let `child` share the first `tokens` computed tokens of `parent` and continue from there."""
        held, own = self.blocks_of(parent), self.blocks_of(child)
        for group, theirs, table in zip(self.groups, held.tables, own.tables, strict=True):
            table[:] = theirs[: 1 if group.is_state else blocks_for(tokens)]
            for block in table:
                if block != NULL_BLOCK:
                    group.pool.hold(block)
        own.keys[:] = held.keys[: tokens // BLOCK_SIZE]
        own.num_published = min(held.num_published, len(own.keys))
        child.num_computed = child.num_scheduled = tokens

    def release(self, request: Request) -> None:
        """Release the blocks of a request in all tiers.

        No step under way may use the blocks. Copies under way hold their blocks themselves.
        """
        if held := self._held.pop(request.id, None):
            self._arrivals.drop(request)
            for number, index in held.last_states.items():
                self.disk.mark_dirty(number, held, [index])
            self._empty_tables(held)
            self.host.drop(held)

    def forget(self, token_ids: Sequence[int], origin: Origin, kept: int) -> None:
        """Make the blocks of these tokens unfindable in all tiers. The first `kept` tokens stay cached."""
        keys, first = self._prefix_cache.keys_of(token_ids, origin), kept // BLOCK_SIZE
        for pool in self.pools:
            for key in keys[first:]:
                if block := pool.block_of(key):
                    pool.unpublish(block)
        self.disk.forget(frozenset(keys[first:]), keys[::SEGMENT_BLOCKS][first // SEGMENT_BLOCKS :])

    # -- preemption

    def swap_out(self, request: Request) -> bool:
        """Release a request's device blocks. Returns whether their content is saved to the host pools.

        It is saved if the host pools have free blocks and copying is faster than computing the tokens again.
        """
        held, blocks = self.blocks_of(request), blocks_for(request.num_computed)
        if blocks and self._costs.prefers_swap(self.host.num_bytes(held), blocks) and self.host.save(held):
            self._empty_tables(held)
            self._counters.swapped_out += 1
            return True
        self.release(request)
        self._counters.recomputed += 1
        return False

    def is_swapped_out(self, request: Request) -> bool:
        """Whether the request's blocks are in the host pools, or are being copied there."""
        held = self._held.get(request.id)
        return held is not None and held.saved is not None

    def is_being_saved(self, request: Request) -> bool:
        """Whether the request's blocks are being copied to the host pools."""
        saved = self.blocks_of(request).saved
        return saved is not None and not (saved.is_there or saved.is_lost)

    def _restore(self, held: RequestBlocks, stop: int) -> bool:
        """Start copying saved blocks back to the device.

        Returns False if too few blocks are free, or if the blocks are still being saved.
        """
        saved, request = held.saved, held.request
        if saved is None or not saved.is_there:
            return False
        request.num_computed = request.num_scheduled = saved.num_computed
        held.num_published = min(len(held.keys), saved.num_computed // BLOCK_SIZE)
        return self._bring(held, blocks_for(saved.num_computed), self.host.sources(held, saved), stop)

    # -- arrivals

    def is_arriving(self, request: Request) -> bool:
        """Whether the request's blocks are being copied to the device."""
        return request in self._arrivals

    def poll(self) -> list[Arrived]:
        """Handle the finished copies. Returns the requests whose transfers to the device have completed or failed."""
        arrived: list[Arrived] = []
        for transfer in self.transfers.poll():
            match transfer.purpose:
                case Saving() as saving:
                    self.host.finish_saving(saving, transfer.handle)
                case Demoting() as demoting:
                    self.host.finish_demoting(demoting, transfer.handle)
                case WritingBack() as writing_back:
                    self.disk.finish_write_back(writing_back, transfer.handle)
                case Arriving() as part:
                    if arrival := self._arrivals.finish(part, transfer.handle):
                        arrived.append(self._finish(arrival))
            self.transfers.release(transfer)
        return arrived

    def _bring(self, held: RequestBlocks, blocks: int, sources: Sequence[Mapping[int, Source]], stop: int) -> bool:
        if not self._arrivals.bring(held, blocks, sources, stop):
            self._empty_tables(held)
            return False
        if held.request not in self._arrivals:
            self.host.drop(held)
        return True

    def _finish(self, arrival: Arrival) -> Arrived:
        held = arrival.held
        self.host.drop(held)
        self.disk.invalidate_lookup(held)
        if arrival.failed:
            self._empty_tables(held)
        else:
            if not held.request.is_restarted:
                held.request.cache += TokenSources(restore_seconds=arrival.seconds)
            self.publish(held.request, on_disk=arrival.reads)
        return Arrived(held.request, not arrival.failed)

    def _empty_tables(self, held: RequestBlocks) -> None:
        for group, table in zip(self.groups, held.tables, strict=True):
            group.pool.release([block for block in table if block != NULL_BLOCK])
            table.clear()
        held.num_published = held.request.num_computed = held.request.num_scheduled = 0
