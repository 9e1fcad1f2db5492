"""Batch: the flat lists of one step, which `model.forward` takes as its argument.

The tokens of all scheduled requests are concatenated; `query_starts` gives the start of each request. Every index is
checked here, on the host, against the size of the array it indexes, because devices do not check indices.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import BLOCK_SIZE, GroupConfig
from engine.kv.blocks import NULL_BLOCK
from engine.step import ScheduledRequest, StepPlan

Ids = Sequence[int]

PENDING_TOKEN = 0  # placeholder for a token that is still being sampled; the device must replace it


@dataclass(frozen=True, slots=True)
class Batch:
    """The T tokens of R requests in one step. Each KV group has its own block tables and slot mapping."""

    token_ids: Ids  # length T
    positions: Ids  # length T: position of each token in its request
    # length T each: block * BLOCK_SIZE + offset, where k and v are written; empty for recurrent groups
    slot_mappings: tuple[Ids, ...]
    # Length R each: a request's blocks in order, with the null block for blocks that no token attends to any more. The
    # lists grow after the step is launched. For recurrent groups: the state that the step reads, and the one that it
    # writes.
    block_tables: tuple[Sequence[Ids], ...]
    query_starts: Ids  # length R + 1: request r has tokens query_starts[r] .. query_starts[r + 1]
    context_lengths: Ids  # length R: tokens of each request after this step
    logit_rows: Ids  # indices of the tokens whose logits are needed


def selected_batch(batch: Batch) -> Batch:
    """Return a batch of the tokens whose logits are needed, each as a request of one token. It writes no slots."""
    requests = [bisect_right(batch.query_starts, row) - 1 for row in batch.logit_rows]
    positions = [batch.positions[row] for row in batch.logit_rows]
    return Batch(
        [batch.token_ids[row] for row in batch.logit_rows],
        positions,
        tuple(() for _ in batch.slot_mappings),
        tuple([tables[request] for request in requests] for tables in batch.block_tables),
        range(len(positions) + 1),
        [position + 1 for position in positions],
        range(len(positions)),
    )


def build_batch(
    plan: StepPlan, *, vocab_size: int, num_blocks: int, groups: Sequence[GroupConfig] = (GroupConfig(),)
) -> Batch:
    """Build the batch of `plan`. Group pools have `num_blocks` blocks, unless the group configures another number.

    Raises IndexError if a token id, a block, or a slot is out of range.

    The logit rows are in the plan's order: for each request its `logprob_positions`, then, if the request samples, its
    last known token and the last token of each drafted run.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    starts = [0]
    slots: tuple[list[int], ...] = tuple([] for _ in groups)
    for part in plan.scheduled:
        logit_rows += _logit_rows(part, len(token_ids))
        token_ids += part.request.token_ids(part.start, part.stop)
        token_ids += [PENDING_TOKEN] * part.needs_pending_token
        token_ids += part.drafted
        span = range(part.start, part.stop)
        positions += span
        for number, (group, table, mapping) in enumerate(zip(groups, part.block_tables, slots, strict=True)):
            _check_table(part, number, group, group.num_blocks or num_blocks)
            if not group.recurrent:
                mapping += [table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in span]
        starts.append(len(token_ids))
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise IndexError(f"a token id is not in the vocabulary of {vocab_size} tokens")
    return Batch(
        token_ids,
        positions,
        slots,
        tuple(
            [_states(part, number) if group.recurrent else part.block_tables[number] for part in plan.scheduled]
            for number, group in enumerate(groups)
        ),
        starts,
        [part.stop for part in plan.scheduled],
        logit_rows,
    )


def _logit_rows(part: ScheduledRequest, first_row: int) -> list[int]:
    rows = [first_row + position - part.start for position in part.logprob_positions]
    if part.samples:
        rows += [first_row + part.num_known - 1 + drafted for drafted in part.draft.samples]
    return rows


def _states(part: ScheduledRequest, group: int) -> list[int]:
    """Return the state that a part reads, and the one that it writes.

    The scheduler's parts have a copy for each group of states. Without one, the state is overwritten.
    """
    for copy in part.copies:
        if copy.group == group:
            return [copy.source, copy.target]
    (state, *_) = part.block_tables[group]
    return [state if part.start else NULL_BLOCK, state]


def _check_table(part: ScheduledRequest, number: int, group: GroupConfig, num_blocks: int) -> None:
    """Raise IndexError unless all blocks that the step reads or writes are in the pool of group `number`, and none is
    the null block. Only a state may be read from the null block.
    """
    table = part.block_tables[number]
    first = 0 if group.window is None else max(0, part.start - group.window + 1) // BLOCK_SIZE
    needed = 1 if group.recurrent else -(-part.stop // BLOCK_SIZE)
    if len(table) < needed:
        raise IndexError(f"request {part.request.id} needs {needed} blocks and holds {len(table)}")
    if not NULL_BLOCK <= min(table) <= max(table) < num_blocks or NULL_BLOCK in table[first:needed]:
        raise IndexError(f"a block of request {part.request.id} is not in the pool of {num_blocks}")
    for copy in part.copies:
        if copy.group == number and not (NULL_BLOCK <= copy.source < num_blocks and 0 < copy.target < num_blocks):
            raise IndexError(f"a state of request {part.request.id} is not in the pool of {num_blocks}")


def placeholder_batch() -> Batch:
    """Return a batch without tokens, for a device that records the operations of a model."""
    return Batch((), (), ((),), ((),), (0,), (), ())
