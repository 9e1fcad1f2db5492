"""KV groups: the block tables of requests, and how each kind of layer allocates, shares, and frees blocks.

A group of attention layers holds one block per BLOCK_SIZE tokens: all of them, or those within its window. A group of
recurrent layers holds one state, a block that summarizes all past tokens. A block that is shared or findable is never
overwritten. Instead, the writer gets a new block. The content of a block of keys and values is copied to it before the
step; a state is read from the old block and written to the new one.

Each request has its own tables; each group has one pool.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.config import BLOCK_SIZE, EngineConfig, GroupConfig
from engine.kv.blocks import NULL_BLOCK, BlockPool
from engine.kv.recurrent_group import RecurrentGroup
from engine.kv.request_blocks import ChainKey, Published, RequestBlocks, blocks_for
from engine.step import BlockCopy


class Group(Protocol):
    """One KV group: allocates and frees the blocks of requests in its pool."""

    pool: BlockPool
    needs_all: bool  # whether a request holds all of its blocks, from its first token on
    is_state: bool  # whether the table has one state instead of one block per BLOCK_SIZE tokens

    def num_needed(self, held: RequestBlocks, stop: int) -> int:
        """Return the number of blocks to allocate before the request's tokens up to `stop` can be computed."""
        ...

    def allocate(self, held: RequestBlocks, stop: int) -> list[BlockCopy]:
        """Allocate the blocks for tokens up to `stop`. Returns the copies to make before the step.

        The source of each copy stays held until the step has been collected.
        """
        ...

    def undo(self, held: RequestBlocks, copy: BlockCopy) -> None:
        """Put the source of a copy back into the table, because the copy was not made."""
        ...

    def limit_step(self, held: RequestBlocks, stop: int) -> int:
        """Return the token index, at most `stop`, at which the request's next step must end."""
        ...

    def attached(self, held: RequestBlocks, blocks: int) -> Sequence[ChainKey]:
        """Record that a request starts after its first `blocks` full blocks.

        Returns the blocks of earlier requests that are no longer worth their memory.
        """
        ...

    def publish(self, held: RequestBlocks) -> Published:
        """Make the blocks that completed steps have filled findable, and free the blocks that are no longer needed."""
        ...

    def sees(self, block: int, blocks: int) -> bool:
        """Whether tokens after the first `blocks` full blocks attend to the block at index `block`."""
        ...

    def live_blocks(self, held: RequestBlocks) -> list[tuple[int, int]]:
        """Return (block index, block id) pairs that must be saved so that the request can resume."""
        ...


class PagedGroup:
    """A group of attention layers, with or without a window."""

    is_state = False

    def __init__(self, number: int, pool: BlockPool, window: int | None, step: int) -> None:
        self.pool = pool
        self._number = number
        self._window = window
        self.needs_all = window is None
        # maximum number of blocks that a request holds at a time
        self._most = None if window is None else blocks_for(window + step) + 1

    def num_needed(self, held: RequestBlocks, stop: int) -> int:
        return self._missing(held, stop) + self._writes_shared(held)

    def _missing(self, held: RequestBlocks, stop: int) -> int:
        missing = max(0, blocks_for(stop) - len(held.tables[self._number]))
        return missing if self._most is None else min(missing, self._most)

    def allocate(self, held: RequestBlocks, stop: int) -> list[BlockCopy]:
        table, copies = held.tables[self._number], []
        if self._writes_shared(held):
            index = held.request.num_scheduled // BLOCK_SIZE
            (own,) = self.pool.allocate(1)
            copies.append(BlockCopy(self._number, table[index], own))
            table[index] = own
        table.extend(self.pool.allocate(self._missing(held, stop)))
        return copies

    def _writes_shared(self, held: RequestBlocks) -> bool:
        """Whether the request's next token will be written to a block that other requests also hold."""
        index, offset = divmod(held.request.num_scheduled, BLOCK_SIZE)
        table = held.tables[self._number]
        return bool(offset) and index < len(table) and self.pool.is_shared(table[index])

    def undo(self, held: RequestBlocks, copy: BlockCopy) -> None:
        table = held.tables[self._number]
        table[table.index(copy.target)] = copy.source
        self.pool.release([copy.target])

    def limit_step(self, held: RequestBlocks, stop: int) -> int:
        return stop

    def attached(self, held: RequestBlocks, blocks: int) -> Sequence[ChainKey]:
        return ()

    def publish(self, held: RequestBlocks) -> Published:
        table = held.tables[self._number]
        filled = range(held.num_published, held.request.num_computed // BLOCK_SIZE)
        for index in filled:
            if table[index] != NULL_BLOCK:
                self.pool.publish(table[index], *held.content(index))
        for index in range(self._first(held.request.num_computed) - 1, -1, -1):
            if table[index] == NULL_BLOCK:
                break
            self.pool.release([table[index]])
            table[index] = NULL_BLOCK
        return Published(filled)

    def sees(self, block: int, blocks: int) -> bool:
        return block >= self._first(blocks * BLOCK_SIZE)

    def _first(self, position: int) -> int:
        """Return the index of the first block that the token at `position` attends to."""
        return 0 if self._window is None else max(0, position - self._window + 1) // BLOCK_SIZE

    def live_blocks(self, held: RequestBlocks) -> list[tuple[int, int]]:
        table = held.tables[self._number]
        return [
            (index, table[index])
            for index in range(blocks_for(held.request.num_computed))
            if table[index] != NULL_BLOCK
        ]


def make_groups(config: EngineConfig) -> tuple[Group, ...]:
    states, others = ([it for it in config.groups if it.recurrent is wanted] for wanted in (True, False))
    token_bytes = sum(group.block_bytes for group in others) // BLOCK_SIZE

    def state_tokens(group: GroupConfig) -> int:
        """Return the number of tokens whose keys and values are as large as all states of a request."""
        return sum(it.block_bytes for it in states) // token_bytes if token_bytes else group.spacing

    def make(number: int, group: GroupConfig) -> Group:
        pool = BlockPool(config.pool_blocks(number))
        if group.recurrent:
            return RecurrentGroup(number, pool, group.spacing, max(1, state_tokens(group)))
        return PagedGroup(number, pool, group.window, config.max_step_tokens)

    return tuple(make(number, group) for number, group in enumerate(config.groups))
