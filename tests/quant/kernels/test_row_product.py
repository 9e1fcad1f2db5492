"""Products of one row that do the work of the norms and the gate next to them, compared with plain torch."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quant.cuda.loading import to_device
from quant.cuda.matrix import PackedMatrix
from quant.kernels.packed_product import RowNorm, UnscaledRow, gated_row_product, row_product, summed_row_product
from quant.kernels.reference import dequantize
from quant.kernels.tiles import ProductTile
from tests.quant.cpu.random_weights import random_weight

pytestmark = pytest.mark.usefixtures("fenced_memory")

KINDS = ("Q4_K", "Q6_K", "Q8_0", "Q5_K", "MXFP4", "int4 g32 zeros 1")
TILES = (ProductTile(16, 2, 1), ProductTile(16, 8, 1, 1, 3))
EPSILON = 1e-5


def matrix_of(kind: str, rows: int, columns: int, device: torch.device) -> tuple[PackedMatrix, Tensor]:
    weight = random_weight(kind, rows, columns, np.random.default_rng())
    matrix = to_device(weight, device)
    assert isinstance(matrix, PackedMatrix)
    return matrix, dequantize(weight)


def normed(x: Tensor, slope: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * slope


def unscaled_row(x: Tensor, slope: Tensor, parts: int, device: torch.device) -> UnscaledRow:
    squares = torch.stack([it.square().sum() for it in x[0].chunk(parts)])
    return UnscaledRow((x * slope).bfloat16().to(device), squares.to(device), EPSILON)


def check(got: Tensor, want: Tensor, size: Tensor) -> None:
    """Check that the error is no larger than rounding the row and the weights to bfloat16 causes."""
    assert ((got.float().cpu() - want).abs() <= size / 100 + 1e-4).all()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("kind", KINDS)
def test_product_with_an_unscaled_row_is_that_with_the_normalized_row(
    kind: str, tile: ProductTile, device: torch.device, early: bool
) -> None:
    matrix, values = matrix_of(kind, 40, 512, device)
    x, slope, bias = 30 * torch.randn(1, 512), torch.rand(512) + 0.5, torch.randn(40)
    out = torch.full((1, 40), torch.nan, device=device)
    row_product(matrix, unscaled_row(x, slope, 5, device), out, tile, early=early, bias=bias.to(device))
    row = normed(x, slope)
    check(out, row @ values.T + bias, row.abs() @ values.abs().T)


@pytest.mark.parametrize("rows", [40, 37])
@pytest.mark.parametrize("kind", KINDS)
def test_sum_is_returned_as_the_next_product_needs_it(kind: str, rows: int, device: torch.device, early: bool) -> None:
    matrix, values = matrix_of(kind, rows, 512, device)
    x, stream, slope = torch.randn(1, 512), 100 * torch.randn(1, rows), torch.rand(rows) + 0.5
    out, norm = stream.clone().to(device), RowNorm(slope.to(device), EPSILON)
    found = summed_row_product(matrix, x.bfloat16().to(device), out, TILES[0], norm, None, early=early)
    want = stream + x.bfloat16().float() @ values.T
    check(out, want, want.abs() + x.abs() @ values.abs().T)
    torch.testing.assert_close(found.values.cpu(), (out.cpu() * slope).bfloat16())
    torch.testing.assert_close(found.squares.sum().cpu(), out.cpu().square().sum(), rtol=1e-4, atol=1e-4)
    assert found.epsilon == EPSILON


@pytest.mark.parametrize("is_unscaled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gated_product_is_the_gate_times_up(kind: str, is_unscaled: bool, device: torch.device, early: bool) -> None:
    matrix, values = matrix_of(kind, 48, 512, device)
    x, slope = torch.randn(1, 512), torch.rand(512) + 0.5
    row = normed(x, slope) if is_unscaled else x.bfloat16().float()
    out = torch.full((1, 24), torch.nan, device=device)
    given = unscaled_row(x, slope, 3, device) if is_unscaled else x.bfloat16().to(device)
    gated_row_product(matrix, given, out, TILES[0], "silu", early=early)
    gate, up = (row @ values.T).chunk(2, 1)
    size = (row.abs() @ values.abs().T).chunk(2, 1)
    check(out, F.silu(gate) * up, size[0] * up.abs() + size[1] * gate.abs() + size[0] * size[1] / 100)
