"""CUDA graphs of steps with few tokens per request: they are captured once per size and replayed.

A step of few tokens runs hundreds of short kernels, and launching them one by one takes longer than running them. A
graph launches them all at once. A graph reads and writes the tensors it was captured with, so every batch is written to
those tensors, and padded to one of the sizes in `graph_sizes`. All sizes are captured when a model loads, the largest
first, so that the others reuse its memory. Steps of a size whose capture failed are launched kernel by kernel, and the
capture is tried again later. All graphs share one memory pool, and one buffer for logits and their largest values.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from engine.backends.cuda.batch_tensors import BatchTensors
from engine.backends.cuda.gpu import CaptureStream, Gpu
from engine.backends.cuda.graph_sizes import GraphSize, GraphSizes
from engine.backends.device_errors import is_out_of_memory
from engine.batch import Batch
from engine.kernels.attention_tiles import TileQueries, Tiles, decode_tiles, padded_tiles
from engine.kernels.chunk_passes import find_maxima
from engine.kernels.sampling import draw_tokens
from engine.kernels.step_logits import StepLogits

log = logging.getLogger(__name__)

RETRY_STEPS = 1000  # steps of a size without a graph, after which a failed capture is tried again


class StepGraphs:
    """The graphs of one model. `compute` returns logits float32 [logit rows, vocabulary]."""

    def __init__(
        self,
        gpu: Gpu,
        compute: Callable[[BatchTensors], Tensor],
        queries: TileQueries,
        largest: GraphSize,
        vocabulary: int,
        stream: CaptureStream,
    ) -> None:
        self._gpu = gpu
        self._compute = compute
        self._queries = queries
        self._sizes = GraphSizes(largest)
        # no size has more tokens than `largest`
        values = torch.empty(largest.requests, vocabulary, dtype=torch.float32, device=gpu.device)
        self._logits = StepLogits.over(values)
        self._stream = stream
        stream.reset()
        self._tiles: dict[GraphSize, Tiles] = {}
        self._captured: dict[GraphSize, Callable[[], None]] = {}
        self._waits: dict[GraphSize, int] = {}  # steps until a failed capture is tried again
        self.captures = 0
        self.failed_captures = 0

    @property
    def sizes(self) -> list[GraphSize]:
        """All sizes, the largest first."""
        return self._sizes.largest_first

    def fitting_size(self, batch: Batch) -> GraphSize | None:
        """Return the size of the graph that can run a batch, or None if no graph can."""
        return self._sizes.fitting(batch)

    def tiles(self, size: GraphSize, batch: Batch) -> Tiles:
        """Return the attention tiles of a batch of this size. With one token per request, they are the same tensors for
        all batches.
        """
        if size.queries > 1:
            starts = size.padded_starts(batch.query_starts).tolist()
            return padded_tiles(starts, size.requests, size.queries, size.context, self._queries)
        if size not in self._tiles:
            self._tiles[size] = decode_tiles(size.requests, size.context, self._queries).to(self._gpu.device)
        return self._tiles[size]

    def run(self, size: GraphSize, tensors: BatchTensors) -> StepLogits:
        """Replay the graph of this size, capturing it first if needed.

        Returns logits, of which the first are those of the batch's logit rows. They are valid until the next run.
        """
        if size not in self._captured and not self._capture_again(size, tensors):
            return StepLogits.of(self._compute(tensors))
        self._captured[size]()
        return self._logits._replace(is_drawn=True)

    def capture(self, size: GraphSize, tensors: BatchTensors) -> bool:
        """Capture a graph that runs batches in `tensors`. Returns whether this succeeded."""

        def work() -> None:
            logits = self._logits.first(size.tokens)
            logits.values.copy_(self._compute(tensors))
            find_maxima(logits.values, logits.maxima)
            if tensors.draws is not None:
                draw_tokens(logits, tensors.draws, logits.tokens)

        self.captures += 1
        try:
            self._captured[size] = self._capture(work)
        except RuntimeError as problem:  # RuntimeError includes out-of-memory errors
            self.failed_captures += 1
            self._waits[size] = RETRY_STEPS
            log.warning(
                "steps of %d requests with %d tokens each and contexts of up to %d tokens are slower, because their "
                "CUDA graph could not be captured: %s", size.requests, size.queries, size.context, problem,
            )  # fmt: skip
            return False
        return True

    def clear(self) -> None:
        """Release the memory of all graphs. They are captured again when needed."""
        self._captured.clear()
        self._waits.clear()
        self._stream.reset()

    def close(self) -> None:
        """Release the memory of all graphs and of their tensors. No graph can be captured afterwards."""
        self.clear()
        self._tiles.clear()
        del self._compute, self._logits

    def _capture_again(self, size: GraphSize, tensors: BatchTensors) -> bool:
        """Capture a missing graph, unless a capture failed fewer than RETRY_STEPS steps ago."""
        if wait := self._waits.get(size, 0):
            self._waits[size] = wait - 1
            return False
        return self.capture(size, tensors)

    def _capture(self, work: Callable[[], None]) -> Callable[[], None]:
        try:
            return self._stream.capture(work)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # torch does not release cached memory during a capture, and not for other libraries
            self._gpu.drop_caches()
            return self._stream.capture(work)
