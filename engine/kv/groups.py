"""Block tables of requests, and how each kind of KV group fills them, writes to them, and frees blocks early.

A group of attention layers holds one block for each BLOCK_SIZE tokens, all of them or those within its window. A group
of recurrent layers holds one state: a block in which the whole past is folded up. A block that others hold, or that can
be found, is never written: whoever has to write takes a block of its own, and a copy is made before the step.

Tables belong to requests, pools to groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.config import BLOCK_SIZE, EngineConfig, GroupConfig
from engine.kv.blocks import NULL_BLOCK, BlockKey, BlockPool
from engine.kv.disk.segment_file import DiskBlock
from engine.request import Request
from engine.step import BlockCopy

CHECKPOINT = 16  # blocks between two states that are kept for later requests


@dataclass(slots=True)
class SavedBlocks:
    """The blocks of a preempted request in the host pools, from which it can resume."""

    num_computed: int
    blocks: tuple[list[tuple[int, int]], ...]  # of each KV group: (block index, block of the host pool)
    is_there: bool = False  # the copy has completed
    is_lost: bool = False  # the copy has failed


@dataclass(slots=True, eq=False)
class RequestBlocks:
    """Block tables and block keys of a request, and its copies in the other tiers."""

    request: Request
    tables: tuple[list[int], ...]  # of each KV group: block ids in order
    keys: list[BlockKey] = field(default_factory=list)  # of its leading full blocks, as far as they were needed
    num_published: int = 0  # leading blocks that are computed and findable
    saved: SavedBlocks | None = None
    files: dict[tuple[int, int], Mapping[BlockKey, DiskBlock]] = field(default_factory=dict)  # by group and segment

    def content(self, index: int) -> tuple[BlockKey, Sequence[int]]:
        """The key and the token ids of a full block."""
        return self.keys[index], self.request.token_ids(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


class Group(Protocol):
    """One KV group."""

    pool: BlockPool
    needs_all: bool  # a request holds every block from its first token on
    is_state: bool  # the table is one state, and not a block for each BLOCK_SIZE tokens

    def num_needed(self, held: RequestBlocks, stop: int) -> int:
        """Blocks to allocate before the request's tokens up to `stop` can be computed."""
        ...

    def allocate(self, held: RequestBlocks, stop: int) -> list[BlockCopy]:
        """Allocate them. The source of a copy stays held; whoever collects the step releases it."""
        ...

    def undo(self, held: RequestBlocks, copy: BlockCopy) -> None:
        """Put the source of a copy that was not made back into its index."""
        ...

    def limit_step(self, held: RequestBlocks, stop: int) -> int:
        """How far the request's next step may go, at most to `stop`."""
        ...

    def publish(self, held: RequestBlocks) -> Sequence[int]:
        """Make findable what completed steps filled, and let go what nobody will look at again. The places of what is
        findable now."""
        ...

    def sees(self, block: int, blocks: int) -> bool:
        """Whether tokens behind the first `blocks` full ones see the block with that index."""
        ...

    def live_blocks(self, held: RequestBlocks) -> list[tuple[int, int]]:
        """(index, block) of what has to be kept for the request to go on where it is."""
        ...


class PagedGroup:
    """Attention layers."""

    is_state = False

    def __init__(self, number: int, pool: BlockPool, window: int | None, step: int) -> None:
        self.pool = pool
        self._number = number
        self._window = window
        self.needs_all = window is None
        self._most = None if window is None else blocks_for(window + step) + 1  # that are held at a time

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
        """Whether the request's next token goes into a block that others hold, too."""
        index, offset = divmod(held.request.num_scheduled, BLOCK_SIZE)
        table = held.tables[self._number]
        return bool(offset) and index < len(table) and self.pool.is_shared(table[index])

    def undo(self, held: RequestBlocks, copy: BlockCopy) -> None:
        table = held.tables[self._number]
        table[table.index(copy.target)] = copy.source
        self.pool.release([copy.target])

    def limit_step(self, held: RequestBlocks, stop: int) -> int:
        return stop

    def publish(self, held: RequestBlocks) -> Sequence[int]:
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
        return filled

    def sees(self, block: int, blocks: int) -> bool:
        return block >= self._first(blocks * BLOCK_SIZE)

    def _first(self, position: int) -> int:
        """The first block that the token at a position sees."""
        return 0 if self._window is None else max(0, position - self._window + 1) // BLOCK_SIZE

    def live_blocks(self, held: RequestBlocks) -> list[tuple[int, int]]:
        table = held.tables[self._number]
        return [
            (index, table[index])
            for index in range(blocks_for(held.request.num_computed))
            if table[index] != NULL_BLOCK
        ]


class RecurrentGroup:
    """Recurrent layers. The table is the state, and behind it older ones that wait for their step to be collected.

    A step starts from one state and leaves another, so that it can be undone, and tried again.
    """

    is_state = True
    needs_all = False

    def __init__(self, number: int, pool: BlockPool) -> None:
        self.pool = pool
        self._number = number
        self._state_indices: dict[int, int] = {}  # of the older states: the block that they stand behind

    def num_needed(self, held: RequestBlocks, stop: int) -> int:
        return 1

    def allocate(self, held: RequestBlocks, stop: int) -> list[BlockCopy]:
        table = held.tables[self._number]
        (own,) = self.pool.allocate(1)
        before = table[0] if table else NULL_BLOCK  # whose content is the state before the first token
        if self._is_checkpoint(held, held.request.num_scheduled) and not self.pool.is_findable(before):
            self._state_indices[before] = held.request.num_scheduled // BLOCK_SIZE - 1
            self.pool.hold(before)
            table.append(before)
        table[:1] = [own]
        return [BlockCopy(self._number, before, own)]

    def undo(self, held: RequestBlocks, copy: BlockCopy) -> None:
        table = held.tables[self._number]
        if copy.source in table[1:]:
            self._state_indices.pop(copy.source, None)
            table.remove(copy.source)
            self.pool.release([copy.source])
        table[:1] = [copy.source] if copy.source != NULL_BLOCK else []
        self.pool.release([copy.target])

    def _is_checkpoint(self, held: RequestBlocks, tokens: int) -> bool:
        return bool(tokens) and (tokens % (CHECKPOINT * BLOCK_SIZE) == 0 or tokens == _prompt_end(held.request))

    def limit_step(self, held: RequestBlocks, stop: int) -> int:
        start, last = held.request.num_scheduled, _prompt_end(held.request)
        regular = (start // (CHECKPOINT * BLOCK_SIZE) + 1) * CHECKPOINT * BLOCK_SIZE
        return min(stop, regular, last if start < last else stop)

    def publish(self, held: RequestBlocks) -> Sequence[int]:
        table, computed = held.tables[self._number], held.request.num_computed
        filled = []
        for state in table[1:]:
            index = self._state_indices.get(state)  # None: another one that went on from it has published it
            if index is None or (index + 1) * BLOCK_SIZE <= computed:
                if index is not None:
                    self.pool.publish(state, *held.content(self._state_indices.pop(state)))
                    filled.append(index)
                self.pool.release([state])
                table.remove(state)
        if computed == held.request.num_scheduled and self._is_checkpoint(held, computed):
            self.pool.publish(table[0], *held.content(computed // BLOCK_SIZE - 1))
            filled.append(computed // BLOCK_SIZE - 1)
        return filled

    def sees(self, block: int, blocks: int) -> bool:
        return block == blocks - 1

    def live_blocks(self, held: RequestBlocks) -> list[tuple[int, int]]:
        return [(max(0, held.request.num_computed - 1) // BLOCK_SIZE, held.tables[self._number][0])]


def _prompt_end(request: Request) -> int:
    """Tokens up to the last full block behind which the same prompt can go on: at least one is always computed."""
    return (len(request.prompt_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE


def make_groups(config: EngineConfig) -> tuple[Group, ...]:
    def make(number: int, group: GroupConfig) -> Group:
        pool = BlockPool(config.pool_blocks(number))
        if group.recurrent:
            return RecurrentGroup(number, pool)
        return PagedGroup(number, pool, group.window, config.max_step_tokens)

    return tuple(make(number, group) for number, group in enumerate(config.groups))
