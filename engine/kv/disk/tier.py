"""DiskTier: the write-back queue of blocks, and the lookup of blocks in files.

A block is queued as soon as a step has filled it. Batches are written while further steps run. The queue contains only
keys, and only the blocks of a write under way are held: a block that is evicted before it is written is a later miss.
`engine.kv.disk.store` reads and writes the files.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from engine.config import EngineConfig
from engine.counters import Counters
from engine.kv.blocks import NULL_BLOCK, BlockKey, BlockPool
from engine.kv.disk.segment_file import SEGMENT_BLOCKS, DiskBlock
from engine.kv.disk.store import DiskStore
from engine.kv.request_blocks import ChainKey, RequestBlocks
from engine.kv.transfers import DirtyBlock, TransferHandle, Transfers, WriteBlocks, WritingBack

log = logging.getLogger(__name__)

WRITE_BATCH_BYTES = 8 << 20  # approximate number of bytes per write
MAX_HELD_FRACTION = 8  # a write holds at most 1 / MAX_HELD_FRACTION of a pool's blocks


@dataclass(frozen=True, slots=True)
class _QueuedWrite:
    group: int
    key: BlockKey
    first_keys: tuple[BlockKey, ...]  # the first key of each segment of its chain, up to its own segment

    @property
    def first_key(self) -> BlockKey:
        return self.first_keys[-1]


class DiskTier:
    """Writes blocks to files, and finds them again. Without a store, it does neither.

    With a store, `transfers` must have a block transfer.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: Sequence[BlockPool],
        store: DiskStore | None,
        transfers: Transfers,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._clock = clock
        self._device = device
        self._transfers = transfers
        self._counters = counters
        self._store = store
        self._dirty: deque[_QueuedWrite] = deque()
        self._dirty_since = 0.0  # time when the first block of the current queue was queued
        self._is_writing = False

    @property
    def has_dirty(self) -> bool:
        return bool(self._dirty)

    def close(self) -> None:
        """Drop the store, and the queue of blocks that have not been written."""
        self._store = None
        self._dirty.clear()

    # -- lookup

    def find(self, group: int, held: RequestBlocks, index: int, token_ids: Sequence[int]) -> DiskBlock | None:
        """Return the location of a request's full block in a file, or None.

        Each segment is looked up once per request, until `invalidate_lookup`.
        """
        if self._store is None:
            return None
        segment = index // SEGMENT_BLOCKS
        stored = held.files.get((group, segment))
        if stored is None:
            stored = held.files[group, segment] = self._store.find(group, held.keys[segment * SEGMENT_BLOCKS])
        block = stored.get(held.keys[index])
        return block if block is not None and block.token_ids == tuple(token_ids) else None

    @staticmethod
    def invalidate_lookup(held: RequestBlocks) -> None:
        """Forget where a request's blocks were found in files, because the files may have changed."""
        held.files.clear()

    def touch(self, held: RequestBlocks, blocks: int) -> None:
        """Mark the segments that contain a request's first `blocks` blocks as recently used."""
        if self._store is not None and blocks:
            for group in range(len(self._device)):
                self._transfers.touch(group, held.keys[:blocks:SEGMENT_BLOCKS])

    # -- write-back

    def mark_dirty(self, group: int, held: RequestBlocks, indices: Iterable[int]) -> None:
        """Queue a request's blocks at these indices for writing, if they can be found and are neither stored nor
        queued.
        """
        if self._store is None or not held.request.origin.stored:
            return
        pool, keys = self._device[group], held.keys
        for index in indices:
            block = pool.block_of(keys[index])
            if block != NULL_BLOCK and not pool.is_on_disk(block):
                pool.mark_on_disk(block)
                self._dirty_since = self._dirty_since if self._dirty else self._clock()
                self._dirty.append(_QueuedWrite(group, keys[index], tuple(keys[: index + 1 : SEGMENT_BLOCKS])))

    def write_back(self, *, at_once: bool) -> None:
        """Start writing queued blocks, unless a write is already under way.

        If `at_once` is false, wait up to `write_delay` for more blocks, because every write slows down a step, even a
        small one.
        """
        if not at_once and self._clock() - self._dirty_since < self._config.write_delay:
            return
        while self._dirty and not self._is_writing and self._store is not None:
            if self._store.is_paused:
                self._clear_on_disk((due.group, due.key) for due in self._dirty)
                self._dirty.clear()
                return
            batch = self._next_batch()
            self._write(batch)
            for _ in batch:
                # removed only after the write has started, so that each block is always either queued or being written
                self._dirty.popleft()

    def _next_batch(self) -> list[_QueuedWrite]:
        """Return the queued blocks to write next: the first ones of the queue that are in the same segment."""
        first = self._dirty[0]
        segment = first.group, first.first_key
        some = islice(self._dirty, self._most_at_once(first.group))
        return list(takewhile(lambda due: (due.group, due.first_key) == segment, some))

    def _most_at_once(self, group: int) -> int:
        by_bytes = WRITE_BATCH_BYTES // max(1, self._config.groups[group].block_bytes)
        return max(1, min(SEGMENT_BLOCKS, by_bytes, self._device[group].num_usable // MAX_HELD_FRACTION))

    def _write(self, batch: Sequence[_QueuedWrite]) -> None:
        here = [(due, block) for due in batch if (block := self._device[due.group].block_of(due.key))]
        if not here:
            return
        first = here[0][0]
        blocks = [DirtyBlock(block, due.key, self._device[first.group].content(block)[1]) for due, block in here]
        write = WriteBlocks(first.group, first.first_key, tuple(blocks))
        self._is_writing = True
        self._transfers.write(write, WritingBack(write, first.first_keys))

    def finish_write_back(self, writing_back: WritingBack, handle: TransferHandle) -> None:
        """Handle the end of a write."""
        self._is_writing = False
        group = writing_back.write.group
        if not handle.failed:
            self._counters.disk_written_bytes += handle.num_bytes
            # Touch the whole chain. Otherwise the end of a chain would be kept longer than its start.
            self._transfers.touch(group, writing_back.first_keys)
        if handle.failed or (self._store is not None and self._store.is_paused):
            self._clear_on_disk((group, due.key) for due in writing_back.write.blocks)

    def _clear_on_disk(self, blocks: Iterable[tuple[int, BlockKey]]) -> None:
        """Record that these blocks are not in a file. They will be queued again when a request uses them."""
        for group, key in blocks:
            if block := self._device[group].block_of(key):
                self._device[group].mark_on_disk(block, on_disk=False)

    # -- deletion

    def discard(self, group: int, block: ChainKey) -> None:
        """Delete a block from files if no other block is in its file."""
        if self._store is not None:
            self._transfers.discard(group, block)

    def forget(self, keys: Collection[BlockKey], first_keys: Sequence[BlockKey]) -> None:
        """Delete the blocks with these keys from files. `first_keys` are the first keys of their segments."""
        if self._store is not None:
            self._transfers.forget(keys, first_keys)
