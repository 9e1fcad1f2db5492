"""Loads the parts that layers have: norms, vectors, and linear layers, taken by name and shape."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.checkpoints.weights import Weights
from engine.model_config import ModelConfig
from engine.models.decoder import Projection
from engine.operations import Norm
from quant.kernels.reference import dequantize
from quant.linear import LinearBackend, QLinear
from quant.tensor import QTensor


@dataclass(frozen=True, slots=True)
class PartLoader:
    """Loads parts of a model's layers. `prefix` is the common start of the names of a part's weights."""

    config: ModelConfig
    weights: Weights
    backend: LinearBackend

    def norm(self, name: str, *, scale: float = 1.0) -> Norm:
        """Load a norm of rows, whose output is multiplied by `scale`."""
        rule, hidden = self.config.norm, self.config.hidden
        bias = self.weights.take_vector(f"{name}.bias", hidden) if rule.bias else None
        norm = self.unbiased_norm(name, hidden, scale=scale)
        return norm if bias is None else replace(norm, bias=self.backend.to_device(bias * scale))

    def unbiased_norm(self, name: str, *shape: int, scale: float = 1.0) -> Norm:
        rule, stored = self.config.norm, dequantize(self.weights.take(f"{name}.weight", *shape))
        return Norm(self.backend.to_device((stored + rule.offset) * scale), rule.epsilon, rule.kind)

    def vector(self, name: str, length: int) -> Tensor:
        return self.backend.to_device(self.weights.take_vector(name, length))

    def projection(self, prefix: str, inputs: int, outputs: Mapping[str, int], bias: bool | None) -> Projection:
        weight = self.linear(prefix, inputs, outputs)
        biases = {f"{prefix}{name}.bias": width for name, width in outputs.items()}
        if bias is False or (bias is None and not any(name in self.weights for name in biases)):
            return Projection(weight, None)
        joined = torch.cat([self.weights.take_vector(*it) for it in biases.items()])
        return Projection(weight, self.backend.to_device(joined))

    def linear(self, prefix: str, inputs: int, outputs: Mapping[str, int]) -> QLinear:
        """Load several weights as one layer, with their outputs in order."""
        return self.backend.linear(self.segments(prefix, inputs, outputs))

    def segments(self, prefix: str, inputs: int, outputs: Mapping[str, int]) -> list[QTensor]:
        return [self.weights.take(f"{prefix}{name}.weight", width, inputs) for name, width in outputs.items()]
