"""RecurrentGroup: which states of recurrent layers are allocated, kept for later requests, and dropped.

A state costs as much memory as the keys and values of hundreds or thousands of tokens. So a request keeps states only
where later requests are likely to continue from: see `RecurrentGroup`.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from engine.config import BLOCK_SIZE
from engine.kv.blocks import NULL_BLOCK, BlockKey, BlockPool
from engine.kv.request_blocks import ChainKey, Published, RequestBlocks, whole_blocks
from engine.step import BlockCopy

MOST_MARKS = 8  # maximum number of marks of a request after which states are kept
# states that a request keeps in addition to those that take no more memory than its keys and values: after its first
# message, after its last question, and after its reply
ADDITIONAL_STATES = 3


class _Reply(NamedTuple):
    """The states of a reply."""

    request_id: int
    prompt_tokens: int  # length of its prompt
    blocks: list[ChainKey]


class RecurrentGroup:
    """A group of recurrent layers.

    A table holds the current state, then older states whose steps are not yet collected. A step reads one state and
    writes another, so that it can be undone and retried. The device does not copy states: the step itself reads the
    source of the copy that `allocate` returns, and writes its target.

    States are kept

    - after the first message, whose text other requests often have;
    - after the last questions, because many templates drop the reasoning of earlier replies when there is a new one;
    - at the end of the prompt, and where a request leaves a path of tokens that others have computed;
    - at every `spacing` tokens;
    - after the last full block of the reply, for a prompt that continues it.

    All states of one path together take no more memory than the keys and values of its tokens, and ADDITIONAL_STATES
    states: see `thinned`.
    """

    is_state = True
    needs_all = False

    def __init__(self, number: int, pool: BlockPool, spacing: int, state_tokens: int) -> None:
        """`state_tokens`: number of tokens whose keys and values are as large as a state."""
        self.pool = pool
        self._number = number
        self._spacing = spacing
        self._state_tokens = state_tokens
        # key of the last block with a state before a reply -> the newest reply there; oldest first
        self._replies: OrderedDict[BlockKey, _Reply] = OrderedDict()
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
        """Return the numbers of tokens, besides multiples of the spacing, after which a state is kept.

        The end of the prompt is left out if it is at most one block after a mark.
        """
        if held.borders is None:
            prompt = len(held.request.prompt_ids)
            marks = _whole_marks(held)
            last = marks[1:][-min(MOST_MARKS - 1, self._most_states(prompt) - 2) :]
            found = {*marks[:1], *last} - {0}
            for border in (held.junction, whole_blocks(prompt - 1)):  # the last token of a prompt is always computed
                if border and not any(0 <= border - it <= BLOCK_SIZE for it in found):
                    found.add(border)
            held.borders = tuple(sorted(found))
        return held.borders

    def _most_states(self, tokens: int) -> int:
        """Return the maximum number of states of one path of tokens."""
        return tokens // self._state_tokens + ADDITIONAL_STATES

    def limit_step(self, held: RequestBlocks, stop: int) -> int:
        request, start = held.request, held.request.num_scheduled
        known = whole_blocks(request.num_tokens - 1)
        # after the known tokens, drafts end with a block
        last = known if start < known else whole_blocks(start) + BLOCK_SIZE
        regular = (start // self._spacing + 1) * self._spacing
        return min(stop, last, regular, *(border for border in self._borders(held) if start < border))

    def attached(self, held: RequestBlocks, blocks: int) -> Sequence[ChainKey]:
        path, prompt = frozenset(held.keys), len(held.request.prompt_ids)
        dropped: list[ChainKey] = []
        for key in held.keys[:blocks]:
            self.pool.touch(self.pool.block_of(key))
            reply = self._replies.get(key)
            if reply is not None and reply.prompt_tokens < prompt:
                # This prompt has the reply in another form, and so will later ones.
                dropped += [block for block in reply.blocks if block.key not in path]
        return dropped

    def publish(self, held: RequestBlocks) -> Published:
        table, computed = held.tables[self._number], held.request.num_computed
        filled = []
        for state in table[1:]:
            # None: another request that continues from this state has already published it
            index = self._state_indices.get(state)
            if index is None or (index + 1) * BLOCK_SIZE <= computed:
                if index is not None:
                    filled.append(self._state_indices.pop(state))
                    self.pool.publish(state, *held.content(filled[-1]))
                self.pool.release([state])
                table.remove(state)
        blocks, rest = divmod(computed, BLOCK_SIZE)
        if blocks and not rest and computed == held.request.num_scheduled:
            filled.append(blocks - 1)
            self.pool.publish(table[0], *held.content(blocks - 1))
        kept = [index for index in filled if self._is_kept(held, index)]
        replaced = [self._end_reply(held, index) for index in filled if index not in kept]
        self._record_reply(held, filled)
        surplus = self._surplus(held) if kept or None in replaced else []
        return Published(kept, [*surplus, *(it for it in replaced if it is not None)])

    def _is_kept(self, held: RequestBlocks, index: int) -> bool:
        """Whether the state after the block at `index` is kept when later ones are."""
        tokens = (index + 1) * BLOCK_SIZE
        return tokens % self._spacing == 0 or tokens in self._borders(held)

    def _end_reply(self, held: RequestBlocks, index: int) -> int | None:
        """Record that the reply has a state after the block at `index`.

        Returns the index of the state that it replaces, or None if it is the first one.
        """
        before = held.last_states.get(self._number)
        held.last_states[self._number] = index
        return before

    def _record_reply(self, held: RequestBlocks, filled: Sequence[int]) -> None:
        """Record which blocks with a state are after the last border of the prompt."""
        request, border = held.request, max(self._borders(held), default=0)
        blocks = [held.chain_key(index) for index in filled if (index + 1) * BLOCK_SIZE > border]
        if not (blocks and border):
            return
        start = held.keys[border // BLOCK_SIZE - 1]
        known = self._replies.pop(start, None)
        if known is None or known.request_id != request.id:
            known = _Reply(request.id, len(request.prompt_ids), [])
        known.blocks.extend(blocks)
        self._replies[start] = known
        while len(self._replies) > self.pool.num_blocks:
            self._replies.popitem(last=False)

    def _surplus(self, held: RequestBlocks) -> list[int]:
        """Return the indices of the blocks whose states take more memory than their path is worth."""
        blocks = held.request.num_computed // BLOCK_SIZE
        tokens = [number * BLOCK_SIZE for number, key in enumerate(held.keys[:blocks], 1) if self.pool.block_of(key)]
        marks = _whole_marks(held)
        surplus = thinned(tokens, {*marks[:1], *marks[-1:]}, self._most_states(held.request.num_computed))
        return [number // BLOCK_SIZE - 1 for number in surplus]

    def sees(self, block: int, blocks: int) -> bool:
        return block == blocks - 1

    def live_blocks(self, held: RequestBlocks) -> list[tuple[int, int]]:
        return [(max(0, held.request.num_computed - 1) // BLOCK_SIZE, held.tables[self._number][0])]


def _whole_marks(held: RequestBlocks) -> list[int]:
    return [whole_blocks(mark) for mark in held.request.marks]


def thinned(tokens: Sequence[int], needed: Collection[int], most: int) -> list[int]:
    """Return which states to drop so that at most `most` are left: those at `tokens`, ascending numbers of tokens.

    Later prompts differ rather near the end than far from it. So the gap that a dropped state leaves should be small in
    relation to its distance from the end; the distances of the states that are left grow about exponentially. The last
    state and those at `needed` stay.
    """
    left, dropped = list(tokens), []
    while len(left) > most:
        around = zip([0, *left], left, left[1:], strict=False)
        gaps = {it: (after - before) / (left[-1] - it) for before, it, after in around if it not in needed}
        if not gaps:
            break
        dropped.append(min(gaps, key=gaps.__getitem__))
        left.remove(dropped[-1])
    return dropped
