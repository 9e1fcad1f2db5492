"""One kernel stores its results as float32 or as bfloat16, to a range of columns of a wider tensor."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from quant.cuda.loading import to_device
from quant.cuda.matrix import PackedMatrix
from quant.kernels import packed_product, result_type
from quant.kernels.integer_product import integer_product
from quant.kernels.integer_rows import integer_inputs, integer_weights
from quant.kernels.result_type import result_operands
from quant.kernels.tiles import ProductTile
from quant.kernels.token_tiles import token_tiles
from tests.quant.cpu.random_weights import random_weight

pytestmark = pytest.mark.usefixtures("fenced_memory")

ROWS, COLUMNS = 72, 160
FIRST, MORE = 3, 5  # columns of the wider tensor before and after the results; their number is odd
TILES = {
    "few tokens": ProductTile(16, 2, 8),
    "few tokens in parts": ProductTile(32, 2, 8, 2),
    "many tokens": ProductTile(64, 4, 16),
    "many tokens in parts": ProductTile(128, 8, 32, 2),
}
Multiply = Callable[[Tensor], None]


def matrix_of(rows: int, device: torch.device) -> PackedMatrix:
    matrix = to_device(random_weight("Q8_0", rows, COLUMNS, np.random.default_rng(rows)), device)
    assert isinstance(matrix, PackedMatrix)
    return matrix


def inputs(tokens: int, device: torch.device) -> Tensor:
    return torch.randn(tokens, COLUMNS, generator=torch.Generator().manual_seed(tokens)).bfloat16().to(device)


def stored(multiply: Multiply, tokens: int, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the results, and check that the other columns of the wider tensor are not written."""
    wide = torch.full((tokens, FIRST + rows + MORE), torch.nan, dtype=dtype, device=device)
    multiply(wide[:, FIRST : FIRST + rows])
    assert wide[:, :FIRST].isnan().all()
    assert wide[:, FIRST + rows :].isnan().all()
    return wide[:, FIRST : FIRST + rows].clone()


def check_types(multiply: Multiply, tokens: int, rows: int, device: torch.device) -> None:
    """Check that results in bfloat16 are those in float32, rounded."""
    exact = stored(multiply, tokens, rows, torch.float32, device)
    assert not exact.isnan().any()
    assert not torch.equal(exact, exact.bfloat16().float())
    assert torch.equal(stored(multiply, tokens, rows, torch.bfloat16, device), exact.bfloat16())


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES.keys())
@pytest.mark.parametrize(("tokens", "rows"), [(1, ROWS), (7, ROWS - 1), (17, 2 * ROWS + 1)])
def test_products_are_stored_in_both_types(tokens: int, rows: int, tile: ProductTile, device: torch.device) -> None:
    matrix, x, bias = matrix_of(rows, device), inputs(tokens, device), torch.randn(rows).to(device)

    def multiply(out: Tensor) -> None:
        packed_product.packed_product(matrix, x, out, tile, bias=bias, add=False)

    check_types(multiply, tokens, rows, device)


@pytest.mark.parametrize(("tokens", "rows"), [(1, 17), (130, 131)])
def test_integer_products_are_stored_in_both_types(tokens: int, rows: int, device: torch.device) -> None:
    weights, x = integer_weights(matrix_of(rows, device)), integer_inputs(inputs(tokens, device))
    bias = torch.randn(rows).to(device)
    check_types(lambda out: integer_product(weights, x, out, bias=bias, add=False), tokens, rows, device)


@pytest.mark.parametrize("tile", [TILES["few tokens"], TILES["many tokens"]], ids=["few tokens", "many tokens"])
def test_products_of_experts_are_stored_in_both_types(tile: ProductTile, device: torch.device) -> None:
    experts, rows, tokens = 3, 24, 6
    matrix, x = matrix_of(experts * rows, device), inputs(tokens, device)
    ids = torch.tensor([[0, 2], [2, 0], [1, 2], [2, 1], [0, 2], [2, 0]], dtype=torch.int32, device=device)
    tiles = token_tiles(ids, experts, tile.tokens)

    def multiply(out: Tensor) -> None:
        packed_product.packed_expert_product(matrix, x, out, replace(tile, splits=1), tiles, early=False)

    check_types(multiply, tiles.count, rows, device)


def test_more_results_of_experts_than_32_bits_count_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_type, "MOST_RESULTS", 2 * 24 - 1)
    cpu, tile = torch.device("cpu"), TILES["few tokens"]
    tiles = token_tiles(torch.zeros(2, 1, dtype=torch.int32), 1, tile.tokens)
    with pytest.raises(ValueError, match="48 elements, of at most 47"):
        packed_product.packed_expert_product(
            matrix_of(24, cpu), inputs(2, cpu), torch.empty(2, 24), tile, tiles, early=False
        )


@pytest.mark.parametrize(("dtype", "add"), [(torch.bfloat16, True), (torch.float16, False), (torch.float16, True)])
def test_other_types_and_sums_in_bfloat16_are_refused(dtype: torch.dtype, add: bool) -> None:
    with pytest.raises(TypeError, match="; use torch"):
        result_operands(torch.empty(1, 16, dtype=dtype), add=add)
