"""The files as a third home for blocks: which blocks are due to be written, and what the files hold of a request.

Blocks are written behind: as soon as a step has filled them they are due, and a few at a time are written while further
steps run. What is due is a list of keys, so that nothing is held but the blocks under way: one that is given up before
its turn is a later miss. Refuses to know what a file looks like (`engine.kv.disk.store`) and who reads from it.
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
from engine.kv.groups import RequestBlocks
from engine.kv.transfers import DirtyBlock, TransferHandle, Transfers, WriteBlocks, WritingBack

log = logging.getLogger(__name__)

WRITTEN_AT_ONCE = 8 << 20  # bytes, about
HELD_AT_ONCE = 8  # one in so many blocks of a pool, at most, is held because it is written


@dataclass(frozen=True, slots=True)
class _QueuedWrite:
    group: int
    key: BlockKey
    first_keys: tuple[BlockKey, ...]  # of its chain's segments, up to its own

    @property
    def first_key(self) -> BlockKey:
        return self.first_keys[-1]


class DiskTier:
    """Without a store, nothing is found and nothing is written. With one, `transfers` need a block_transfer."""

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
        self._dirty_since = 0.0  # the first of them
        self._is_writing = False

    @property
    def has_dirty(self) -> bool:
        return bool(self._dirty)

    # -- what the files hold

    def find(self, group: int, held: RequestBlocks, index: int, token_ids: Sequence[int]) -> DiskBlock | None:
        """Where the full block of a request with these token ids is stored. The files are asked once for each segment:
        see `invalidate_lookup`."""
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
        """What the files hold of a request may have changed."""
        held.files.clear()

    def touch(self, held: RequestBlocks, blocks: int) -> None:
        """A request continues after its first `blocks` blocks: their segments are the last to be evicted."""
        if self._store is not None and blocks:
            for group in range(len(self._device)):
                self._transfers.touch(group, held.keys[:blocks:SEGMENT_BLOCKS])

    # -- what is written

    def mark_dirty(self, group: int, held: RequestBlocks, indices: Iterable[int]) -> None:
        """The blocks at these indices of a request are findable: they are due, unless they were before."""
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
        """Begin to write what is due, where nothing is being written. Beside steps it is worth to wait until there is
        more of it, but not for long: each write costs a step more than its bytes do."""
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
                self._dirty.popleft()  # not before, so that something is due or under way for whoever asks meanwhile

    def _next_batch(self) -> list[_QueuedWrite]:
        """Of one segment."""
        first = self._dirty[0]
        segment = first.group, first.first_key
        some = islice(self._dirty, self._most_at_once(first.group))
        return list(takewhile(lambda due: (due.group, due.first_key) == segment, some))

    def _most_at_once(self, group: int) -> int:
        by_bytes = WRITTEN_AT_ONCE // max(1, self._config.block_bytes)
        return max(1, min(SEGMENT_BLOCKS, by_bytes, self._device[group].num_usable // HELD_AT_ONCE))

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
        """Blocks have been written to a file, or could not be."""
        self._is_writing = False
        group = writing_back.write.group
        if not handle.failed:
            self._counters.disk_written_bytes += handle.num_bytes
            self._transfers.touch(group, writing_back.first_keys)  # else the end of a chain would outlive its beginning
        if handle.failed or (self._store is not None and self._store.is_paused):
            self._clear_on_disk((group, due.key) for due in writing_back.write.blocks)

    def _clear_on_disk(self, blocks: Iterable[tuple[int, BlockKey]]) -> None:
        """Blocks of these groups and keys are not in a file: they are due again when a request uses them."""
        for group, key in blocks:
            if block := self._device[group].block_of(key):
                self._device[group].mark_on_disk(block, on_disk=False)

    # -- what is to be forgotten

    def forget(self, keys: Collection[BlockKey], first_keys: Sequence[BlockKey]) -> None:
        """Delete blocks of these keys, which lie in these segments."""
        if self._store is not None:
            self._transfers.forget(keys, first_keys)
