"""QLinear: a linear layer over quantized weights, and the seam behind which each kind of device multiplies.

`forward` is the fast path of a backend; `dequantize` is its oracle. A fused projection (q, k and v, or gate and up) is
one layer of several segments, each in its own type: a row of the output is the segments' outputs side by side.

Refuses to know models, and which backend is the right one for a machine.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quant.kernels import reference
from quant.tensor import PlainTensor, QTensor


class QLinear(Protocol):
    """A linear layer without bias, [tokens, inputs] -> [tokens, outputs], ready to run on its backend."""

    inputs: int
    outputs: int

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] float32 -> [tokens, outputs] float32."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """An embedding look-up: the weight's rows `ids` (int64 [tokens], in range), float32 [tokens, inputs].

        Only for a layer of one segment.
        """
        ...

    def dequantize(self) -> Tensor:
        """The whole weight, float32 [outputs, inputs]."""
        ...


class LinearBackend(Protocol):
    """Makes linear layers for one device. Chosen once; every backend has these same signatures."""

    @property
    def name(self) -> str: ...

    def linear(self, segments: Sequence[QTensor]) -> QLinear:
        """A layer whose outputs are those of `segments` side by side. All are matrices with the same input width."""
        ...

    def to_device(self, values: Tensor) -> Tensor:
        """Floats that are used beside the layers, such as biases, where these compute."""
        ...


class ReferenceLinear:
    """Plain torch. Holds the weight as float32 when `keep_dequantized`, else as canonical segments.

    Both multiply the same float32 values in the same order: keeping buys about 10x speed for 4 to 8x the memory.
    """

    def __init__(self, segments: Sequence[QTensor], *, keep_dequantized: bool) -> None:
        self.outputs = sum(segment.shape[0] for segment in segments)
        self.inputs = segments[0].shape[1]
        whole = torch.cat([reference.dequantize(segment) for segment in segments]) if keep_dequantized else None
        self._segments: tuple[QTensor, ...] = (
            (PlainTensor((self.outputs, self.inputs), "F32", whole),) if whole is not None else tuple(segments)
        )

    def forward(self, x: Tensor) -> Tensor:
        return reference.matmul(x, self.dequantize())

    def rows(self, ids: Tensor) -> Tensor:
        (table,) = self._segments
        return reference.dequantize_rows(table, ids)

    def dequantize(self) -> Tensor:
        values = [reference.dequantize(segment) for segment in self._segments]
        return values[0] if len(values) == 1 else torch.cat(values)


class ReferenceBackend:
    """Makes `ReferenceLinear` layers."""

    name = "reference"

    def __init__(self, *, keep_dequantized: bool) -> None:
        self._keep_dequantized = keep_dequantized

    def linear(self, segments: Sequence[QTensor]) -> QLinear:
        return ReferenceLinear(segments, keep_dequantized=self._keep_dequantized)

    def to_device(self, values: Tensor) -> Tensor:
        return values
