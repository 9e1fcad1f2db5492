"""ParkedCache: the KV cache of an unloaded model, which stays in memory until the model is loaded again.

It holds what the disk tier may not store. Memory of blocks without content is returned to the system.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Iterator, Sequence

from torch import Tensor

from engine.config import EngineConfig
from engine.kv.blocks import BlockPool
from engine.kv.cache import KVCache, KVGroup, bytes_of

_DONT_NEED = 4  # MADV_DONTNEED on Linux, where the pages then use no memory until they are written


class ParkedCache:
    """The pools of a cache and the index of their blocks. It can be taken once."""

    def __init__(self, cache_salt: tuple[str, ...], kv: KVCache, index: Sequence[BlockPool]) -> None:
        """Park a cache whose blocks no request holds."""
        self._cache_salt = cache_salt
        self._groups = kv.groups
        self._pools = kv.pools
        self._index = tuple(index)
        for pool, blocks in zip(self._pools, self._index, strict=True):
            _free_blank_blocks(bytes_of(pool), blocks)
        self.num_bytes = sum(
            blocks.num_cached * group.block_bytes for blocks, group in zip(self._index, self._groups, strict=True)
        )

    def fitted(self, config: EngineConfig, groups: Sequence[KVGroup]) -> EngineConfig | None:
        """Return the configuration with the sizes of the parked pools; None if an engine cannot use them.

        The model, the numerics, and the KV type must be the same, and no pool smaller than in `config`.
        """
        sizes = [len(pool) for pool in self._pools]
        same = self._cache_salt == config.cache_salt and self._groups == tuple(groups)
        if not same or any(size < wanted for size, wanted in zip(sizes, config.pool_sizes, strict=True)):
            return None
        return config.with_pools(sizes)

    def take(self) -> tuple[Sequence[Tensor], Sequence[BlockPool]]:
        """Return the pools and their index, and drop them here, because only one engine may use them."""
        taken = self._pools, self._index
        self._pools, self._index, self._groups, self.num_bytes = (), (), (), 0
        return taken


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
