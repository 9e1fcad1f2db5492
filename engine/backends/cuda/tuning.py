"""Measure the fastest tile sizes for a model's matrices on a GPU. `engine.backends.cuda.tile_file` stores them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from engine import models
from engine.backends.cuda.gpu import Gpu
from engine.backends.cuda.operations import CudaOperations
from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.weights import LoadProgress, Weights
from quant.cuda.backend import CudaBackend
from quant.cuda.linear import CudaLinear
from quant.cuda.matrix import PackedMatrix
from quant.kernels.packed_product import packed_product
from quant.kernels.tile_search import fastest_tile
from quant.kernels.tiles import TOKENS, ProductShape, ProductTile
from quant.linear import QLinear, Use
from quant.tensor import QTensor

Call = Callable[[], object]
Timer = Callable[[Sequence[Call]], float]  # runs all calls in turn, and returns the seconds per call
CONTEXT = 64  # tokens in the rotary tables, which no measurement uses
REPLAYS = 7


@dataclass(frozen=True)
class _RecordingBackend(CudaBackend):
    """A linear backend that records the layers it creates."""

    made: list[CudaLinear] = field(default_factory=list)

    def linear(self, segments: Sequence[QTensor], use: Use = Use.PRODUCTS) -> QLinear:
        layer = super().linear(segments, use)
        if isinstance(layer, CudaLinear):
            self.made.append(layer)
        return layer


class Tuning:
    """A model's packed matrices on a GPU, for timing products with them. Raises the same errors as loading a model.

    `timer` replaces the GPU timer in tests.
    """

    def __init__(self, checkpoint: Checkpoint, gpu: Gpu, progress: LoadProgress, timer: Timer | None = None) -> None:
        self._gpu, self._timer = gpu, timer or partial(_recorded_seconds, gpu)
        self._matrices: dict[tuple[str, int, int, int], list[PackedMatrix]] = {}
        with gpu.current():
            for matrix in _matrices(checkpoint, gpu, progress):
                self._matrices.setdefault((matrix.form.kind, *matrix.shape, matrix.form.few_tokens), []).append(matrix)

    @property
    def shapes(self) -> list[ProductShape]:
        """Return the shapes of all products to measure."""
        return [ProductShape(*key[:3], tokens, key[3]) for key in self._matrices for tokens in TOKENS]

    def fastest(self, shape: ProductShape) -> ProductTile:
        """Return the fastest tile for a shape. The default tile wins unless another is clearly faster."""
        with self._gpu.current(), torch.inference_mode():
            return fastest_tile(shape, self._gpu.card, partial(self._seconds, shape))

    def _seconds(self, shape: ProductShape, tile: ProductTile) -> float | None:
        """Return the seconds per product with a tile, or None if the tile does not fit the GPU.

        All matrices of the shape are used in turn, so that little of the next one is in the cache.
        """
        matrices = self._matrices[shape.kind, shape.outputs, shape.inputs, shape.few_tokens]
        x = torch.randn(shape.tokens, shape.inputs, device=self._gpu.device).bfloat16()
        out = torch.empty(shape.tokens, shape.outputs, dtype=torch.bfloat16, device=self._gpu.device)
        try:
            return self._timer([partial(packed_product, it, x, out, tile, bias=None, add=False) for it in matrices])
        except OutOfResources:
            return None


def _matrices(checkpoint: Checkpoint, gpu: Gpu, progress: LoadProgress) -> list[PackedMatrix]:
    """Load a model, and return all packed matrices in the form that its layers use."""
    config = models.read_config(checkpoint.metadata)
    backend = _RecordingBackend(gpu.device, gpu.card, deterministic=False)
    weights = Weights(checkpoint.path, models.stored_weights(checkpoint), progress)
    models.load(config, weights, CudaOperations(backend, gpu.card, deterministic=False), CONTEXT)
    return [it for layer in backend.made for it in layer.matrices if isinstance(it, PackedMatrix)]


def _recorded_seconds(gpu: Gpu, calls: Sequence[Call]) -> float:
    """Return the median seconds per call over several replays of a CUDA graph."""
    calls[0]()  # this call compiles the kernels
    gpu.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)
