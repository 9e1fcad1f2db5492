"""Parked caches: the KV cache of an unloaded model, which stays in memory until the model is loaded again.

They hold what the disk tier may not store. Memory of blocks without content is returned to the system.
"""

import contextlib
import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice

from torch import Tensor

from engine.config import EngineConfig
from engine.kv.blocks import BlockPool
from engine.kv.cache import KVCache, KVGroup, bytes_of
from engine.kv.transfers import MoveBlock

_DONT_NEED = 4  # MADV_DONTNEED on Linux, where the pages then use no memory until they are written


class ParkedCache(ABC):
    """Pools in the host's memory, and the index of their blocks, which no request holds. It can be taken once."""

    def __init__(
        self,
        cache_salt: tuple[str, ...],
        groups: Sequence[KVGroup],
        pools: Sequence[Tensor],
        index: Sequence[BlockPool],
    ) -> None:
        self._cache_salt = cache_salt
        self._groups = tuple(groups)
        self._pools = tuple(pools)
        self._index = tuple(index)
        self.num_bytes = 0
        for pool, blocks in zip(self._pools, self._index, strict=True):
            _free_blank_blocks(bytes_of(pool), blocks)
            self.num_bytes += blocks.num_cached * bytes_of(pool).shape[1]

    @abstractmethod
    def fitted(self, config: EngineConfig, groups: Sequence[KVGroup]) -> EngineConfig | None:
        """Return the configuration of an engine that uses the cache; None if an engine with `config` cannot use it.

        The model, the numerics, and the KV type must be the same.
        """

    @abstractmethod
    def take_pools(self) -> Sequence[Tensor]:
        """Return the pools for the engine to use; none if it must have others."""

    @abstractmethod
    def take_index(self, kv: KVCache) -> Sequence[BlockPool]:
        """Return the index of the pools of `kv`, which have the content of the parked blocks from now on."""

    def _belongs_to(self, config: EngineConfig, groups: Sequence[KVGroup]) -> bool:
        return self._cache_salt == config.cache_salt and self._groups == tuple(groups)

    def _take(self) -> tuple[Sequence[Tensor], Sequence[BlockPool]]:
        """Return the pools and their index, and drop them here, because only one engine may use them."""
        taken = self._pools, self._index
        self._pools, self._index, self._groups, self.num_bytes = (), (), (), 0
        return taken


class ParkedPools(ParkedCache):
    """The pools of a device that computes in the host's memory. The next engine computes in them."""

    def __init__(
        self, cache_salt: tuple[str, ...], kv: KVCache, index: Sequence[BlockPool], hosts: Sequence[BlockPool]
    ) -> None:
        """Park a cache. Its host pools are dropped."""
        super().__init__(cache_salt, kv.groups, kv.pools, index)
        self._given: Sequence[BlockPool] = ()  # the index, after the pools have been taken

    def fitted(self, config: EngineConfig, groups: Sequence[KVGroup]) -> EngineConfig | None:
        """See `ParkedCache`. No pool may be smaller than in `config`; the result has the sizes of the pools."""
        if not self._belongs_to(config, groups):
            return None
        sizes = [len(pool) for pool in self._pools]
        fits = all(size >= wanted for size, wanted in zip(sizes, config.pool_sizes, strict=True))
        return config.with_pools(sizes) if fits else None

    def take_pools(self) -> Sequence[Tensor]:
        pools, self._given = self._take()
        return pools

    def take_index(self, kv: KVCache) -> Sequence[BlockPool]:
        return self._given


class ParkedCopies(ParkedCache):
    """The host pools of a device with its own memory, with copies of the blocks that were cached on the device.

    They are copied back to the pools of the next engine. If not all of them fit, those that were used last are kept.
    """

    def __init__(
        self, cache_salt: tuple[str, ...], kv: KVCache, index: Sequence[BlockPool], hosts: Sequence[BlockPool]
    ) -> None:
        """Copy the cached blocks to the host pools. Blocks there that were used less recently make room."""
        moves: list[MoveBlock] = []
        for number, (device, host) in enumerate(zip(index, hosts, strict=False)):
            moves += _copy_to_host(number, device, host)
        kv.move(moves)
        kv.unpin()
        super().__init__(cache_salt, kv.groups, kv.host_pools, hosts)

    def fitted(self, config: EngineConfig, groups: Sequence[KVGroup]) -> EngineConfig | None:
        return config if self._belongs_to(config, groups) else None

    def take_pools(self) -> Sequence[Tensor]:
        return ()

    def take_index(self, kv: KVCache) -> Sequence[BlockPool]:
        pools, parked = self._take()
        index = [BlockPool(len(pool)) for pool in kv.pools]
        for number, (pool, source, target) in enumerate(zip(pools, parked, index, strict=True)):
            contents = bytes_of(pool)
            for block in _last_used(source, target.num_usable):
                (filled,) = target.allocate(1)
                kv.fill(number, filled, contents[block].numpy().data)
                target.publish(filled, *source.content(block))
                target.release([filled])
        return index


def _copy_to_host(group: int, device: BlockPool, host: BlockPool) -> Iterator[MoveBlock]:
    """Publish the blocks that a device pool caches in the host pool, and yield the copies that this needs."""
    blocks = _last_used(device, host.num_usable)
    copies = {block: host.find(*device.content(block)) for block in blocks}
    for copy in filter(None, copies.values()):
        host.hold(copy)  # allocations must not evict it
    for block in blocks:
        if not copies[block]:
            (copies[block],) = host.allocate(1)
            host.publish(copies[block], *device.content(block))
            yield MoveBlock(group, block, copies[block], to_host=True)
    for block in blocks:
        host.release([copies[block]])


def _last_used(pool: BlockPool, most: int) -> list[int]:
    """Return the cached blocks that are evicted last, at most `most`, in the order of eviction."""
    return list(islice(pool.in_eviction_order(), max(0, pool.num_cached - most), None))


def _free_blank_blocks(pool: Tensor, index: BlockPool) -> None:
    """Return the pages of blocks without content to the system, except for the null block. Linux only."""
    size, first = pool.shape[1], pool.data_ptr()
    with contextlib.suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        for start, stop in _blank_ranges(index):
            begin = -(-(first + start * size) // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (first + stop * size) // mmap.PAGESIZE * mmap.PAGESIZE
            if begin < end and hasattr(mmap, "MADV_DONTNEED"):
                advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONT_NEED)


def _blank_ranges(index: BlockPool) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each run of blocks without content."""
    start = 1
    for block in (*sorted(index.in_eviction_order()), index.num_blocks):
        if start < block:
            yield start, block
        start = block + 1
