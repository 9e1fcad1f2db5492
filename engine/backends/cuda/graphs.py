"""CUDA graphs of decode steps: steps in which every request has one token are captured once per size and replayed.

A step of few tokens runs hundreds of short kernels, and launching them one by one takes longer than running them. A
graph launches them all at once. A graph reads and writes the tensors it was captured with, so every batch is written to
those tensors. The batch is padded to the next captured number of requests. Contexts are rounded up to a few sizes,
because the grid of an attention kernel depends on the longest context. A size is captured when it first occurs. All
graphs share one memory pool and one buffer for logits.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.cuda.batch_tensors import BatchTensors
from engine.backends.cuda.gpu import Gpu
from engine.batch import Batch
from engine.kernels.attention_tiles import TileQueries, Tiles, decode_tiles

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SMALLEST_CONTEXT = 1024  # smallest context size in tokens
CONTEXT_FACTOR = 4  # ratio of consecutive context sizes


@dataclass(frozen=True, slots=True)
class GraphSize:
    """The numbers of requests and tokens that one graph is captured for."""

    requests: int
    context: int  # maximum context length of a request, in tokens


class StepGraphs:
    """The graphs of one model. `compute` returns logits float32 [requests, vocabulary]."""

    def __init__(
        self,
        gpu: Gpu,
        compute: Callable[[BatchTensors], Tensor],
        queries: TileQueries,
        largest: GraphSize,
        vocabulary: int,
    ) -> None:
        self._gpu = gpu
        self._compute = compute
        self._queries = queries
        self._requests = sorted({min(size, largest.requests) for size in SIZES} | {largest.requests})
        self._contexts = tuple(_context_sizes(largest.context))
        self._logits = torch.empty(largest.requests, vocabulary, dtype=torch.float32, device=gpu.device)
        self._pool = gpu.graph_pool()
        self._tiles: dict[GraphSize, Tiles] = {}
        self._captured: dict[GraphSize, Callable[[], None]] = {}
        self._disabled = False

    def fitting_size(self, batch: Batch) -> GraphSize | None:
        """Return the size of the graph that can run a batch, or None if no graph can."""
        requests = len(batch.context_lengths)
        if self._disabled or not len(batch.token_ids) == requests == len(batch.logit_rows) <= self._requests[-1]:
            return None
        longest = max(batch.context_lengths)
        return GraphSize(
            next(size for size in self._requests if size >= requests),
            next(context for context in self._contexts if context >= longest),
        )

    def tiles(self, size: GraphSize) -> Tiles:
        """Return the attention tiles for batches of this size, always in the same tensors."""
        if size not in self._tiles:
            self._tiles[size] = decode_tiles(size.requests, size.context, self._queries).to(self._gpu.device)
        return self._tiles[size]

    def run(self, size: GraphSize, tensors: BatchTensors) -> Tensor:
        """Replay the graph of this size, capturing it first if needed.

        Returns logits float32 [requests, vocabulary], valid until the next run.
        """
        if size not in self._captured and not self._capture(size, tensors):
            return self._compute(tensors)
        self._captured[size]()
        return self._logits[: size.requests]

    def clear(self) -> None:
        """Release the memory of all graphs. They are captured again when needed."""
        self._captured.clear()

    def _capture(self, size: GraphSize, tensors: BatchTensors) -> bool:
        def work() -> None:
            self._logits[: size.requests].copy_(self._compute(tensors))

        try:
            self._captured[size] = self._gpu.capture(work, self._pool)
        except RuntimeError as problem:  # RuntimeError includes out-of-memory errors
            self._disabled = True
            self.clear()
            log.warning("CUDA graphs are disabled, so steps are slower: %s", problem)
            return False
        return True


def _context_sizes(largest: int) -> Iterator[int]:
    context = SMALLEST_CONTEXT
    while context < largest:
        yield context
        context *= CONTEXT_FACTOR
    yield largest
