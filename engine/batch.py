"""Batch: the flat arrays of one step, the explicit argument of `model.forward`.

Tokens of all scheduled requests lie one after another; `query_starts` says where each request's begin. Every index is
checked here, on the host, against what it will index: a wrong one must never reach a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.blocks import NULL_BLOCK
from engine.config import BLOCK_SIZE
from engine.request import ScheduledRequest, StepPlan

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of R requests. One block table and one slot mapping for each KV group."""

    token_ids: Ids  # int64 [T]
    positions: Ids  # int64 [T]: position of each token in its request
    slot_mappings: tuple[Ids, ...]  # int64 [T] each: block * BLOCK_SIZE + place, where the token's k and v go
    block_tables: tuple[Ids, ...]  # int64 [R, longest] each: a request's blocks in order, padded with the null block
    query_starts: tuple[int, ...]  # R + 1 numbers: request r has tokens query_starts[r] .. query_starts[r + 1]
    context_lengths: tuple[int, ...]  # R numbers: tokens of the request once this step is done
    logit_rows: Ids  # int64 [L]: the tokens whose logits are wanted


def build_batch(plan: StepPlan, *, vocab_size: int, num_blocks: int) -> Batch:
    """The batch of `plan`. Raises IndexError where an id or a slot would lie outside vocabulary, table or pool.

    Logit rows, in the plan's order: of each request the positions to be reported, then its last token where the next
    one can be picked.
    """
    starts = [0]
    for part in plan.scheduled:
        starts.append(starts[-1] + part.num_tokens)
    tables = [_checked_table(part, num_blocks) for part in plan.scheduled]
    spans = [range(part.start, part.stop) for part in plan.scheduled]
    token_ids = [
        t for p, span in zip(plan.scheduled, spans, strict=True) for t in p.request.token_ids(span.start, span.stop)
    ]
    if not all(0 <= token_id < vocab_size for token_id in token_ids):
        raise IndexError(f"a token id is not in the vocabulary of {vocab_size}")
    positions = [np.arange(span.start, span.stop) for span in spans]
    slots = [
        table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for table, position in zip(tables, positions, strict=True)
    ]
    return Batch(
        token_ids=np.array(token_ids, np.int64),
        positions=np.concatenate(positions),
        slot_mappings=(np.concatenate(slots),),
        block_tables=(_padded(tables),),
        query_starts=tuple(starts),
        context_lengths=tuple(span.stop for span in spans),
        logit_rows=np.array(
            [row for part, start in zip(plan.scheduled, starts, strict=False) for row in _logit_rows(part, start)],
            np.int64,
        ),
    )


def _logit_rows(part: ScheduledRequest, first_row: int) -> list[int]:
    reported = [first_row + position - part.start for position in part.reported]
    return [*reported, first_row + part.num_tokens - 1] if part.samples else reported


def _checked_table(part: ScheduledRequest, num_blocks: int) -> Ids:
    table = np.array(part.request.block_table, np.int64)
    needed = -(-part.stop // BLOCK_SIZE)
    if len(table) < needed:
        raise IndexError(f"request {part.request.id} needs {needed} blocks and holds {len(table)}")
    if not NULL_BLOCK < table.min() <= table.max() < num_blocks:
        raise IndexError(f"a block of request {part.request.id} is not in the pool of {num_blocks}")
    return table


def _padded(tables: Sequence[Ids]) -> Ids:
    padded = np.full((len(tables), max(map(len, tables))), NULL_BLOCK, np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def placeholder_batch() -> Batch:
    """No tokens: for a device that records what a model does, whatever the batch."""
    none = np.zeros(0, np.int64)
    return Batch(none, none, (none,), (none.reshape(0, 0),), (0,), (), none)
