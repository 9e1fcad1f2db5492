"""Values between the operations of a step with a single token, in which products do the work next to them.

A launch takes longer than the norm of one row, and a layer has two of them. So the product that a norm reads also
writes what the norm needs, and the product that reads the norm does the rest (`quant.kernels.packed_vector`). The
product before rotary embedding rotates and stores (`engine.kernels.rotated_product`).
"""

from typing import TypeAlias

import torch
from torch import Tensor

from engine.kernels.norms import normalize
from engine.model_config import NormKind
from engine.operations import Norm
from quant.cuda.linear import CudaLinear, as_input
from quant.kernels.packed_product import RowNorm, UnscaledRow


class NormedRow:
    """A normalized row of the residual stream, for products that can take it unscaled."""

    def __init__(self, unscaled: UnscaledRow, stream: Tensor, norm: Norm) -> None:
        self.unscaled = unscaled
        self._stream = stream
        self._norm = norm
        self._rows: Tensor | None = None

    def rows(self) -> Tensor:
        """Return the normalized row, bfloat16 [1, hidden]. Call this before something is added to the stream."""
        if self._rows is None:
            self._rows = normalize(self._stream, self._norm)
        return self._rows


class StreamRow:
    """The residual stream of one token, whose last addition is launched when it is known what reads the sum."""

    def __init__(self, stream: Tensor, layer: CudaLinear, x: Tensor, bias: Tensor | None) -> None:
        """`stream`: float32 [1, hidden], before the product of x [1, inputs] is added. `layer.adds_rows` holds."""
        self._stream = stream
        self._layer = layer
        self._x = x
        self._bias = bias
        self._is_summed = False

    def rows(self) -> Tensor:
        """Return the sum, float32 [1, hidden]."""
        if not self._is_summed:
            self._is_summed = True
            self._layer.multiply(self._x, bias=self._bias, add_to=self._stream)
        return self._stream

    def normalized(self, norm: Norm) -> NormedRow | Tensor:
        """Return the normalized sum."""
        if self._is_summed or norm.kind is not NormKind.RMS or norm.bias is not None:
            return normalize(self.rows(), norm)
        self._is_summed = True
        next_norm = RowNorm(norm.weight, norm.epsilon)
        return NormedRow(self._layer.add_row(self._x, self._stream, next_norm, self._bias), self._stream, norm)


class ProductRow:
    """A product that is launched when it is known what reads it."""

    def __init__(self, layer: CudaLinear, x: Tensor | UnscaledRow, bias: Tensor | None, dtype: torch.dtype) -> None:
        """x: [1, inputs], or unscaled. `layer.takes_rows` holds."""
        self.layer = layer
        self.bias = bias
        self.x = as_input(x)
        self._dtype = dtype

    def rows(self) -> Tensor:
        """Return the product, [1, outputs]. Call this at most once."""
        return self.layer.multiply_row(self.x, bias=self.bias, out_dtype=self._dtype)


Rows: TypeAlias = Tensor | NormedRow | StreamRow | ProductRow  # only tensors, unless a step has one token


def rows_of(value: Rows) -> Tensor:
    """Return a value between operations as a tensor."""
    return value if isinstance(value, Tensor) else value.rows()


def input_of(value: Rows) -> Tensor | UnscaledRow:
    """Return a value as the input of a product that takes single rows."""
    return value.unscaled if isinstance(value, NormedRow) else rows_of(value)


def is_row(x: Tensor | UnscaledRow) -> bool:
    """Whether x is a single row."""
    return isinstance(x, UnscaledRow) or len(x) == 1
