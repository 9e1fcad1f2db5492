"""Calibration for int4: measure the mean square of each input column of a decoder's linear layers, over one text.

The reference operations run the model on one chunk of the text after another. All weights stay in memory in the file's
format, and one layer at a time is converted to float32.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from engine import models
from engine.backends.device_errors import raising_out_of_memory
from engine.backends.reference import ReferenceDevice, ReferenceOperations
from engine.batch import Batch, build_batch
from engine.checkpoints.checkpoint import Checkpoint, StoredWeight, stored_bytes
from engine.checkpoints.weights import Weights
from engine.config import BLOCK_SIZE
from engine.errors import EngineError, OutOfMemory, UnsupportedModel
from engine.kv.budget import group_config
from engine.kv.cache import KVCache, kv_groups
from engine.model_config import ModelConfig
from engine.models import Model
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.step import ScheduledRequest, StepPlan
from engine.system_memory import available_memory
from quant.linear import QLinear, ReferenceLinear, Use
from quant.quantize import is_linear_weight
from quant.tensor import QTensor

CHUNK = 256  # tokens per chunk
MEMORY_SHARE = 0.8  # share of the free memory that weights may take

Report = Callable[[int], None]  # called with the number of tokens computed so far


def input_squares(checkpoint: Checkpoint, ids: Sequence[int], report: Report) -> dict[str, Tensor]:
    """Return the mean squares of the input columns, float32 [columns], by the name of the weight in the file.

    The result covers every linear layer of the blocks, except experts that share a tensor, which is not quantized.
    `ids` is one text; tokens past the model's context are ignored. Raises UnsupportedModel, ModelFileError,
    OutOfMemory, or EngineError if the model computes NaN or infinity.
    """
    with raising_out_of_memory(), torch.inference_mode():
        config, stored = models.read_config(checkpoint.metadata), models.stored_weights(checkpoint)
        ids = _readable(checkpoint.path, config, ids)
        if stored_bytes(stored) > MEMORY_SHARE * available_memory():
            raise OutOfMemory(f"{checkpoint.path} does not fit into memory")
        weights = _NamedWeights(checkpoint.path, stored)
        operations = _MeasuringOperations(weights.names)
        _compute(models.load(config, weights, operations, len(ids)), ids, report)
        uses = Counter(weight.name for weight in stored.values())
        found = {
            stored[name].name: (layer.squares / len(ids)).float()
            for name, layer in operations.weights.layers.items()
            if is_linear_weight(name, (layer.outputs, layer.inputs)) and uses[stored[name].name] == 1
        }
    if not all(squares.isfinite().all() for squares in found.values()):
        raise EngineError(f"The model in {checkpoint.path} computes NaN or infinite activations")
    return found


def _readable(path: Path, config: ModelConfig, ids: Sequence[int]) -> Sequence[int]:
    """Return the tokens of the text, truncated to the model's context.

    Raises UnsupportedModel if there are no tokens, or if one is not in the vocabulary.
    """
    if not ids or max(ids) >= config.vocab_size:
        raise UnsupportedModel(f"{path} cannot compute the text: it is empty, or a token is not in the vocabulary")
    return ids[: config.context_length]


def _compute(model: Model, ids: Sequence[int], report: Report) -> None:
    device = ReferenceDevice(keep_dequantized=False, threads=1)
    blocks = 1 + -(-len(ids) // BLOCK_SIZE)
    groups = kv_groups(model.config, device.layer_block)
    kv = KVCache(groups, [blocks] * len(groups))
    for batch in _batches(model.config, ids, blocks):
        model.forward(batch, kv)
        report(batch.context_lengths[0])


def _batches(config: ModelConfig, ids: Sequence[int], blocks: int) -> Iterator[Batch]:
    groups = [group_config(cache) for cache in config.caches]
    request, tables = Request(1, tuple(ids), SamplingParams()), tuple(list(range(1, blocks)) for _ in groups)
    for start in range(0, len(ids), CHUNK):
        part = ScheduledRequest(request, start, min(CHUNK, len(ids) - start), samples=False, block_tables=tables)
        yield build_batch(StepPlan((part,)), vocab_size=config.vocab_size, num_blocks=blocks, groups=groups)


class _NamedWeights(Weights):
    """Weights that record the name of each weight object."""

    def __init__(self, path: Path, stored: Mapping[str, StoredWeight]) -> None:
        super().__init__(path, stored)
        self.names: dict[int, str] = {}  # keyed by the id() of a weight

    def take(self, name: str, *shape: int) -> QTensor:
        weight = super().take(name, *shape)
        self.names[id(weight)] = name
        return weight

    def rows(self, weight: QTensor, index: Tensor) -> QTensor:
        part = super().rows(weight, index)
        self.names[id(part)] = self.names[id(weight)]
        return part


class _MeasuredLinear(ReferenceLinear):
    """Adds up the squares of a layer's inputs, float64 [inputs]. Products need not be bitwise reproducible."""

    def __init__(self, segments: Sequence[QTensor]) -> None:
        super().__init__(segments, keep_dequantized=False)
        self.squares = torch.zeros(self.inputs, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.squares += x.double().square().sum(0)
        return F.linear(x, self.dequantize())


class _MeasuredLayers:
    """A `quant.linear.LinearBackend` that records every layer it makes, keyed by the names of the layer's weights."""

    name = "measured"

    def __init__(self, names: Mapping[int, str]) -> None:
        self.layers: dict[str, _MeasuredLinear] = {}
        self._names = names

    def linear(self, segments: Sequence[QTensor], use: Use = Use.PRODUCTS) -> QLinear:
        layer = _MeasuredLinear(segments)
        self.layers |= {self._names[id(segment)]: layer for segment in segments}
        return layer

    def experts(self, layers: Iterable[Sequence[QTensor]], count: int) -> tuple[QLinear, ...]:
        return tuple(map(self.linear, layers))

    def to_device(self, values: Tensor) -> Tensor:
        return values


class _MeasuringOperations(ReferenceOperations):
    """Operations that run all tokens through all blocks, and skip the output head."""

    weights: _MeasuredLayers

    def __init__(self, names: Mapping[int, str]) -> None:
        self.weights = _MeasuredLayers(names)

    def select(self, x: Tensor, batch: Batch) -> Tensor:
        return x

    def selected(self, batch: Batch) -> Batch:
        return batch

    def logits(self, x: Tensor, head: QLinear, softcap: float = 0.0) -> Tensor:
        return x
