"""Concatenate adjacent matrices of equal form, so that q, k, and v of one type take one product."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from quant.cuda import float8
from quant.cuda.float8 import Float8Matrix
from quant.cuda.matrix import TILE_ROWS, CudaMatrix, PlainMatrix


def joined(matrices: Sequence[CudaMatrix]) -> Iterator[CudaMatrix]:
    """Yield the matrices, with adjacent ones of equal form concatenated."""
    for _key, run in groupby(enumerate(matrices), lambda numbered: joining_form(*numbered)):
        same = [matrix for _, matrix in run]
        yield same[0] if len(same) == 1 else _cat(same)


def joining_form(index: int, matrix: CudaMatrix) -> object:
    """Return a key that is equal for matrices that can be concatenated. Other matrices get their unique index."""
    if isinstance(matrix, PlainMatrix):
        return matrix.values.dtype
    if isinstance(matrix, Float8Matrix):
        return matrix.form
    if matrix.form.nested_block or matrix.shape[0] % TILE_ROWS:  # nested scales are counted from the weight's first row
        return index
    order = None if matrix.order is None else tuple(matrix.order.tolist())
    return matrix.form, matrix.scales.dtype, matrix.zeros is None, order


def _cat(matrices: Sequence[CudaMatrix]) -> CudaMatrix:
    first = matrices[0]
    if isinstance(first, PlainMatrix):
        return PlainMatrix(torch.cat([it.values for it in matrices if isinstance(it, PlainMatrix)]))
    if isinstance(first, Float8Matrix):
        return float8.joined([it for it in matrices if isinstance(it, Float8Matrix)])
    tensors: dict[str, Any] = {
        name: torch.cat([matrix.row_tensors[name] for matrix in matrices]) for name in first.row_tensors
    }
    return replace(first, shape=(sum(matrix.shape[0] for matrix in matrices), first.shape[1]), **tensors)
