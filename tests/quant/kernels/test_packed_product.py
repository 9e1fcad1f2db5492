"""Packed weights times few tokens, compared with plain torch."""

import numpy as np
import pytest
import torch

from quant.cuda.loading import to_device
from quant.cuda.matrix import PackedMatrix
from quant.kernels.packed_product import packed_product
from quant.kernels.reference import dequantize
from quant.kernels.tiles import ProductTile
from tests.quant.cpu.random_group_weights import GROUP_TYPES, Coded
from tests.quant.cpu.random_weights import QUANTIZED, random_weight, width

pytestmark = pytest.mark.usefixtures("fenced_memory")

CODED = [*QUANTIZED, *(name for name, kind in GROUP_TYPES.items() if isinstance(kind, Coded))]


def matrix_of(name: str, rows: int, columns: int, device: torch.device) -> tuple[PackedMatrix, torch.Tensor]:
    weight = random_weight(name, rows, columns, np.random.default_rng())
    matrix = to_device(weight, device)
    assert isinstance(matrix, PackedMatrix)
    return matrix, dequantize(weight)


def check(got: torch.Tensor, x: torch.Tensor, values: torch.Tensor) -> None:
    """Check that the error is no larger than rounding the weights to bfloat16 causes."""
    bound = (x.float().abs() @ values.abs().T) / 256
    want = x.float() @ values.T
    assert ((got.cpu() - want).abs() <= bound + 1e-4).all()


@pytest.mark.parametrize("tile", [ProductTile(16, 2, 1), ProductTile(32, 2, 8), ProductTile(64, 4, 16)])
@pytest.mark.parametrize("name", CODED)
def test_product_equals_the_reference_for_every_type(name: str, tile: ProductTile, device: torch.device) -> None:
    matrix, values = matrix_of(name, 24, width(name, 160), device)
    tokens = min(5, tile.tokens)
    x = torch.randn(tokens, values.shape[1]).bfloat16()
    out = torch.full((tokens, 24), torch.nan, device=device)
    packed_product(matrix, x.to(device), out, tile, bias=None, add=False)
    check(out, x, values)


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "tile"),
    [
        (1, 37, 160, ProductTile(16, 4, 1)),
        (2, 40, 272, ProductTile(32, 2, 8, 2)),
        (16, 16, 256, ProductTile(16, 1, 16)),
        (17, 24, 400, ProductTile(32, 4, 16)),
        (40, 40, 512, ProductTile(32, 2, 32, 2)),
        (17, 72, 400, ProductTile(64, 4, 16, 2, 3)),
        (40, 130, 512, ProductTile(128, 8, 32, 1, 3)),
    ],
)
def test_sizes_need_not_be_multiples_of_the_tile(
    tokens: int, rows: int, columns: int, tile: ProductTile, device: torch.device
) -> None:
    matrix, values = matrix_of("int4 g32 zeros" if columns % 32 == 0 else "int8 channel", rows, columns, device)
    x, bias, stream = torch.randn(tokens, columns).bfloat16(), torch.randn(rows), torch.randn(tokens, rows)
    wide = torch.full((tokens, rows + 3), torch.nan)
    wide[:, 1 : rows + 1] = stream
    out = wide.to(device)
    packed_product(matrix, x.to(device), out[:, 1 : rows + 1], tile, bias=bias.to(device), add=True)
    check(out[:, 1 : rows + 1].cpu() - stream - bias, x, values)
    assert out[:, 0].isnan().all()
    assert out[:, rows + 1 :].isnan().all()
    plain = torch.full((tokens, rows), torch.nan, dtype=torch.bfloat16, device=device)
    packed_product(matrix, x.to(device), plain, tile, bias=None, add=False)
    assert not plain.isnan().any()


def test_tokens_have_the_same_bits_in_any_batch_of_a_tile(device: torch.device) -> None:
    matrix, _ = matrix_of("Q4_K", 40, 512, device)
    x, tile = torch.randn(18, 512).bfloat16().to(device), ProductTile(32, 2, 16, 2)

    def product(some: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(some), 40), torch.nan, device=device)
        packed_product(matrix, some, out, tile, bias=None, add=False)
        return out

    whole = product(x)
    for first, last in [(0, 1), (3, 8), (17, 18)]:
        assert torch.equal(product(x[first:last].contiguous()), whole[first:last])
