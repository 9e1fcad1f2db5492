"""Values between the operations of a step with a single token, in which products do the work next to them.

A launch takes longer than the norm of one row, and a layer has two of them. So the product that a norm reads also
writes what the norm needs, and the product that reads the norm does the rest (`quant.kernels.packed_vector`). The
product before rotary embedding rotates and stores (`engine.kernels.rotated_product`).
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from engine.kernels.norms import normalize
from engine.model_config import NormKind
from engine.operations import Norm
from quant.cuda.linear import CudaLinear
from quant.kernels.packed_product import RowNorm, UnscaledRow

# adds a product to the residual stream; with a norm, returns the sum as the next product needs it
Addition = Callable[[RowNorm | None], UnscaledRow | None]


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

    def __init__(self, stream: Tensor, addition: Addition) -> None:
        """`stream`: float32 [1, hidden], before the addition."""
        self._stream = stream
        self._addition: Addition | None = addition

    def rows(self) -> Tensor:
        """Return the sum, float32 [1, hidden]."""
        if self._addition is not None:
            self._addition(None)
            self._addition = None
        return self._stream

    def normalized(self, norm: Norm) -> NormedRow | Tensor:
        """Return the normalized sum."""
        addition = self._addition
        if addition is None or norm.kind is not NormKind.RMS or norm.bias is not None:
            return normalize(self.rows(), norm)
        self._addition = None
        unscaled = addition(RowNorm(norm.weight, norm.epsilon))
        return normalize(self._stream, norm) if unscaled is None else NormedRow(unscaled, self._stream, norm)


class ProductRow:
    """A product that is launched when it is known what reads it."""

    def __init__(self, layer: CudaLinear, x: Tensor | NormedRow, bias: Tensor | None, dtype: torch.dtype) -> None:
        """`layer.takes_rows` holds."""
        self.layer = layer
        self.bias = bias
        self.x = x.unscaled if isinstance(x, NormedRow) else x.to(torch.bfloat16).contiguous()
        self._dtype = dtype

    def rows(self) -> Tensor:
        """Return the product, [1, outputs]. Call this at most once."""
        return self.layer.multiply_row(self.x, bias=self.bias, out_dtype=self._dtype)


Rows: TypeAlias = Tensor | NormedRow | StreamRow | ProductRow  # only tensors, unless a step has one token


def rows_of(value: Rows) -> Tensor:
    """Return a value between operations as a tensor."""
    return value if isinstance(value, Tensor) else value.rows()
