"""Few tokens times 8-bit floats on a GPU, compared with the reference."""

from functools import partial

import pytest
import torch
from torch import Tensor

from quant.cuda.float8 import to_device
from quant.kernels import reference
from quant.kernels.float8_matmul import multiply
from quant.tensor import Float8Tensor
from tests.quant.float8_weights import float8_weight

pytestmark = pytest.mark.usefixtures("fenced_memory")

SCALES = {"tensor": (None, None), "row": (1, None), "block": (128, 128), "wide": (5, 256), "narrow": (16, 24)}
SIZES = {"small": (21, 64, 1), "odd": (37, 97, 17), "whole": (50, 1024, 3), "tail": (37, 592, 40)}


def multiplied(x: Tensor, weight: Float8Tensor, device: torch.device, *, deterministic: bool = False) -> Tensor:
    matrix = to_device(weight, device)
    return multiply(x.to(device), matrix, deterministic=deterministic, out_dtype=torch.float32).cpu()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", SCALES)
def test_product_equals_the_reference(size: str, scale: str, device: torch.device) -> None:
    outputs, inputs, tokens = SIZES[size]
    dtype = torch.float8_e5m2 if scale == "wide" else torch.float8_e4m3fn
    weight, x = float8_weight((outputs, inputs), SCALES[scale], dtype), torch.randn(tokens, inputs).bfloat16()
    values = reference.dequantize(weight)
    if scale == "narrow" and inputs > 24:  # scales are multiplied into the weight's bfloat16
        values = values.bfloat16().float()
    got = multiplied(x, weight, device)
    # Products of bfloat16 are exact, and sums are in float32.
    assert ((got - x.float() @ values.T).abs() <= 2.0**-19 * (x.float().abs() @ values.abs().T)).all()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_product_adds_the_bias_and_add_to(out_dtype: torch.dtype, device: torch.device) -> None:
    weight, x = float8_weight((37, 96), (1, None)), torch.randn(5, 96)
    bias, before = torch.randn(37), torch.randn(5, 37)
    matrix, rounded = to_device(weight, device), x.bfloat16().float()
    want = rounded @ reference.dequantize(weight).T + bias
    product = partial(multiply, x.to(device), matrix, deterministic=False, bias=bias.to(device))
    got = product(out_dtype=out_dtype)
    assert got.dtype == out_dtype
    torch.testing.assert_close(got.cpu().float(), want, rtol=2.0**-8, atol=1e-4)
    target = before.clone().to(device)
    assert product(add_to=target) is target
    torch.testing.assert_close(target.cpu(), before + want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_float8_value_is_decoded_exactly(dtype: torch.dtype, device: torch.device) -> None:
    """Each token has one nonzero input, up to the largest activations, so that each product is checked alone."""
    weight = float8_weight((64, 16), (1, None), dtype)
    want = reference.dequantize(weight)
    got = multiplied(torch.eye(16), weight, device)
    torch.testing.assert_close(got, want.T, rtol=1e-6, atol=0.0)
    assert (weight.values.float().abs() < torch.finfo(dtype).smallest_normal).sum() > 20
    huge = multiplied(torch.eye(16) * 1e15, weight, device)
    torch.testing.assert_close(huge, want.T * torch.tensor(1e15).bfloat16().float(), rtol=1e-6, atol=0.0)
    tiny = multiplied(torch.eye(16) * 1e-15, weight, device)
    torch.testing.assert_close(tiny, want.T * torch.tensor(1e-15).bfloat16().float(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("scale", ["row", "block"])
def test_deterministic_tokens_have_the_same_bits_in_any_batch(scale: str, device: torch.device) -> None:
    weight, x = float8_weight((48, 272), SCALES[scale]), torch.randn(19, 272).bfloat16()
    together = multiplied(x, weight, device, deterministic=True)
    for part in (slice(0, 1), slice(18, 19), slice(2, 19)):
        assert torch.equal(multiplied(x[part], weight, device, deterministic=True), together[part])


def test_nan_in_one_row_does_not_affect_other_rows(device: torch.device) -> None:
    weight, x = float8_weight((40, 144), (1, None)), torch.randn(6, 144).bfloat16()
    clean = multiplied(x, weight, device)
    x[2] = torch.nan
    spoiled = multiplied(x, weight, device)
    assert spoiled[2].isnan().all()
    keep = [0, 1, 3, 4, 5]
    assert torch.equal(spoiled[keep], clean[keep])
