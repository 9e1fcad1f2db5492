"""A checkpoint of 16- or 32-bit floats that is quantized while it loads.

It wraps another checkpoint. `quant.quantize` quantizes the linear layers of the blocks; other weights are passed
through.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from engine.checkpoints.checkpoint import Checkpoint, Names, StoredWeight
from engine.checkpoints.metadata import Metadata
from quant.errors import UnsupportedQuantization
from quant.quantize import Quantizer, fp8, group_size, int4, is_linear_weight, nf4
from quant.tensor import PlainTensor, QTensor
from quant.tensor_file import Closing

# Quantization methods by name. Each is a function of the column counts of the model's matrices.
METHODS: dict[str, Callable[[list[int]], Quantizer]] = {
    "fp8": lambda _columns: fp8,
    "int4": lambda columns: partial(int4, group=group_size(columns)),
    "nf4": lambda _columns: nf4,
}


class QuantizedCheckpoint(Closing):
    """Implements `engine.checkpoints.checkpoint.Checkpoint`. `method` is one of METHODS."""

    def __init__(self, checkpoint: Checkpoint, method: str) -> None:
        self._checkpoint = checkpoint
        self._method = method

    @property
    def path(self) -> Path:
        return self._checkpoint.path

    @property
    def digest(self) -> str:
        return f"{self._checkpoint.digest} {self._method}"

    @property
    def metadata(self) -> Metadata:
        return self._checkpoint.metadata

    def weights(self, names: Names) -> Mapping[str, StoredWeight]:
        """Return all weights. Also raises UnsupportedQuantization if there is nothing to quantize."""
        stored = self._checkpoint.weights(names)
        layers = {name: weight for name, weight in stored.items() if _is_plain_layer(name, weight)}
        if not layers:
            raise UnsupportedQuantization(f"{self.path} is already quantized", "Load it without --quantize.")
        quantizer = METHODS[self._method]([weight.shape[1] for weight in layers.values() if weight.shape])
        return {**stored, **{name: self._quantized(weight, quantizer) for name, weight in layers.items()}}

    def _quantized(self, weight: StoredWeight, quantizer: Quantizer) -> StoredWeight:
        return replace(
            weight,
            kind=(self._method, weight.kind),
            decode=partial(_decode, weight.decode, quantizer),
            sample=partial(_decode, weight.sample, quantizer),
        )

    def close(self) -> None:
        self._checkpoint.close()


def _is_plain_layer(name: str, weight: StoredWeight) -> bool:
    in_block = name.startswith("blk.") and weight.shape is not None and is_linear_weight(name, weight.shape)
    return in_block and isinstance(weight.sample(), PlainTensor)


def _decode(decode: Callable[[], QTensor], quantizer: Quantizer) -> QTensor:
    weight = decode()
    if not isinstance(weight, PlainTensor):  # possible only if the file was changed after it was opened
        raise UnsupportedQuantization(f"A weight is of type {weight.type_name}, which is already quantized")
    return quantizer(weight)
