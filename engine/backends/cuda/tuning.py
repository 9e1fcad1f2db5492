"""Measure the fastest tile sizes for a model's matrices on a GPU. `engine.backends.cuda.tile_file` stores them."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from engine import models
from engine.backends.cuda.device import rounds_prompts
from engine.backends.cuda.gpu import Gpu
from engine.backends.cuda.operations import CudaOperations
from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.weights import LoadProgress, Weights
from quant.cuda.backend import CudaBackend
from quant.cuda.experts import ExpertStack
from quant.cuda.linear import CudaLinear
from quant.cuda.matrix import PackedMatrix
from quant.kernels.packed_product import packed_expert_product, packed_product
from quant.kernels.tile_search import fastest_tile
from quant.kernels.tiles import TOKENS, ProductShape, ProductTile
from quant.kernels.token_tiles import token_tiles
from quant.linear import QLinear, Use
from quant.tensor import QTensor

Call = Callable[[], object]
Timer = Callable[[Sequence[Call]], float]  # runs all calls in turn, and returns the seconds per call
CONTEXT = 64  # tokens in the rotary tables, which no measurement uses
REPLAYS = 7


@dataclass(frozen=True)
class _RecordingBackend(CudaBackend):
    """A linear backend that records the layers it creates."""

    made: list[CudaLinear | ExpertStack] = field(default_factory=list)

    def linear(self, segments: Sequence[QTensor], use: Use = Use.PRODUCTS) -> QLinear:
        layer = super().linear(segments, use)
        if isinstance(layer, CudaLinear):
            self.made.append(layer)
        return layer

    def stack(self, layers: Iterable[Sequence[QTensor]], count: int) -> ExpertStack:
        stack = super().stack(layers, count)
        self.made.append(stack)
        return stack


@dataclass(frozen=True, slots=True)
class _Equal:
    """The properties that matrices share which are measured together. Those of experts are per expert."""

    kind: str
    outputs: int
    inputs: int
    few_tokens: int
    tokens: tuple[int, ...]  # of a product, or slots of a tile
    experts: int  # 0: not of experts
    active: int

    @property
    def shapes(self) -> list[ProductShape]:
        """Return the shapes of the products to measure. A tile of one slot is used if experts have one token."""
        product = partial(ProductShape, self.kind, self.outputs, self.inputs, few_tokens=self.few_tokens)
        return [product(it, experts=self.active if it == 1 else self.experts) for it in self.tokens]


class Tuning:
    """A model's packed matrices on a GPU, for timing products with them. Raises the same errors as loading a model.

    `activation_bits` is that of `CudaOptions`. `timer` replaces the GPU timer in tests.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        gpu: Gpu,
        progress: LoadProgress,
        timer: Timer | None = None,
        *,
        activation_bits: int = 0,
    ) -> None:
        self._gpu, self._timer = gpu, timer or partial(_recorded_seconds, gpu)
        self._matrices: dict[ProductShape, list[PackedMatrix]] = {}
        self._experts: dict[ProductShape, int] = {}
        with gpu.current():
            for equal, matrix in _matrices(checkpoint, gpu, progress, activation_bits):
                for shape in equal.shapes:
                    self._matrices.setdefault(shape, []).append(matrix)
                    self._experts[shape] = equal.experts

    @property
    def shapes(self) -> list[ProductShape]:
        """Return the shapes of all products to measure."""
        return list(self._matrices)

    def fastest(self, shape: ProductShape) -> ProductTile:
        """Return the fastest tile for a shape. The default tile wins unless another is clearly faster."""
        with self._gpu.current(), torch.inference_mode():
            return fastest_tile(shape, self._gpu.card, partial(self._seconds, shape))

    def _seconds(self, shape: ProductShape, tile: ProductTile) -> float | None:
        """Return the seconds per product with a tile, or None if the tile does not fit the GPU.

        All matrices of the shape are used in turn, so that little of the next one is in the cache.
        """
        slots = shape.tokens * max(1, shape.experts)
        x = torch.randn(slots, shape.inputs, device=self._gpu.device).bfloat16()
        out = torch.empty(slots, shape.outputs, dtype=torch.bfloat16, device=self._gpu.device)
        product: Callable[[PackedMatrix], object]
        if shape.experts:
            ids = torch.arange(shape.experts, dtype=torch.int32, device=self._gpu.device).repeat(shape.tokens)
            tiles = token_tiles(ids.unsqueeze(1), self._experts[shape], shape.tokens)
            early = self._gpu.card.starts_early
            product = partial(packed_expert_product, x=x, out=out, tile=tile, tiles=tiles, early=early)
        else:
            product = partial(packed_product, x=x, out=out, tile=tile, bias=None, add=False)
        try:
            return self._timer([partial(product, matrix) for matrix in self._matrices[shape]])
        except OutOfResources:
            return None


def _matrices(
    checkpoint: Checkpoint, gpu: Gpu, progress: LoadProgress, activation_bits: int
) -> Iterator[tuple[_Equal, PackedMatrix]]:
    """Load a model, and yield all packed matrices in the form that its layers use."""
    config = models.read_config(checkpoint.metadata)
    integers = rounds_prompts(gpu.card, config, activation_bits)
    backend = _RecordingBackend(gpu.device, gpu.card, deterministic=False, integer_prompts=integers)
    weights = Weights(checkpoint.path, models.stored_weights(checkpoint), progress)
    models.load(config, weights, CudaOperations(backend, gpu.card, deterministic=False), CONTEXT)
    for layer in backend.made:
        tokens: tuple[int, ...] = TOKENS
        count = active = 0
        if isinstance(layer, ExpertStack):
            count, active, tokens = layer.count, config.active_experts, layer.packed_slots
        for it in layer.matrices:
            if isinstance(it, PackedMatrix):
                rows, columns = it.shape
                own = rows // max(1, count), columns, it.form.few_tokens
                yield _Equal(it.form.kind, *own, tokens, count, active), it


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
