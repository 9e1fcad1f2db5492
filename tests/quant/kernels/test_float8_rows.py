"""Activations as 8-bit floats on a GPU."""

import pytest
import torch

from quant.kernels import reference
from quant.kernels.float8_rows import quantized

pytestmark = pytest.mark.usefixtures("fenced_memory")

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("shape", [(1, 16), (5, 99), (3, 1500)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantized_rows_equal_the_reference(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = (torch.randn(shape) * torch.logspace(-6, 6, shape[0]).unsqueeze(1)).to(dtype)
    codes, scales = (it.cpu() for it in quantized(x.to(device)))
    values, want = reference.quantize_rows(x.float())
    torch.testing.assert_close(scales, want, rtol=1e-6, atol=0.0)
    got = codes.view(E4M3).float()
    assert not got[:, shape[1] :].any()
    got = got[:, : shape[1]]
    # Division rounds differently on some devices: a number at a tie may be rounded either way.
    assert ((got - values.float()).abs() <= values.float().abs() / 8 + 2.0**-9).all()
    assert (got != values.float()).float().mean() < 0.01


def test_quantization_error_is_at_most_half_a_step(device: torch.device) -> None:
    x = torch.randn(4, 512) * torch.logspace(-4, 4, 4).unsqueeze(1)
    codes, scales = (it.cpu() for it in quantized(x.to(device)))
    error = (codes.view(E4M3).float() * scales - x).abs()
    assert (error <= 1.001 * (x.abs() / 16).clamp(min=2.0**-10 * scales)).all()


def test_rows_with_zeros_nan_infinity_and_extreme_values_are_quantized(device: torch.device) -> None:
    x = torch.randn(6, 64)
    x[1], x[2], x[3, 5], x[4, 7], x[5] = 0.0, 1e-38, torch.nan, torch.inf, 1e38
    codes, scales = (it.cpu() for it in quantized(x.to(device)))
    values = codes.view(E4M3).float() * scales
    assert torch.equal(values[1], torch.zeros(64))
    assert values[2].abs().max() <= 2.0**-100
    assert values[3].isnan().any()
    assert values[4].isnan().any()
    torch.testing.assert_close(values[5], x[5], rtol=1e-6, atol=0.0)
    assert values[0].isfinite().all()
