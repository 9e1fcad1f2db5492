"""Record the launches of a step of a model on a card, without the card and without memory for the weights.

The model runs on the device `meta`. The step itself shows its launches, so no kernel is named here.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine import models
from engine.backends.cuda.batch_tensors import BatchLimits
from engine.backends.cuda.device import CudaDevice, CudaOptions
from engine.backends.cuda.gpu import CaptureStream, Gpu, PlannedGpu
from engine.backends.cuda.kernel_launches import launch_every_kernel
from engine.backends.cuda.operations import CudaOperations
from engine.backends.cuda.step import CudaStep
from engine.batch import Batch
from engine.checkpoints.weights import Weights
from engine.config import BLOCK_SIZE, EngineConfig
from engine.kernels import rotated_product
from engine.model_config import ModelConfig
from quant.cuda.backend import CudaBackend
from quant.cuda.linear import CudaLinear
from quant.cuda.matrix import CudaMatrix
from quant.kernels.card import Card
from quant.kernels.integer_rows import IntegerRows
from tests.gpu.random_checkpoint import RandomCheckpoint
from tests.kernels.launches import Launch, record_launches
from tests.kernels.shapes import mixer_of

META = torch.device("meta")
COLUMNS = 8  # tokens of a matrix instruction: fewer tokens take as many instructions
GATHERING = {"ids", "slots"}  # parameters with the numbers of the few rows that a kernel reads or writes
PRODUCTS = ("multiply", "multiply_row", "add_row", "gate_row")  # methods of a linear layer
WRITTEN = "out"  # parameter of the tensor that most kernels write
GATHERED = {"pool", "cos", "sin"}  # parameters of products of which a kernel reads or writes a row
NO_WORK = ("empty", "detach", "alias", "_unsafe_view", "_reshape_alias")  # functions of torch that launch no kernel


class AbsentGpu(PlannedGpu):
    """A card whose tensors have only shapes."""

    @property
    def device(self) -> torch.device:
        return META

    def current(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def capture_stream(self) -> CaptureStream:
        return CaptureStream(Gpu(replace(self.card, interpreted=True)))

    def staging(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)


@dataclass(frozen=True)
class Work:
    """One launch of a step: a kernel of this project, or a function of torch."""

    operation: str  # the operation of the model, with the shape of a matrix
    launch: Launch | None  # None for a function of torch
    programs: int
    traffic: int  # bytes of all tensors
    streamed: int  # bytes of the largest tensor that is read
    multiply_adds: int  # those of matrix instructions, or of a product of torch
    rows: int = 0  # rows of the input of a product, in multiples of COLUMNS


@dataclass(frozen=True)
class Step:
    """A step of equal requests."""

    requests: int
    tokens: int  # tokens of each request that the step computes
    context: int  # tokens of each request after the step

    @property
    def visible(self) -> int:
        """Sum over all tokens of the positions that they see."""
        before = self.context - self.tokens
        return self.requests * (self.tokens * before + self.tokens * (self.tokens + 1) // 2)

    def batch(self) -> Batch:
        blocks = -(-self.context // BLOCK_SIZE)
        count = self.requests * self.tokens
        tables = [[1 + number * blocks + block for block in range(blocks)] for number in range(self.requests)]
        positions = [*range(self.context - self.tokens, self.context)] * self.requests
        starts = [*range(0, count + 1, self.tokens)]
        lengths = [self.context] * self.requests
        return Batch([0] * count, positions, ([0] * count,), (tables,), starts, lengths, [it - 1 for it in starts[1:]])


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the launches of a step, with the operation and the matrix to which they belong."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.works: list[Work] = []
        self._operation = ""
        self._layer: CudaLinear | None = None
        self._rows = 0  # of the input of the product

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self._operation and not func.is_view and not name.startswith(NO_WORK):
            tensors = [it for it in (*args, *(kwargs or {}).values(), result) if isinstance(it, Tensor)]
            pair = args[:2] if name in ("mm", "matmul") else ()
            products = pair[0].shape[0] * pair[0].shape[1] * pair[1].shape[1] if pair else 0
            sizes = {id(it): it.nbytes for it in tensors}
            self.works.append(Work(self._operation, None, 1, sum(sizes.values()), max(sizes.values()), products))
        return result

    def launched(self, launch: Launch, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        if not self._operation:  # what sampling needs of the logits
            return
        tensors = {name: it for name, it in arguments.items() if isinstance(it, Tensor)}
        if self._layer is not None:
            tensors = {name: it for name, it in tensors.items() if name not in GATHERED}
        elif any(name in tensors for name in GATHERING):
            smallest = max(it.shape[0] for name, it in tensors.items() if name in GATHERING)
            tensors = {name: it for name, it in tensors.items() if it.shape[0] == smallest}
        sizes = {it.untyped_storage()._cdata: it.nbytes for it in tensors.values()}
        products = self._multiply_adds(list(tensors.values())) or _integer_multiply_adds(tensors)
        traffic = sum(sizes.values())
        streamed = max(it.nbytes for name, it in tensors.items() if name != WRITTEN)
        rows = self._rows if products else 0
        self.works.append(Work(self._operation, launch, prod(grid), traffic, streamed, products, rows))

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        previous, self._operation = self._operation, self._operation or name
        try:
            yield
        finally:
            self._operation = previous

    @contextmanager
    def product(self, layer: CudaLinear, rows: int) -> Iterator[None]:
        previous = self._operation, self._layer
        kinds = "+".join(_kind(matrix) for matrix in layer.matrices)
        self._operation, self._layer = f"{kinds} {layer.outputs}x{layer.inputs}", layer
        self._rows = -(-rows // COLUMNS) * COLUMNS
        try:
            yield
        finally:
            self._operation, self._layer = previous

    def _multiply_adds(self, tensors: Sequence[Tensor]) -> int:
        """Return the multiply-adds of a product with the matrix among the tensors, or of attention."""
        if self._layer is None:
            return 0
        storages = {it.untyped_storage()._cdata for it in tensors}
        return sum(self._rows * prod(it.shape) for it in self._layer.matrices if _storages(it) & storages)


def _integer_multiply_adds(tensors: dict[str, Tensor]) -> int:
    """Return the multiply-adds of `integer_product`, and 0 for other kernels."""
    if not {"codes", "x_scales"} <= tensors.keys():
        return 0
    return prod(tensors["codes"].shape) * tensors["x"].shape[1]


def _kind(matrix: CudaMatrix) -> str:
    form: Any = getattr(matrix, "form", None)
    return "dense" if form is None else str(getattr(form, "kind", form))


def _storages(matrix: CudaMatrix) -> set[int]:
    values = [getattr(matrix, field.name) for field in fields(matrix)]
    return {it.untyped_storage()._cdata for it in values if isinstance(it, Tensor)}


@contextmanager
def _recording(step: Step, model: ModelConfig) -> Iterator[list[Work]]:
    """Record the launches of the body, with those of each operation under its name."""
    recorder = _Recorder()

    def named(name: str, function: Any) -> Any:
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            with recorder.operation(name):
                return function(self, *arguments, **options)

        return call

    def multiplying(function: Any) -> Any:
        def call(self: CudaLinear, x: Any, *arguments: Any, **options: Any) -> Any:
            rows = len(x) if isinstance(x, Tensor) else x.count if isinstance(x, IntegerRows) else 1
            with recorder.product(self, rows):
                return function(self, x, *arguments, **options)

        return call

    products = {name: multiplying(getattr(CudaLinear, name)) for name in PRODUCTS}
    products_with_rope = mock.patch.object(
        rotated_product, "rotated_product", multiplying(rotated_product.rotated_product)
    )
    public = [name for name in vars(CudaOperations) if not name.startswith("_")]
    operations = {name: named(name, getattr(CudaOperations, name)) for name in public}
    named_operations = mock.patch.multiple(CudaOperations, **operations)
    named_products = mock.patch.multiple(CudaLinear, **products)
    with named_operations, named_products, products_with_rope, record_launches(recorder.launched), recorder:
        yield recorder.works
    attended = 2 * mixer_of(model).width * step.visible  # of one layer, in both products
    for number, work in enumerate(recorder.works):
        if work.operation == "attend" and step.tokens > 1:
            recorder.works[number] = replace(work, multiply_adds=attended)


class RecordedModel:
    """A model with weights of one mix on a card that is not there."""

    def __init__(self, card: Card, model: ModelConfig, mix: str) -> None:
        checkpoint = RandomCheckpoint(model, mix, META)
        self.model = models.read_config(checkpoint.metadata)
        self._device = CudaDevice(AbsentGpu(card), CudaOptions())
        backend = CudaBackend(META, card, deterministic=False, integer_prompts=card.prefers_integers)
        operations = CudaOperations(backend, card, deterministic=False)
        weights = Weights(checkpoint.path, models.stored_weights(checkpoint))
        self._loaded = models.load(self.model, weights, operations, model.context_length)
        self.weight_bytes = checkpoint.bytes_per_step()

    @property
    def step_tokens(self) -> int:
        """The largest number of tokens of a step."""
        return self._device.step_tokens(self.model)

    def step(self, config: EngineConfig) -> CudaStep:
        """Return the function that launches steps, with a KV cache of the configured size."""
        return self._device._step(self._loaded, config)

    def launch_every_kernel(self, context: int, requests: int) -> None:
        """Launch all kernels of a model that serves this many requests, as loading does to compile them."""
        tokens = self.step_tokens
        config = EngineConfig("cuda", context, 0, max_step_tokens=tokens, max_running=requests)
        limits = BatchLimits(tokens, requests, -(-context // BLOCK_SIZE), 1)
        launch_every_kernel(self.step(config.with_pools([2])), limits, self.model)

    def record(self, step: Step) -> list[Work]:
        """Return all launches of a step, in order."""
        blocks, tokens = -(-step.context // BLOCK_SIZE), step.requests * step.tokens
        config = EngineConfig("cuda", step.context, 0, max_step_tokens=tokens, max_running=step.requests)
        launcher = self.step(config.with_pools([step.requests * blocks + 1]))
        with _recording(step, self.model) as works:
            launcher.launch(step.batch(), kept=True)
        return works
