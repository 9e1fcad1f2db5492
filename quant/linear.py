"""QLinear: a linear layer over quantized weights, and the interface of the backends that make such layers.

`forward` is a backend's fast path; `dequantize` is used to verify it. A fused projection (q, k, and v, or gate and up)
is one layer of several segments, each in its own type. A row of the output is the concatenation of the segments'
outputs.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quant.kernels import reference
from quant.tensor import PlainTensor, QTensor


class Use(enum.Flag):
    """How a layer is used."""

    PRODUCTS = enum.auto()  # `forward`
    ROWS = enum.auto()  # `rows`, as the table of an embedding
    HOST = enum.auto()  # the host's memory holds the weight, because few of its rows are read


class QLinear(Protocol):
    """A linear layer without bias, [tokens, inputs] -> [tokens, outputs], on its backend's device."""

    inputs: int
    outputs: int

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, inputs] float32 -> [tokens, outputs] float32."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weight's rows `ids` (int64 [tokens], in range), float32 [tokens, inputs], for embedding look-ups.

        The layer must have exactly one segment.
        """
        ...

    def dequantize(self) -> Tensor:
        """Return the weight, float32 [outputs, inputs]."""
        ...


class LinearBackend(Protocol):
    """Makes linear layers for one device."""

    @property
    def name(self) -> str: ...

    def linear(self, segments: Sequence[QTensor], use: Use = Use.PRODUCTS) -> QLinear:
        """Return a layer whose outputs are those of `segments`, concatenated. All are matrices with the same number of
        columns. `use` is a hint: the layer supports both uses, but is exact and fast in the named ones.
        """
        ...

    def experts(self, layers: Iterable[Sequence[QTensor]], count: int) -> tuple[QLinear, ...]:
        """Return `count` layers of equal shape, each as by `linear`. They may share memory.

        `layers` yields their segments, one layer at a time, so that few weights are in memory twice.
        """
        ...

    def to_device(self, values: Tensor) -> Tensor:
        """Copy a float tensor that is used with the layers, such as a bias, to the layers' device."""
        ...


class ReferenceLinear:
    """A linear layer in plain torch. Holds the weight as float32 if `keep_dequantized`, else as canonical segments.

    Both variants multiply the same float32 values in the same order. Keeping float32 is about 10 times as fast, and
    takes 4 to 8 times the memory.
    """

    def __init__(self, segments: Sequence[QTensor], *, keep_dequantized: bool) -> None:
        self.outputs = sum(segment.shape[0] for segment in segments)
        self.inputs = segments[0].shape[1]
        whole = torch.cat([reference.dequantize(segment) for segment in segments]) if keep_dequantized else None
        self.segments: tuple[QTensor, ...] = (
            (PlainTensor((self.outputs, self.inputs), "F32", whole),) if whole is not None else tuple(segments)
        )

    def forward(self, x: Tensor) -> Tensor:
        return reference.matmul(x, self.dequantize())

    def rows(self, ids: Tensor) -> Tensor:
        (table,) = self.segments
        return reference.dequantize_rows(table, ids)

    def dequantize(self) -> Tensor:
        values = [reference.dequantize(segment) for segment in self.segments]
        return values[0] if len(values) == 1 else torch.cat(values)


class ReferenceBackend:
    """Makes `ReferenceLinear` layers."""

    name = "reference"

    def __init__(self, *, keep_dequantized: bool) -> None:
        self._keep_dequantized = keep_dequantized

    def linear(self, segments: Sequence[QTensor], use: Use = Use.PRODUCTS) -> QLinear:
        return ReferenceLinear(segments, keep_dequantized=self._keep_dequantized)

    def experts(self, layers: Iterable[Sequence[QTensor]], count: int) -> tuple[QLinear, ...]:
        return tuple(map(self.linear, layers))

    def to_device(self, values: Tensor) -> Tensor:
        return values
