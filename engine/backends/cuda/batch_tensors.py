"""BatchTensors: a step's batch where kernels read it, in memory that stays in its index.

The lists of a batch lie side by side in one piece of the host's memory, and go to the GPU in one copy. Where each lies
there depends on how many tokens and requests there are, and on nothing else: a recorded step finds those of its size
where they were when it was recorded. Block tables stay on the GPU from step to step, since they are long, and mostly
grow by a block now and then: only entries that have changed are sent.

Knows what a batch is made of. Refuses to know what kernels do with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.cuda.gpu import Gpu
from engine.batch import Batch
from engine.kernels.attention_tiles import TileList, Tiles
from engine.kernels.pending_tokens import fill_pending_tokens

ALIGNMENT = 16  # bytes: what kernels are compiled for
SENT_ENTRIES = 4096  # of block tables, that have room beside the lists of a step; more go by themselves

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The largest batch."""

    tokens: int
    requests: int
    table_blocks: int  # of one request
    groups: int


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """T tokens of R requests, those included that stand for nothing. The rest as in `engine.batch.Batch`."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: tuple[Tensor, ...]  # of each KV group, int64 [T]
    tables: tuple[Tensor, ...]  # of each KV group, int32 [R, blocks]; what lies behind a request's blocks is old
    query_starts: Tensor  # int32 [R + 1]
    context_lengths: Tensor  # int32 [R]; 0 where a request stands for nothing
    logit_rows: Tensor | None  # int64 [rows]; None: every token's
    tiles: Tiles


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens that the host does not know: they are being sampled by the step before."""

    indices: list[int]  # in the batch
    rows: list[int]  # of what was sampled
    sampled: Tensor | None = None  # int64 [rows or more], on the GPU


NO_PENDING_TOKENS = PendingTokens([], [])


class StepBuffers:
    """The memory of the batches of one engine. A batch is valid until the next one is filled in; what reads it is
    launched before that, on the same stream."""

    def __init__(self, limits: BatchLimits, gpu: Gpu) -> None:
        self._gpu = gpu
        self._limits = limits
        lists = 8 * limits.tokens * (4 + limits.groups) + 16 * (limits.tokens + limits.requests)
        size = lists + 12 * SENT_ENTRIES + 16 * ALIGNMENT
        self._memory = torch.zeros(size, dtype=torch.uint8, device=gpu.device)
        shape = (limits.groups, limits.requests, limits.table_blocks)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=gpu.device)
        self._there: list[list[list[int]]] = [[[] for _ in range(limits.requests)] for _ in range(limits.groups)]

    def fill(
        self, batch: Batch, tiles: Tiles, pending: PendingTokens = NO_PENDING_TOKENS, requests: int = 0
    ) -> BatchTensors:
        """Send a batch. With `requests` it is padded to so many, which have one token each: those that stand for
        nothing store it in the null block. Raises IndexError for a batch beyond the limits."""
        self._check(batch)
        padding = max(0, requests - len(batch.context_lengths))
        all_wanted = list(batch.logit_rows) == list(range(len(batch.token_ids)))
        lists = [_padded(batch.token_ids, padding), _padded(batch.positions, padding)]
        lists += [_padded(slots, padding) for slots in batch.slot_mappings]
        lists += [_starts(batch.query_starts, padding), _padded(batch.context_lengths, padding).astype(np.int32)]
        lists += _on_host(tiles)
        lists += [] if all_wanted else [np.asarray(batch.logit_rows, np.int64)]
        changed = [np.asarray(pending.indices, np.int32), np.asarray(pending.rows, np.int32), *self._changes(batch)]
        sent = iter(self._send([*lists, *changed]))
        count = len(batch.context_lengths) + padding
        tensors = BatchTensors(
            token_ids=next(sent),
            positions=next(sent),
            slots=tuple(next(sent) for _ in batch.slot_mappings),
            tables=tuple(self._tables[:, :count]),
            query_starts=next(sent),
            context_lengths=next(sent),
            tiles=_with_sent(tiles, sent),
            logit_rows=None if all_wanted else next(sent),
        )
        self._apply(tensors, pending, *sent)
        return tensors

    def _check(self, batch: Batch) -> None:
        limits, longest = self._limits, max(len(table) for tables in batch.block_tables for table in tables)
        tokens, requests = len(batch.token_ids), len(batch.context_lengths)
        if tokens > limits.tokens or requests > limits.requests or longest > limits.table_blocks:
            raise IndexError(
                f"{tokens} tokens of {requests} requests with {longest} blocks are more than was agreed on"
            )

    def _changes(self, batch: Batch) -> tuple[Array, Array]:
        """Places and values of the entries of block tables that are not what is there."""
        indices, values = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        for number, (there, tables) in enumerate(zip(self._there, batch.block_tables, strict=True)):
            for row, table in enumerate(tables):
                if there[row] == table:  # most are
                    continue
                first = len(there[row]) if table[: len(there[row])] == there[row] else 0
                there[row] = list(table)
                start = (number * self._limits.requests + row) * self._limits.table_blocks
                indices.append(np.arange(start + first, start + len(table)))
                values.append(np.asarray(table[first:], np.int32))
        return np.concatenate(indices), np.concatenate(values)

    def forget(self) -> None:
        """Send whole block tables again: a step may not have got as far as its copies."""
        for there in self._there:
            there[:] = [[] for _ in there]

    def _send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Arrays side by side, each at a multiple of ALIGNMENT, in one copy; what has no room left goes by itself."""
        sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
        ends = list(accumulate(sizes))
        fitting = sum(end <= len(self._memory) for end in ends)
        staging = self._gpu.staging(ends[fitting - 1], dtype=torch.uint8)
        content = staging.numpy()
        for array, size, end in zip(arrays[:fitting], sizes, ends, strict=False):
            content[end - size : end - size + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._memory[: len(staging)].copy_(staging, non_blocking=True)
        placed = [
            self._memory[end - size : end - size + array.nbytes].view(_TYPES[array.dtype.type])
            for array, size, end in zip(arrays[:fitting], sizes, ends, strict=False)
        ]
        return placed + [torch.from_numpy(array).to(self._gpu.device) for array in arrays[fitting:]]

    def _apply(self, tensors: BatchTensors, pending: PendingTokens, *sent: Tensor) -> None:
        """What depends on what the GPU has: tokens that are being sampled, and tables that have grown."""
        indices, rows, entries, values = sent
        if pending.sampled is not None:
            fill_pending_tokens(pending.sampled, rows, indices, tensors.token_ids)
        if len(entries):
            self._tables.view(-1).index_copy_(0, entries, values)


_TYPES = {np.int64: torch.int64, np.int32: torch.int32}


def _padded(numbers: Sequence[int], padding: int) -> Array:
    """int64, with zeros behind."""
    array = np.zeros(len(numbers) + padding, np.int64)
    array[: len(numbers)] = numbers
    return array


def _starts(starts: Sequence[int], padding: int) -> Array:
    """int32, with requests of one token behind."""
    array = np.empty(len(starts) + padding, np.int32)
    array[: len(starts)] = starts
    array[len(starts) :] = starts[-1] + 1 + np.arange(padding)
    return array


def _on_host(tiles: Tiles) -> Iterator[Array]:
    """Of tiles that are of this step alone: those of a recorded one are on the GPU."""
    for each in tiles.lists:
        if not each.tiles.is_cuda:
            yield each.tiles.numpy()


def _with_sent(tiles: Tiles, sent: Iterator[Tensor]) -> Tiles:
    def there(each: TileList) -> TileList:
        return each if each.tiles.is_cuda else replace(each, tiles=next(sent).view(each.tiles.shape))

    return replace(tiles, lists=tuple(map(there, tiles.lists)))
