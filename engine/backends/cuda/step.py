"""CudaStep: the function that computes batches on a GPU, launched one after another and never waited for.

Steps in which every request has one token are recorded and replayed, all others launched kernel by kernel. Refuses to
know requests, and what becomes of the logits.
"""

from itertools import pairwise

import torch
from torch import Tensor

from engine.backends.cuda.batch_tensors import NO_PENDING_TOKENS, BatchLimits, BatchTensors, PendingTokens, StepBuffers
from engine.backends.cuda.gpu import Gpu
from engine.backends.cuda.graphs import Size, StepGraphs
from engine.batch import Batch
from engine.config import BLOCK_SIZE
from engine.kernels.attention_tiles import TileQueries, query_tiles
from engine.kv.blocks import NULL_BLOCK
from engine.kv.cache import KVCache
from engine.models import Model
from engine.sampling.drawing import Logits


class CudaStep:
    """A model over its caches. Launches go to the stream of the thread, which is the same for all of them."""

    def __init__(self, gpu: Gpu, model: Model, kv: KVCache, limits: BatchLimits, queries: TileQueries) -> None:
        self.gpu = gpu
        self.kv = kv
        self._model = model
        self._queries = queries
        self._buffers = StepBuffers(limits, gpu)
        most = Size(limits.requests, limits.table_blocks * BLOCK_SIZE)
        self._graphs = StepGraphs(gpu, self._compute, queries, most, model.config.vocab_size)

    def __call__(self, batch: Batch) -> Logits:
        return Logits(self.launch(batch))

    def launch(self, batch: Batch, pending: PendingTokens = NO_PENDING_TOKENS, *, kept: bool = False) -> Tensor:
        """Float32 [logit rows, vocabulary], computed some time. Valid until the next launch, or, if they are to be
        kept, for as long as somebody has them."""
        with torch.inference_mode(), self.gpu.current():
            size = None if kept else self._graphs.size_of(batch)
            if size is not None:
                tensors = self._buffers.fill(batch, self._graphs.tiles(size), pending, size.requests)
                return self._graphs.run(size, tensors)[: len(batch.logit_rows)]
            tiles = query_tiles(batch.query_starts, batch.context_lengths, self._queries)
            return self._compute(self._buffers.fill(batch, tiles, pending))

    def recover(self) -> None:
        """Memory has run out: wait for what was launched, and give back what is only kept for speed."""
        with self.gpu.current():
            self.gpu.synchronize()
            self._graphs.forget()
            self._buffers.forget()
            self.gpu.drop_caches()

    def _compute(self, tensors: BatchTensors) -> Tensor:
        logits: Tensor = self._model.forward(tensors, self.kv)
        return logits


def largest_batch(tokens: int, requests: int, groups: int) -> Batch:
    """As many tokens and requests as a step can have, all of them in the null block: to see what a step takes."""
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
