"""Many tokens times 8-bit floats on a GPU, compared with products of the dequantized codes in float64."""

from functools import partial

import pytest
import torch
from torch import Tensor

from quant.cuda.float8 import to_device
from quant.kernels import float8_batch, reference
from quant.kernels.card import Card
from quant.kernels.float8_batch import TILES, Tile, multiply, supports, tile_of
from quant.kernels.float8_rows import quantized
from quant.tensor import Float8Tensor
from tests.kernels.cards import CARDS
from tests.quant.float8_weights import float8_weight
from tests.support.triton_interpreter import short_sums, truncated

pytestmark = pytest.mark.usefixtures("fenced_memory")

H100 = next(card for card in CARDS if card.architecture == 90)
SCALES = {"tensor": (None, None), "row": (1, None), "block": (128, 128), "uneven": (5, 128), "wide": (64, 256)}
SIZES = {"small": (21, 64, 33), "odd": (137, 99, 70), "whole": (128, 512, 128), "tail": (259, 592, 131)}
ERROR = 2e-3  # of the root mean square of the result
SHORT = 14  # bits of a sum that the matrix units of Ada and Hopper keep


def rounded(x: Tensor) -> Tensor:
    """Return the values of the codes of x, float64."""
    codes, scales = (it.cpu() for it in quantized(x))
    return codes.view(torch.float8_e4m3fn).double()[:, : x.shape[1]] * scales.double()


def exact(x: Tensor, weight: Float8Tensor) -> Tensor:
    """Return the product of the quantized x and the weight in float64."""
    return rounded(x) @ reference.dequantize(weight).double().T


@pytest.mark.share(1, "tile")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("tile", TILES)
def test_product_equals_the_reference(
    tile: Tile, scale: str, size: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float8_batch, "tile_of", lambda rows, tokens, card: tile)
    rows, columns, tokens = SIZES[size]
    weight, x = float8_weight((rows, columns), SCALES[scale]), torch.randn(tokens, columns).bfloat16().to(device)
    matrix = to_device(weight, device)
    assert supports(matrix)
    got = multiply(x, matrix, card=H100, out_dtype=torch.float32).cpu()
    # products of codes are exact, and sums of 128 columns are rounded to float32
    magnitude = rounded(x).abs() @ reference.dequantize(weight).double().abs().T
    assert ((got - exact(x, weight)).abs() <= 2.0**-19 * magnitude).all()


@pytest.mark.parametrize("scale", ["row", "block"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_product_adds_the_bias_and_add_to(scale: str, out_dtype: torch.dtype, device: torch.device) -> None:
    weight, x = float8_weight((150, 272), SCALES[scale]), torch.randn(45, 272).to(device)
    bias, before = torch.randn(150), torch.randn(45, 150)
    product = partial(multiply, x, to_device(weight, device), card=H100, bias=bias.to(device))
    want = (exact(x, weight) + bias).float()
    got = product(out_dtype=out_dtype)
    assert got.dtype == out_dtype
    relative = 2.0**-7 if out_dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.cpu(), want.to(out_dtype), rtol=relative, atol=1e-4)
    target = before.clone().to(device)
    assert product(add_to=target) is target
    torch.testing.assert_close(target.cpu(), before + want, rtol=1e-5, atol=1e-4)


def test_sum_is_added_before_it_is_rounded(device: torch.device) -> None:
    """The residual stream gets the float32 product, and not one that was rounded to bfloat16."""
    weight, x = float8_weight((40, 512), (1, None)), torch.randn(40, 512).to(device)
    stream = torch.zeros(40, 40, device=device)
    multiply(x, to_device(weight, device), card=H100, add_to=stream)
    assert not torch.equal(stream, stream.bfloat16().float())


def test_nan_and_huge_values_of_a_token_do_not_affect_other_tokens(device: torch.device) -> None:
    matrix, x = to_device(float8_weight((40, 144), (1, None)), device), torch.randn(66, 144)
    product = partial(multiply, weight=matrix, card=H100, out_dtype=torch.float32)
    clean = product(x.to(device)).cpu()
    x[2], x[3, 7], x[5] = torch.nan, torch.inf, 1e35
    spoiled = product(x.to(device)).cpu()
    assert spoiled[2].isnan().all()
    assert spoiled[3].isnan().any()
    assert spoiled[5].isfinite().all()
    keep = [0, 1, 4, *range(6, 66)]
    assert torch.equal(spoiled[keep], clean[keep])


def test_large_sums_of_exact_codes_are_accurate(device: torch.device) -> None:
    weight, x = _exact_codes(device)
    got = multiply(x, to_device(weight, device), card=H100, out_dtype=torch.float32).cpu()
    assert _error(got, weight, x) <= ERROR / 100


def test_large_sums_are_accurate_though_matrix_units_keep_few_bits(device: torch.device) -> None:
    """The bound is tight enough that sums of all columns in the matrix unit exceed it."""
    weight, x = _exact_codes(device)
    with short_sums(SHORT):
        got = multiply(x, to_device(weight, device), card=H100, out_dtype=torch.float32).cpu()
    assert _error(got, weight, x) <= ERROR
    values, total = reference.dequantize(weight).T, torch.zeros_like(got)
    for start in range(0, len(values), 32):
        total = truncated(total + x.cpu()[:, start : start + 32] @ values[start : start + 32], SHORT)
    assert _error(total, weight, x) > ERROR


def _exact_codes(device: torch.device) -> tuple[Float8Tensor, Tensor]:
    """Return a weight, and x that its codes represent exactly, with 14,336 columns as in an 8B Llama."""
    x = float8_weight((40, 14336), (1, None)).values.float()
    x[:, 0] = 448.0  # the largest value, so that the scale is 1
    return float8_weight((64, 14336), (1, None)), x.to(device)


def _error(got: Tensor, weight: Float8Tensor, x: Tensor) -> float:
    want = x.cpu().double() @ reference.dequantize(weight).double().T
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


def test_matrices_that_are_not_supported() -> None:
    kinds = {"e5m2": ((1, None), torch.float8_e5m2), "narrow": ((16, 24), torch.float8_e4m3fn)}
    for block, dtype in kinds.values():
        assert not supports(to_device(float8_weight((32, 272), block, dtype), torch.device("cpu")))


@pytest.mark.parametrize(
    ("rows", "tokens", "tile"),
    [(28672, 33, 1), (28672, 65, 0), (4096, 64, 2), (4096, 256, 2), (4096, 512, 1), (4096, 1024, 0), (50, 4096, 2)],
)
def test_tile_keeps_most_multiprocessors_busy(rows: int, tokens: int, tile: int) -> None:
    assert tile_of(rows, tokens, H100) is TILES[tile]


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_numbers_of_tokens_that_double_meet_all_tiles(card: Card) -> None:
    """Only the tiles of these numbers are compiled when a model is loaded."""
    for rows in (64, 1024, 3072, 4096, 9728, 28672, 128256):
        tiles = [tile_of(rows, tokens, card) for tokens in range(33, 4097)]
        assert set(tiles) <= {tile_of(rows, 1 << exponent, card) for exponent in range(5, 13)}
