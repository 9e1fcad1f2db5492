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
from engine.kv.disk.run_file import RUN_BLOCKS
from engine.kv.disk.store import DiskBlock, DiskStore
from engine.kv.mover import DueBlock, MoveTicket, Writing
from engine.kv.transfers import Transfers
from engine.request import Request

log = logging.getLogger(__name__)

WRITTEN_AT_ONCE = 8 << 20  # bytes, about
HELD_AT_ONCE = 8  # one in so many blocks of a pool, at most, is held because it is written


@dataclass(frozen=True, slots=True)
class _Due:
    group: int
    key: BlockKey
    first_keys: tuple[BlockKey, ...]  # of its chain's segments, up to its own

    @property
    def first_key(self) -> BlockKey:
        return self.first_keys[-1]


class DiskTier:
    """Where there is no store, nothing is found and nothing is written."""

    def __init__(
        self,
        config: EngineConfig,
        device: Sequence[BlockPool],
        transfers: Transfers,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._clock = clock
        self._device = device
        self._transfers = transfers
        self._counters = counters
        self._store: DiskStore | None = transfers.mover.store if transfers.mover else None
        self._due: deque[_Due] = deque()
        self._due_since = 0.0  # the first of them
        self._is_writing = False

    @property
    def has_due(self) -> bool:
        return bool(self._due)

    # -- what the files hold

    def find(self, group: int, request: Request, place: int, token_ids: Sequence[int]) -> DiskBlock | None:
        """Where a full block of a request lies, which has these ids. Asked of the files once for each segment: see
        `ask_again`."""
        if self._store is None:
            return None
        segment = place // RUN_BLOCKS
        held = request.files.get((group, segment))
        if held is None:
            held = self._store.find(group, BlockKey(request.block_keys[segment * RUN_BLOCKS]))
            request.files[group, segment] = held
        block = held.get(BlockKey(request.block_keys[place]))
        return block if block is not None and block.token_ids == tuple(token_ids) else None

    @staticmethod
    def ask_again(request: Request) -> None:
        """What the files held of a request may have changed."""
        request.files.clear()

    def touch(self, request: Request, blocks: int) -> None:
        """A request goes on behind its first `blocks` blocks: their segments are the last to be given up."""
        if self._store is not None and self._transfers.mover is not None and blocks:
            first_keys = [BlockKey(key) for key in request.block_keys[:blocks:RUN_BLOCKS]]
            for group in range(len(self._device)):
                self._transfers.mover.touch(group, first_keys)

    # -- what is written

    def note(self, group: int, request: Request, places: Iterable[int]) -> None:
        """Blocks at these places of a request are findable: they are due, unless they were before."""
        if self._store is None or not request.origin.stored:
            return
        pool, keys = self._device[group], request.block_keys
        for place in places:
            block = pool.named(BlockKey(keys[place]))
            if block != NULL_BLOCK and not pool.is_filed(block):
                pool.mark_filed(block)
                self._due_since = self._due_since if self._due else self._clock()
                first_keys = tuple(BlockKey(key) for key in keys[: place + 1 : RUN_BLOCKS])
                self._due.append(_Due(group, BlockKey(keys[place]), first_keys))

    def write_some(self, *, at_once: bool) -> None:
        """Begin to write what is due, where nothing is being written. Beside steps it is worth to wait until there is
        more of it, but not for long: each write costs a step more than its bytes do."""
        if not at_once and self._clock() - self._due_since < self._config.write_delay:
            return
        while self._due and not self._is_writing and self._store is not None:
            if self._store.is_paused:
                self._give_up(self._due)
                self._due.clear()
                return
            batch = self._next_batch()
            self._write(batch)
            for _ in batch:
                self._due.popleft()  # not before, so that something is due or under way for whoever asks meanwhile

    def _next_batch(self) -> list[_Due]:
        """Of one segment."""
        first = self._due[0]
        place = first.group, first.first_key
        some = islice(self._due, self._most_at_once(first.group))
        return list(takewhile(lambda due: (due.group, due.first_key) == place, some))

    def _most_at_once(self, group: int) -> int:
        by_bytes = WRITTEN_AT_ONCE // max(1, self._config.block_bytes)
        return max(1, min(RUN_BLOCKS, by_bytes, self._device[group].num_usable // HELD_AT_ONCE))

    def _write(self, batch: Sequence[_Due]) -> None:
        here = [(due, block) for due in batch if (block := self._device[due.group].named(due.key))]
        if not here:
            return
        group, first_keys = here[0][0].group, here[0][0].first_keys
        blocks = [DueBlock(block, due.key, self._device[group].content(block)[1]) for due, block in here]

        def then(ticket: MoveTicket | None) -> None:
            self._is_writing = False
            failed = ticket is None or ticket.failed
            if ticket is not None and not failed:
                self._counters.disk_written_bytes += ticket.num_bytes
                if self._transfers.mover is not None:  # else the end of a chain would outlive its beginning
                    self._transfers.mover.touch(group, first_keys)
            if failed or (self._store is not None and self._store.is_paused):
                self._give_up(due for due, _ in here)

        self._is_writing = True
        self._transfers.write(Writing(group, first_keys[-1], tuple(blocks)), then)

    def _give_up(self, several: Iterable[_Due]) -> None:
        """They are not in a file: due again when a request uses them."""
        for due in several:
            if block := self._device[due.group].named(due.key):
                self._device[due.group].mark_filed(block, filed=False)

    # -- what is to be forgotten

    def forget(self, keys: Collection[BlockKey], first_keys: Sequence[BlockKey]) -> None:
        """Delete blocks of these keys, which lie in these segments."""
        if self._store is not None and self._transfers.mover is not None:
            self._transfers.mover.forget(keys, first_keys)
