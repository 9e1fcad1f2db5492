"""Recorded steps: those in which every request has one token are recorded once for each size, and replayed.

A step of few tokens is hundreds of short kernels, and launching them one by one takes longer than they do. A recording
(a CUDA graph) launches them all at once. It computes on the tensors that it was recorded with, so a batch is filled in
where those are; requests are padded to the next size there is a recording of, and contexts are of a class, since the
grid of an attention kernel depends on the longest. Sizes are recorded when they first come up. All share their memory,
but for the logits, which they leave in one buffer.

Refuses to know what a step computes.
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
SHORT_CONTEXT = 1024  # tokens: the least class
CLASS_STEP = 4  # times as long is the next one


@dataclass(frozen=True, slots=True)
class Size:
    """What one recording is for."""

    requests: int
    context: int  # no request has more tokens


class StepGraphs:
    """The recordings of one model. `compute` gives logits float32 [requests, vocabulary]."""

    def __init__(
        self,
        gpu: Gpu,
        compute: Callable[[BatchTensors], Tensor],
        queries: TileQueries,
        most: Size,
        vocabulary: int,
    ) -> None:
        self._gpu = gpu
        self._compute = compute
        self._queries = queries
        self._requests = sorted({min(size, most.requests) for size in SIZES} | {most.requests})
        self._contexts = tuple(_classes(most.context))
        self._logits = torch.empty(most.requests, vocabulary, dtype=torch.float32, device=gpu.device)
        self._pool = gpu.recordings_pool()
        self._tiles: dict[Size, Tiles] = {}
        self._recorded: dict[Size, Callable[[], None]] = {}
        self._gave_up = False

    def size_of(self, batch: Batch) -> Size | None:
        """The recording that a batch fits; None where there can be none."""
        requests = len(batch.context_lengths)
        if self._gave_up or not len(batch.token_ids) == requests == len(batch.logit_rows) <= self._requests[-1]:
            return None
        longest = max(batch.context_lengths)
        return Size(
            next(size for size in self._requests if size >= requests),
            next(context for context in self._contexts if context >= longest),
        )

    def tiles(self, size: Size) -> Tiles:
        """The same for every batch of a size, and always in the same place."""
        if size not in self._tiles:
            self._tiles[size] = decode_tiles(size.requests, size.context, self._queries).to(self._gpu.device)
        return self._tiles[size]

    def run(self, size: Size, tensors: BatchTensors) -> Tensor:
        """Float32 [requests, vocabulary], valid until the next run."""
        if size not in self._recorded and not self._record(size, tensors):
            return self._compute(tensors)
        self._recorded[size]()
        return self._logits[: size.requests]

    def forget(self) -> None:
        """Give back their memory; they are recorded again when they come up."""
        self._recorded.clear()

    def _record(self, size: Size, tensors: BatchTensors) -> bool:
        def work() -> None:
            self._logits[: size.requests].copy_(self._compute(tensors))

        try:
            self._recorded[size] = self._gpu.record(work, self._pool)
        except RuntimeError as problem:  # out of memory is one of them
            self._gave_up = True
            self.forget()
            log.warning("steps are not recorded, which makes them slower: %s", problem)
            return False
        return True


def _classes(most: int) -> Iterator[int]:
    context = SHORT_CONTEXT
    while context < most:
        yield context
        context *= CLASS_STEP
    yield most
