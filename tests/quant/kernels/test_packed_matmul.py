"""Packed weights times few tokens against plain torch."""

import numpy as np
import pytest
import torch

from quant.cuda.loading import to_device
from quant.cuda.matrix import PackedMatrix
from quant.kernels.packed_matmul import packed_product
from quant.kernels.reference import dequantize
from quant.kernels.tiles import ProductTile
from tests.quant.cpu.random_spans import SPANS, Coded
from tests.quant.cpu.random_weights import QUANTIZED, random_weight, width

CODED = [*QUANTIZED, *(name for name, kind in SPANS.items() if isinstance(kind, Coded))]


def matrix_of(name: str, rows: int, columns: int, device: torch.device) -> tuple[PackedMatrix, torch.Tensor]:
    weight = random_weight(name, rows, columns, np.random.default_rng())
    matrix = to_device(weight, device)
    assert isinstance(matrix, PackedMatrix)
    return matrix, dequantize(weight)


def check(got: torch.Tensor, x: torch.Tensor, values: torch.Tensor) -> None:
    """Within what rounding weights to bfloat16 does to a sum."""
    bound = (x.float().abs() @ values.abs().T) / 256
    want = x.float() @ values.T
    assert ((got.cpu() - want).abs() <= bound + 1e-4).all()


@pytest.mark.parametrize("name", CODED)
def test_it_is_the_product_of_the_values(name: str, device: torch.device) -> None:
    matrix, values = matrix_of(name, 40, width(name, 288), device)
    x = torch.randn(5, values.shape[1]).bfloat16()
    out = torch.full((5, 40), torch.nan, device=device)
    packed_product(matrix, x.to(device), out, ProductTile(32, 2, 8), bias=None, add=False)
    check(out, x, values)
