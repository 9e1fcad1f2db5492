"""The batch of a step as tensors on the GPU, at addresses that do not change between steps.

The lists of a batch are packed into one host buffer and copied to the GPU in one transfer. The offset of each list
depends only on the number of tokens and requests, so a captured step finds its inputs where they were during capture.
Block tables stay on the GPU between steps, because they are long and seldom change: only changed entries are sent.
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
from engine.backends.cuda.graph_sizes import GraphSize
from engine.batch import Batch
from engine.kernels.attention_tiles import TileList, Tiles
from engine.kernels.pending_tokens import fill_pending_tokens
from engine.kernels.sampling_rows import Draws
from engine.sampling.drawing import ATTEMPTS

ALIGNMENT = 16  # bytes; kernels are compiled for tensors with this alignment
DRAW_BYTES = 8 * ATTEMPTS + 20  # of a row
STAGED_ENTRIES = 4096  # block table entries that fit into a step's buffer; further entries are sent separately

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The largest batch that a step may have."""

    tokens: int
    requests: int
    table_blocks: int  # entries per request in a block table
    groups: int


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """A batch on the GPU: T tokens of R requests, including padding requests. See also `engine.batch.Batch`."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: tuple[Tensor, ...]  # int64 [T], one tensor per KV group; zeros for groups of states
    tables: tuple[Tensor, ...]  # int32 [R, blocks], one tensor per KV group; entries after a request's blocks are stale
    query_starts: Tensor  # int32 [R + 1]
    context_lengths: Tensor  # int32 [R]: tokens of each request after this step; 0 for padding requests
    logit_rows: Tensor | None  # int64 [rows]; None: all tokens
    tiles: Tiles
    draws: Draws | None = None  # of the logit rows of a graph; `uniforms` has one axis here


def selected_tensors(batch: BatchTensors, rows: Tensor) -> BatchTensors:
    """Return a batch of the tokens `rows`, int64 [n], each as a request of one token. It writes no slots."""
    starts, positions = batch.query_starts, batch.positions[rows]
    requests = torch.searchsorted(starts, rows.to(starts.dtype), right=True) - 1
    numbers = torch.arange(len(rows) + 1, dtype=starts.dtype, device=rows.device)
    tiles = torch.stack((numbers[:-1], torch.zeros_like(numbers[:-1]), numbers[:-1]), -1)
    longest = max(it.max_context for it in batch.tiles.lists)
    queries = min(it.queries for it in batch.tiles.lists)
    return BatchTensors(
        token_ids=batch.token_ids[rows],
        positions=positions,
        slots=(),
        tables=tuple(table.index_select(0, requests) for table in batch.tables),
        query_starts=numbers,
        context_lengths=(positions + 1).to(torch.int32),
        logit_rows=None,
        tiles=Tiles((TileList(tiles, len(rows), queries, longest),) if len(rows) else ()),
    )


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Input tokens that the host does not know yet, because the previous step is sampling them."""

    indices: list[int]  # token indices in the batch
    rows: list[int]  # rows of `sampled`
    sampled: Tensor | None = None  # int64 [at least the rows above], on the GPU


NO_PENDING_TOKENS = PendingTokens([], [])


class StepBuffers:
    """The GPU memory that holds an engine's batches, one at a time.

    A batch is valid until the next call of `fill`. Kernels that read it must be launched before that, on the same
    stream.
    """

    def __init__(self, limits: BatchLimits, gpu: Gpu) -> None:
        self._gpu = gpu
        self._limits = limits
        lists = 8 * limits.tokens * (4 + limits.groups) + (16 + DRAW_BYTES) * (limits.tokens + limits.requests)
        size = lists + 12 * STAGED_ENTRIES + 24 * ALIGNMENT
        self._memory = torch.zeros(size, dtype=torch.uint8, device=gpu.device)
        shape = (limits.groups, limits.requests, limits.table_blocks)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=gpu.device)
        self._sent_tables: list[list[list[int]]] = [[[] for _ in range(limits.requests)] for _ in range(limits.groups)]

    def fill(
        self,
        batch: Batch,
        tiles: Tiles,
        pending: PendingTokens = NO_PENDING_TOKENS,
        size: GraphSize | None = None,
        draws: Draws | None = None,
    ) -> BatchTensors:
        """Send a batch to the GPU. Raises IndexError if it exceeds the limits.

        A batch for a graph is padded to its `size` with requests that have no context. Their tokens write to the null
        block. Its `draws` are those of its logit rows, in order; None: all are greedy.
        """
        self._check_limits(batch)
        try:
            return self._fill(batch, tiles, pending, size, draws)
        except BaseException:  # the tables on the GPU may differ from those noted as sent
            self.invalidate_tables()
            raise

    def _fill(
        self, batch: Batch, tiles: Tiles, pending: PendingTokens, size: GraphSize | None, draws: Draws | None
    ) -> BatchTensors:
        tokens, count = (size.tokens, size.rows) if size else (len(batch.token_ids), len(batch.context_lengths))
        rows = _logit_rows(batch, size)
        lists = [_padded(batch.token_ids, tokens), _padded(batch.positions, tokens)]
        lists += [_padded(slots, tokens) for slots in batch.slot_mappings]
        lists += [size.padded_starts(batch.query_starts) if size else np.asarray(batch.query_starts, np.int32)]
        lists += [_padded(batch.context_lengths, count).astype(np.int32), *_on_host(tiles)]
        lists += [] if rows is None else [rows]
        lists += [] if size is None else _padded_draws(draws, size.tokens)
        changed = [np.asarray(pending.indices, np.int32), np.asarray(pending.rows, np.int32), *self._changes(batch)]
        sent = iter(self._send([*lists, *changed]))
        tensors = BatchTensors(
            token_ids=next(sent),
            positions=next(sent),
            slots=tuple(next(sent) for _ in batch.slot_mappings),
            tables=tuple(self._tables[:, :count]),
            query_starts=next(sent),
            context_lengths=next(sent),
            tiles=_with_sent(tiles, sent),
            logit_rows=None if rows is None else next(sent),
            draws=None if size is None else Draws(*(next(sent) for _ in Draws._fields)),
        )
        self._apply(tensors, pending, *sent)
        return tensors

    def _check_limits(self, batch: Batch) -> None:
        limits, longest = self._limits, max(len(table) for tables in batch.block_tables for table in tables)
        tokens, requests = len(batch.token_ids), len(batch.context_lengths)
        if tokens > limits.tokens or requests > limits.requests or longest > limits.table_blocks:
            raise IndexError(f"{tokens} tokens of {requests} requests with {longest} blocks exceed the limits")

    def _changes(self, batch: Batch) -> tuple[Array, Array]:
        """Return the flat indices and the values of the block table entries that differ from those on the GPU."""
        indices, values = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        for number, (known, tables) in enumerate(zip(self._sent_tables, batch.block_tables, strict=True)):
            for row, table in enumerate(tables):
                if known[row] == table:  # usually the table is the same as in the previous step
                    continue
                first = len(known[row]) if table[: len(known[row])] == known[row] else 0
                known[row] = list(table)
                start = (number * self._limits.requests + row) * self._limits.table_blocks
                indices.append(np.arange(start + first, start + len(table)))
                values.append(np.asarray(table[first:], np.int32))
        return np.concatenate(indices), np.concatenate(values)

    def invalidate_tables(self) -> None:
        """Make the next `fill` send whole block tables, because a failed step may not have copied its entries."""
        for known in self._sent_tables:
            known[:] = [[] for _ in known]

    def _send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Copy arrays to the GPU in one transfer, each aligned to ALIGNMENT. Arrays that do not fit are copied one by
        one.
        """
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
        """Apply the copied updates: pending tokens to the token ids, and changed entries to the block tables."""
        indices, rows, entries, values = sent
        if pending.sampled is not None:
            fill_pending_tokens(pending.sampled, rows, indices, tensors.token_ids)
        if len(entries):
            self._tables.view(-1).index_copy_(0, entries, values)


_TYPES = {np.int64: torch.int64, np.int32: torch.int32, np.float64: torch.float64, np.float32: torch.float32}


def _padded(numbers: Sequence[int], length: int) -> Array:
    """Return an int64 array of the numbers, with zeros appended up to `length`."""
    array = np.zeros(length, np.int64)
    array[: len(numbers)] = numbers
    return array


def _padded_draws(draws: Draws | None, length: int) -> list[Array]:
    """Return the columns of draws, with greedy ones appended up to `length`. Row i draws from row i of the logits."""
    shapes = ((length, ATTEMPTS), *[(length,)] * 4)
    types = (np.float64, np.float32, np.float32, np.int32, np.float32)
    padded: list[Array] = [np.zeros(shape, kind) for shape, kind in zip(shapes, types, strict=True)]
    if draws is not None:
        for to, column in zip(padded, draws[:-1], strict=True):
            to[: len(column)] = column.numpy()
    return [*padded, np.arange(length, dtype=np.int32)]


def _logit_rows(batch: Batch, size: GraphSize | None) -> Array | None:
    """Return the logit rows to send, int64; None: all tokens. A graph of several tokens per request computes logits of
    as many rows as it has tokens; those after the batch's are repetitions of the first.
    """
    if size is not None and size.queries > 1:
        return _padded(batch.logit_rows, size.tokens)
    all_wanted = list(batch.logit_rows) == list(range(len(batch.token_ids)))
    return None if all_wanted else np.asarray(batch.logit_rows, np.int64)


def _on_host(tiles: Tiles) -> Iterator[Array]:
    """Yield the tile lists that must be sent with this step. The tiles of a captured step are already on the GPU."""
    for each in tiles.lists:
        if not each.tiles.is_cuda:
            yield each.tiles.numpy()


def _with_sent(tiles: Tiles, sent: Iterator[Tensor]) -> Tiles:
    def on_device(each: TileList) -> TileList:
        return each if each.tiles.is_cuda else replace(each, tiles=next(sent).view(each.tiles.shape))

    return replace(tiles, lists=tuple(map(on_device, tiles.lists)))
