"""Compute batches of a model on a GPU, asynchronously.

Steps of few tokens per request are replayed as CUDA graphs (see `graph_sizes`); others are launched kernel by kernel.
"""

from contextlib import suppress
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from engine.backends.cuda.batch_tensors import NO_PENDING_TOKENS, BatchLimits, BatchTensors, PendingTokens, StepBuffers
from engine.backends.cuda.gpu import CaptureStream, Gpu
from engine.backends.cuda.graph_sizes import GraphSize
from engine.backends.cuda.graphs import StepGraphs
from engine.batch import Batch
from engine.config import BLOCK_SIZE
from engine.kernels.attention_tiles import TileQueries, Tiles, query_tiles
from engine.kernels.sampling_rows import Draws
from engine.kernels.step_logits import StepLogits
from engine.kv.blocks import NULL_BLOCK
from engine.kv.cache import KVCache
from engine.models import Model
from engine.sampling.drawing import Logits


class CudaStep:
    """A model with its KV cache. All launches must come from threads with the same current stream."""

    def __init__(
        self,
        gpu: Gpu,
        model: Model,
        kv: KVCache,
        limits: BatchLimits,
        queries: TileQueries,
        stream: CaptureStream,
    ) -> None:
        self.gpu = gpu
        self.kv = kv
        self._compute = partial(compute, model, kv)
        self.queries = queries
        self._groups = limits.groups
        self._buffers = StepBuffers(limits, gpu)
        largest = GraphSize(limits.requests, limits.table_blocks * BLOCK_SIZE)
        self._graphs = StepGraphs(gpu, self._compute, queries, largest, model.config.vocab_size, stream)

    def __call__(self, batch: Batch) -> Logits:
        return Logits(self.launch(batch).values)

    def launch(
        self,
        batch: Batch,
        pending: PendingTokens = NO_PENDING_TOKENS,
        draws: Draws | None = None,
        *,
        kept: bool = False,
    ) -> StepLogits:
        """Launch a step. Returns its logits, a row for each logit row, before the GPU has computed them.

        If a graph is used, it draws a token for each row of `draws`. The logits are valid until the next launch. If
        `kept` is set, they stay valid afterwards, and no graph is used.
        """
        with torch.inference_mode(), self.gpu.current():
            size = None if kept else self._graphs.fitting_size(batch)
            if size is not None:
                tensors = self._buffers.fill(batch, self._graphs.tiles(size, batch), pending, size, draws)
                return self._graphs.run(size, tensors).first(len(batch.logit_rows))
            tiles = query_tiles(batch.query_starts, batch.context_lengths, self.queries)
            return StepLogits.of(self._compute(self._buffers.fill(batch, tiles, pending)))

    def launch_without_graph(self, batch: Batch, tiles: Tiles) -> StepLogits:
        """Launch a step kernel by kernel, with these attention tiles. Returns its logits as `launch` does."""
        with torch.inference_mode(), self.gpu.current():
            return StepLogits.of(self._compute(self._buffers.fill(batch, tiles)))

    def capture(self) -> None:
        """Capture the graphs of all sizes. Writes to the null block only."""
        with torch.inference_mode(), self.gpu.current():
            batch = largest_batch(1, 1, self._groups)
            for size in self._graphs.sizes:
                tensors = self._buffers.fill(batch, self._graphs.tiles(size, batch), size=size)
                self._graphs.capture(size, tensors)
            self.gpu.drop_caches()

    @property
    def captures(self) -> int:
        """Number of graphs that were captured, or could not be, so far."""
        return self._graphs.captures

    @property
    def failed_captures(self) -> int:
        """Number of graphs that could not be captured so far."""
        return self._graphs.failed_captures

    def recover(self) -> None:
        """Recover from exhausted memory: wait for launched work, and release memory that only serves speed."""
        with self.gpu.current():
            self.gpu.synchronize()
            self._graphs.clear()
            self._buffers.invalidate_tables()
            self.gpu.drop_caches()

    def close(self) -> None:
        """Wait for launched work, and free the memory. Nothing may be launched afterwards."""
        with self.gpu.current(), suppress(RuntimeError):  # the GPU may have stopped working
            self.gpu.synchronize()
        self._graphs.close()
        del self.kv, self._compute, self._buffers
        with self.gpu.current(), suppress(RuntimeError):
            self.gpu.drop_caches()


def compute(model: Model, kv: KVCache, tensors: BatchTensors) -> Tensor:
    """Launch the kernels of a step. Returns its logits, float32 [logit rows, vocabulary]."""
    logits: Tensor = model.forward(tensors, kv)
    return logits


def largest_batch(tokens: int, requests: int, groups: int) -> Batch:
    """Return a batch with the largest number of tokens and requests, for measuring the memory of a step.

    All of its keys and values are in the null block.
    """
    starts = [number * tokens // requests for number in range(requests + 1)]
    counts = [stop - start for start, stop in pairwise(starts)]
    slots = [place % BLOCK_SIZE for place in range(tokens)]
    tables = [[NULL_BLOCK] * -(-count // BLOCK_SIZE) for count in counts]
    positions = [position for count in counts for position in range(count)]
    return Batch(
        [0] * tokens,
        positions,
        tuple(slots for _ in range(groups)),
        tuple(tables for _ in range(groups)),
        starts,
        counts,
        [stop - 1 for stop in starts[1:]],
    )
