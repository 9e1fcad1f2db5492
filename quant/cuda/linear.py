"""Linear layers on a GPU. The kernel is chosen by the kind of matrix and the number of tokens."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import overload

import torch
from torch import Tensor
from torch.nn import functional as F

from quant.cuda import float8_product
from quant.cuda.float8 import Float8Matrix
from quant.cuda.matrix import DENSE, TILE_ROWS, CudaMatrix, PackedMatrix
from quant.kernels.card import Card
from quant.kernels.float8_unpack import unpacked
from quant.kernels.integer_product import integer_product
from quant.kernels.integer_rows import IntegerRows, integer_inputs, integer_weights
from quant.kernels.packed_product import (
    RowNorm,
    UnscaledRow,
    gated_row_product,
    has_row_kernel,
    packed_product,
    row_product,
    summed_row_product,
)
from quant.kernels.tiles import FIXED_TOKENS, MOST_TOKENS, MeasuredTiles, ProductTile, TileTable
from quant.kernels.unpack import gather_rows, unpack, unpack_rows


class CudaLinear:
    """A linear layer, [tokens, inputs] -> [tokens, outputs]."""

    def __init__(
        self,
        matrices: Sequence[CudaMatrix],
        card: Card,
        *,
        deterministic: bool,
        measured: MeasuredTiles | None = None,
        integer_prompts: bool = False,
    ) -> None:
        self.outputs = sum(matrix.shape[0] for matrix in matrices)
        self.inputs = matrices[0].shape[1]
        self.matrices = tuple(matrices)
        self._tiles, self._deterministic = TileTable(card, measured or {}), deterministic
        self._integer_prompts = integer_prompts
        self._float8 = partial(float8_product.multiply, card=card, deterministic=deterministic)

    @property
    def starts_early(self) -> bool:
        """Whether products with one row start early (`quant.kernels.early_start`)."""
        return self._tiles.card.starts_early

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in GPU memory."""
        return sum(matrix.nbytes for matrix in self.matrices)

    def takes_integers(self, tokens: int) -> bool:
        """Whether `multiply` rounds this number of tokens to 8-bit integers, or takes them rounded."""
        if self._deterministic or not self._integer_prompts or tokens <= MOST_TOKENS:
            return False
        return all(isinstance(matrix, PackedMatrix) and matrix.order is None for matrix in self.matrices)

    def multiply(
        self,
        x: Tensor | IntegerRows,
        *,
        out_dtype: torch.dtype = torch.bfloat16,
        bias: Tensor | None = None,
        add_to: Tensor | None = None,
    ) -> Tensor:
        """Multiply x [tokens, inputs], converted to bfloat16, by the weight, and add `bias` (float32 [outputs]).

        x may be rounded to integers if `takes_integers`. Returns [tokens, outputs] in `out_dtype`. With `add_to`
        (float32, the same shape), the product is added to it in place.
        """
        if isinstance(x, Tensor) and len(self.matrices) == 1 and isinstance(self.matrices[0], Float8Matrix):
            return self._float8(x, self.matrices[0], out_dtype=out_dtype, bias=bias, add_to=add_to)
        tokens, device = (x.count, x.codes.device) if isinstance(x, IntegerRows) else (len(x), x.device)
        out = add_to if add_to is not None else torch.empty(tokens, self.outputs, dtype=out_dtype, device=device)
        if isinstance(x, Tensor):
            x = integer_inputs(as_input(x)) if self.takes_integers(tokens) else as_input(x)
        first = 0
        for matrix in self.matrices:
            columns = slice(first, first := first + matrix.shape[0])
            self._multiply(matrix, x, out[:, columns], None if bias is None else bias[columns], add_to is not None)
        return out

    def multiply_row(
        self, x: Tensor | UnscaledRow, *, out_dtype: torch.dtype = torch.bfloat16, bias: Tensor | None = None
    ) -> Tensor:
        """Do what `multiply` does for one row, which may be unscaled. Requires `takes_rows`."""
        out = torch.empty(1, self.outputs, dtype=out_dtype, device=_device(x))
        first, row = 0, as_input(x)
        for matrix, tile in self.row_matrices():
            columns = slice(first, first := first + matrix.shape[0])
            own_bias = None if bias is None else bias[columns]
            row_product(matrix, row, out[:, columns], tile, early=self.starts_early, bias=own_bias)
        return out

    def add_row(self, x: Tensor | UnscaledRow, stream: Tensor, norm: RowNorm, bias: Tensor | None) -> UnscaledRow:
        """Add the product with one row to `stream`, float32 [1, outputs], and return the sum as `norm` needs it.

        Requires `adds_rows`.
        """
        [(matrix, tile)] = self.row_matrices()
        return summed_row_product(matrix, as_input(x), stream, tile, norm, bias, early=self.starts_early)

    def gate_row(self, x: Tensor | UnscaledRow, gate: str) -> Tensor:
        """Return gate(first half) * second half of the product with one row, bfloat16 [1, outputs / 2].

        `gate` is the value of a `Gate`. Requires `gates_rows`.
        """
        [(matrix, tile)] = self.row_matrices()
        out = torch.empty(1, self.outputs // 2, dtype=DENSE, device=_device(x))
        gated_row_product(matrix, as_input(x), out, tile, gate, early=self.starts_early)
        return out

    @property
    def takes_rows(self) -> bool:
        """Whether `multiply_row` is supported."""
        if self._deterministic:  # the bits of a token must not depend on the number of tokens
            return False
        packed = [matrix for matrix in self.matrices if isinstance(matrix, PackedMatrix)]
        return len(packed) == len(self.matrices) and all(has_row_kernel(it, self._tile(it, 1)) for it in packed)

    @property
    def adds_rows(self) -> bool:
        """Whether `add_row` is supported."""
        return len(self.matrices) == 1 and self.takes_rows

    @property
    def gates_rows(self) -> bool:
        """Whether `gate_row` is supported."""
        return self.adds_rows and self.outputs % (2 * TILE_ROWS) == 0

    def row_matrices(self) -> Iterator[tuple[PackedMatrix, ProductTile]]:
        """Yield the matrices with their tiles of one token, if `takes_rows`."""
        for matrix in self.matrices:
            if isinstance(matrix, PackedMatrix):
                yield matrix, self._tile(matrix, 1)

    def _tile(self, matrix: PackedMatrix, tokens: int) -> ProductTile:
        form, (rows, columns) = matrix.form, matrix.shape
        return self._tiles.product(form.kind, rows, columns, tokens, form.few_tokens, deterministic=self._deterministic)

    def _multiply(
        self, matrix: CudaMatrix, x: Tensor | IntegerRows, out: Tensor, bias: Tensor | None, add: bool
    ) -> None:
        """Write x times one matrix, plus `bias`, to `out` [tokens, rows]. With `add`, add the result to `out`."""
        if isinstance(x, IntegerRows):
            integer_product(integer_weights(packed(matrix)), x, out, bias=bias, add=add)
            return
        tokens = len(x)
        if isinstance(matrix, PackedMatrix) and tokens > 0 and (self._deterministic or tokens <= MOST_TOKENS):
            ordered = x if matrix.order is None else x.index_select(1, matrix.order)
            packed_product(matrix, ordered, out, self._tile(matrix, tokens), bias=bias, add=add)
            return
        if isinstance(matrix, Float8Matrix):
            product = self._float8(x, matrix, out_dtype=torch.float32)
        elif self._deterministic:
            product = _same_for_each_row(x, _dense(matrix))
        else:
            _library_product(x, _dense(matrix), out, add=add)
            if bias is not None:
                out.add_(bias)
            return
        product = product if bias is None else product + bias
        (out.add_ if add else out.copy_)(product)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, out_dtype=torch.float32)

    def rows(self, ids: Tensor) -> Tensor:
        (matrix,) = self.matrices
        if isinstance(matrix, Float8Matrix):
            return unpacked(matrix, torch.float32, ids)
        return unpack_rows(matrix, ids) if isinstance(matrix, PackedMatrix) else gather_rows(matrix.rows, ids)

    def dequantize(self) -> Tensor:
        return torch.cat([_dense(matrix, torch.float32) for matrix in self.matrices])


@overload
def as_input(x: Tensor) -> Tensor: ...
@overload
def as_input(x: Tensor | UnscaledRow) -> Tensor | UnscaledRow: ...
def as_input(x: Tensor | UnscaledRow) -> Tensor | UnscaledRow:
    """Return x as products take it: bfloat16 and contiguous."""
    return x if isinstance(x, UnscaledRow) else x.to(DENSE).contiguous()


def packed(matrix: CudaMatrix) -> PackedMatrix:
    if not isinstance(matrix, PackedMatrix):
        raise TypeError(f"{type(matrix).__name__} is not multiplied in integers")
    return matrix


def _device(x: Tensor | UnscaledRow) -> torch.device:
    return x.values.device if isinstance(x, UnscaledRow) else x.device


def _library_product(x: Tensor, values: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """Write x [tokens, inputs] times the transpose of `values` [outputs, inputs] to `out`, or add it to `out`.

    x and `values` are bfloat16, `out` is bfloat16 or float32. On a GPU, float32 sums are not rounded to bfloat16. On a
    CPU, torch has no such product.
    """
    if out.dtype == DENSE:
        torch.mm(x, values.mT, out=out)
    elif not x.is_cuda:
        (out.add_ if add else out.copy_)(x @ values.mT)
    elif add:
        torch.addmm(out, x, values.mT, out_dtype=torch.float32, out=out)
    else:
        torch.mm(x, values.mT, out_dtype=torch.float32, out=out)
    return out


def _same_for_each_row(x: Tensor, values: Tensor) -> Tensor:
    """Return x times the transpose of `values`, float32. Every library call multiplies FIXED_TOKENS rows, so that the
    bits of a row do not depend on the others.
    """
    padded = F.pad(x, (0, 0, 0, -len(x) % FIXED_TOKENS))
    out = torch.empty(len(padded), len(values), dtype=torch.float32, device=x.device)
    for rows, part in zip(torch.split(out, FIXED_TOKENS), torch.split(padded, FIXED_TOKENS), strict=True):
        _library_product(part, values, rows)
    return out[: len(x)]


def _dense(matrix: CudaMatrix, out_dtype: torch.dtype = DENSE) -> Tensor:
    if isinstance(matrix, Float8Matrix):
        return unpacked(matrix, out_dtype)
    if isinstance(matrix, PackedMatrix):
        return unpack(matrix, out_dtype=out_dtype)
    return (matrix.values if out_dtype == DENSE else matrix.rows).to(out_dtype)
