"""Tokens times 8-bit floats, with every method, compared with the reference."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from quant.cuda.float8 import to_device
from quant.cuda.float8_product import multiply
from quant.kernels import reference
from quant.kernels.card import Card
from quant.kernels.float8_rows import quantized
from quant.tensor import Float8Tensor
from tests.quant.cuda.test_linear import Operations
from tests.quant.float8_weights import float8_weight

pytestmark = pytest.mark.usefixtures("fenced_memory")

OLD = Card("old", (8, 6), 82, 99 << 10, 6 << 20, 24 << 30)
NEW = replace(OLD, capability=(9, 0))  # multiplies 8-bit floats


def exact(x: Tensor, weight: Float8Tensor) -> tuple[Tensor, Tensor]:
    """Return the product, and the product of absolute values as the scale of rounding errors."""
    values = reference.dequantize(weight)
    return x @ values.T, x.abs() @ values.abs().T


@pytest.fixture
def card(request: pytest.FixtureRequest, device: torch.device) -> Card:
    chosen: Card = request.param
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < chosen.capability:
        chosen = OLD
    return chosen


@pytest.mark.parametrize("card", [OLD, NEW], indirect=True)
@pytest.mark.parametrize("block", [(None, None), (1, None), (128, 128), (16, 24)])
@pytest.mark.parametrize("tokens", [1, 33, 65])
def test_product_uses_exact_weights(
    card: Card, block: tuple[int | None, int | None], tokens: int, device: torch.device
) -> None:
    weight, x = float8_weight((32, 272), block), torch.randn(tokens, 272).bfloat16()
    got = multiply(x.to(device), to_device(weight, device), card=card, deterministic=False).cpu()
    assert got.dtype == torch.bfloat16
    if card.multiplies_float8 and block != (16, 24) and tokens > 32:
        codes, scales = (it.cpu() for it in quantized(x.to(device)))
        x = codes.view(torch.float8_e4m3fn).float() * scales
    want, size = exact(x.float(), weight)
    assert ((got.float() - want).abs() <= 2.0**-8 * (want.abs() + size)).all()


@pytest.mark.parametrize("card", [OLD, NEW], indirect=True)
def test_e5m2_keeps_16_bits_of_activations(card: Card, device: torch.device) -> None:
    weight, x = float8_weight((32, 272), (1, None), torch.float8_e5m2), torch.randn(65, 272).bfloat16()
    got = multiply(x.to(device), to_device(weight, device), card=card, deterministic=False).cpu()
    want, size = exact(x.float(), weight)
    assert ((got.float() - want).abs() <= 2.0**-8 * (want.abs() + size)).all()


@pytest.mark.parametrize("block", [(1, None), (128, 128)])
def test_prompts_are_multiplied_without_the_library(block: tuple[int | None, int | None], device: torch.device) -> None:
    """On some cards, torch's product of 8-bit floats with scales of rows raises an error."""
    weight, x = to_device(float8_weight((32, 272), block), device), torch.randn(65, 272).bfloat16().to(device)
    with Operations() as mode:
        multiply(x, weight, card=NEW, deterministic=False)
    assert not [name for name in mode.names if "mm" in name]


def test_error_of_quantized_activations_is_bounded(device: torch.device) -> None:
    weight, x = float8_weight((64, 512), (1, None)), torch.randn(40, 512).bfloat16()
    card = NEW if device.type == "cpu" else OLD
    got = multiply(x.to(device), to_device(weight, device), card=card, deterministic=False).cpu().float()
    want, size = exact(x.float(), weight)
    assert ((got - want).abs() <= (2.0**-4 + 2.0**-8) * size).all()
    assert (got - want).norm() <= 0.04 * want.norm()


@pytest.mark.parametrize("outputs", [32, 50])
@pytest.mark.parametrize("card", [OLD, NEW], indirect=True)
@pytest.mark.parametrize("tokens", [2, 66])
def test_product_adds_the_bias_and_add_to(outputs: int, card: Card, tokens: int, device: torch.device) -> None:
    weight, x = float8_weight((outputs, 99), (1, None)), torch.randn(tokens, 99)
    bias, before = torch.randn(outputs), torch.randn(tokens, outputs)
    want, size = exact(x, weight)
    matrix = to_device(weight, device)
    product = partial(multiply, x.to(device), matrix, card=card, deterministic=False, bias=bias.to(device))
    got = product(out_dtype=torch.float32)
    assert got.dtype == torch.float32
    assert ((got.cpu() - want - bias).abs() <= 2.0**-4 * size + 0.05).all()
    target = before.clone().to(device)
    assert product(add_to=target) is target
    assert ((target.cpu() - want - bias - before).abs() <= 2.0**-4 * size + 0.05).all()


@pytest.mark.parametrize("card", [OLD, NEW], indirect=True)
def test_deterministic_rows_do_not_depend_on_the_batch(card: Card, device: torch.device) -> None:
    weight, x = to_device(float8_weight((32, 64), (1, None)), device), torch.randn(66, 64).bfloat16().to(device)
    whole = multiply(x, weight, card=card, deterministic=True)
    for part in (slice(0, 1), slice(3, 40)):
        assert torch.equal(multiply(x[part], weight, card=card, deterministic=True), whole[part])
