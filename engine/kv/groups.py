"""KV groups: the block tables of requests, and how each kind of layer allocates, shares, and frees blocks.

A group of attention layers holds one block per BLOCK_SIZE tokens: all of them, or those within its window. A group of
recurrent layers holds one state, a block that summarizes all past tokens. A block that is shared or findable is never
overwritten. Instead, the writer gets a new block. The content of a block of keys and values is copied to it before the
step; a state is read from the old block and written to the new one.

Each request has its own tables; each group has one pool.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.config import BLOCK_SIZE, EngineConfig, GroupConfig
from engine.kv.blocks import NULL_BLOCK, BlockKey, BlockPool
from engine.kv.disk.segment_file import DiskBlock
from engine.request import Request
from engine.step import BlockCopy

MESSAGE_ENDS = 8  # maximum number of ends of messages after which a request keeps states


@dataclass(slots=True)
class SavedBlocks:
    """The blocks of a preempted request in the host pools, from which it can resume."""

    num_computed: int
    blocks: tuple[list[tuple[int, int]], ...]  # (block index, host pool block) pairs, one list per KV group
    is_there: bool = False  # whether the copy to the host pools has completed
    is_lost: bool = False  # whether the copy to the host pools has failed


@dataclass(slots=True, eq=False)
class RequestBlocks:
    """The block tables and block keys of one request, and the locations of its blocks in other tiers."""

    request: Request
    tables: tuple[list[int], ...]  # block ids in order, one list per KV group
    keys: list[BlockKey] = field(default_factory=list)  # keys of its first full blocks, computed on demand
    num_published: int = 0  # number of its first blocks that are computed and findable
    saved: SavedBlocks | None = None
    # group of states -> index of the last full block whose state is findable, but only until a later one is
    last_states: dict[int, int] = field(default_factory=dict)
    junction: int = 0  # number of tokens whose keys and values were found, although no state was found for them
    message_ends: tuple[int, ...] | None = None  # see `_message_ends`; None: not computed yet
    # blocks found in files, keyed by (group, segment)
    files: dict[tuple[int, int], Mapping[BlockKey, DiskBlock]] = field(default_factory=dict)

    def content(self, index: int) -> tuple[BlockKey, Sequence[int]]:
        """Return the key and the token ids of the full block at an index."""
        return self.keys[index], self.request.token_ids(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


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

    def publish(self, held: RequestBlocks) -> Sequence[int]:
        """Make the blocks that completed steps have filled findable, and free the blocks that are no longer needed.

        Returns the indices of the blocks that became findable.
        """
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
        """Return the index of the first block that the token at `position` attends to."""
        return 0 if self._window is None else max(0, position - self._window + 1) // BLOCK_SIZE

    def live_blocks(self, held: RequestBlocks) -> list[tuple[int, int]]:
        table = held.tables[self._number]
        return [
            (index, table[index])
            for index in range(blocks_for(held.request.num_computed))
            if table[index] != NULL_BLOCK
        ]


class RecurrentGroup:
    """A group of recurrent layers.

    A table holds the current state, then older states whose steps are not yet collected. A step reads one state and
    writes another, so that it can be undone and retried. The device does not copy states: the step itself reads the
    source of the copy that `allocate` returns, and writes its target.

    A state is kept at every `spacing` tokens, at the end of the prompt and at those of its messages, and where the
    request leaves a path of tokens that others have computed. The last other full block also has a state, so that a
    prompt that continues the reply finds it.
    """

    is_state = True
    needs_all = False

    def __init__(self, number: int, pool: BlockPool, spacing: int) -> None:
        self.pool = pool
        self._number = number
        self._spacing = spacing
        # older state -> index of the last full block whose tokens it summarizes
        self._state_indices: dict[int, int] = {}

    def num_needed(self, held: RequestBlocks, stop: int) -> int:
        return 1

    def allocate(self, held: RequestBlocks, stop: int) -> list[BlockCopy]:
        table = held.tables[self._number]
        (own,) = self.pool.allocate(1)
        before = table[0] if table else NULL_BLOCK  # the content of the null block is the state before the first token
        blocks, rest = divmod(held.request.num_scheduled, BLOCK_SIZE)
        if blocks and not rest and not self.pool.is_findable(before):
            self._state_indices[before] = blocks - 1
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

    def _borders(self, held: RequestBlocks) -> tuple[int, ...]:
        """Return the numbers of tokens, besides multiples of the spacing, after which a state is kept."""
        if held.message_ends is None:
            held.message_ends = _message_ends(held.request)
        prompt_end = _whole_blocks(len(held.request.prompt_ids) - 1)  # the last token is always computed
        return prompt_end, held.junction, *held.message_ends

    def limit_step(self, held: RequestBlocks, stop: int) -> int:
        request, start = held.request, held.request.num_scheduled
        known = _whole_blocks(request.num_tokens - 1)
        # after the known tokens, drafts end with a block
        last = known if start < known else _whole_blocks(start) + BLOCK_SIZE
        regular = (start // self._spacing + 1) * self._spacing
        return min(stop, last, regular, *(border for border in self._borders(held) if start < border))

    def publish(self, held: RequestBlocks) -> Sequence[int]:
        table, computed = held.tables[self._number], held.request.num_computed
        filled = []
        for state in table[1:]:
            # None: another request that continues from this state has already published it
            index = self._state_indices.get(state)
            if index is None or (index + 1) * BLOCK_SIZE <= computed:
                if index is not None:
                    filled += self._publish(held, state, self._state_indices.pop(state))
                self.pool.release([state])
                table.remove(state)
        blocks, rest = divmod(computed, BLOCK_SIZE)
        if blocks and not rest and computed == held.request.num_scheduled:
            filled += self._publish(held, table[0], blocks - 1)
        return filled

    def _publish(self, held: RequestBlocks, state: int, index: int) -> list[int]:
        """Make the state after the block at `index` findable. Returns the index if the state is kept."""
        self.pool.publish(state, *held.content(index))
        tokens = (index + 1) * BLOCK_SIZE
        if tokens % self._spacing == 0 or tokens in self._borders(held):
            return [index]
        before = held.last_states.get(self._number, index)
        held.last_states[self._number] = index
        if before != index and (block := self.pool.block_of(held.keys[before])) and not self.pool.is_held(block):
            self.pool.unpublish(block)
        return []

    def sees(self, block: int, blocks: int) -> bool:
        return block == blocks - 1

    def live_blocks(self, held: RequestBlocks) -> list[tuple[int, int]]:
        return [(max(0, held.request.num_computed - 1) // BLOCK_SIZE, held.tables[self._number][0])]


def _whole_blocks(tokens: int) -> int:
    """Return the number of tokens in full blocks."""
    return tokens // BLOCK_SIZE * BLOCK_SIZE


def _message_ends(request: Request) -> tuple[int, ...]:
    """Return the numbers of tokens in full blocks before the ends of the first message and the last ones.

    The next prompt of a chat often differs after the last message, because templates drop the reasoning of earlier
    replies; other chats often have the same first message, which is the system prompt.
    """
    ends = [number for number, token_id in enumerate(request.prompt_ids, 1) if token_id in request.end_ids]
    return tuple(map(_whole_blocks, (*ends[:1], *ends[1:][1 - MESSAGE_ENDS :])))


def make_groups(config: EngineConfig) -> tuple[Group, ...]:
    def make(number: int, group: GroupConfig) -> Group:
        pool = BlockPool(config.pool_blocks(number))
        if group.recurrent:
            return RecurrentGroup(number, pool, group.spacing)
        return PagedGroup(number, pool, group.window, config.max_step_tokens)

    return tuple(make(number, group) for number, group in enumerate(config.groups))
