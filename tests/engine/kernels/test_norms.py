"""Norms on a GPU against their twins."""

import pytest
import torch
from torch.nn import functional as F

from engine.kernels import norms, reference

pytestmark = pytest.mark.usefixtures("fenced_memory")

SHAPES = [(1, 16), (131, 48), (3, 1500), (2, 8200)]
BOTH = [torch.bfloat16, torch.float32]
BF16_ERROR = 2**-8


def rows(tokens: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of sizes far apart."""
    return (torch.randn(tokens, width) * torch.logspace(-2, 2, tokens)[:, None]).to(dtype)


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("out_dtype", BOTH)
def test_rms_norm_is_the_reference(
    tokens: int, width: int, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = rows(tokens, width, dtype), 1 + torch.randn(width)
    got = norms.rms_norm(x.to(device), weight.to(device), 1e-3, out_dtype=out_dtype).cpu()
    assert got.dtype == out_dtype
    error = BF16_ERROR if out_dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.float(), reference.rms_norm(x.float(), weight, 1e-3), rtol=error, atol=1e-5)


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
@pytest.mark.parametrize("dtype", BOTH)
def test_rms_norm_is_added_in_place(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, residual = rows(tokens, width, dtype), torch.randn(width), torch.randn(tokens, width)
    held = residual.to(device, copy=True)
    got = norms.rms_norm_add(x.to(device), weight.to(device), 1e-6, held)
    assert got is held
    expected = residual + reference.rms_norm(x.float(), weight, 1e-6)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("summed", [False, True])
def test_layer_norm_is_torchs(tokens: int, width: int, dtype: torch.dtype, summed: bool, device: torch.device) -> None:
    x, weight, bias = 10 + rows(tokens, width, dtype), torch.randn(width), torch.randn(width)
    plus = torch.randn(tokens, width).to(torch.bfloat16) if summed else None
    on_device = None if plus is None else plus.to(device)
    got = norms.layer_norm(x.to(device), weight.to(device), bias.to(device), 1e-5, plus=on_device, out_dtype=dtype)
    assert got.dtype == dtype
    total = x.double() if plus is None else x.float().double() + plus.double()
    expected = F.layer_norm(total, (width,), weight.double(), bias.double(), 1e-5).float()
    error = 5e-3  # rounding bfloat16, and in float32 means are 10, deviations 0.01 and more
    torch.testing.assert_close(got.cpu().float(), expected, rtol=error, atol=error)


def test_a_row_has_its_own_bits_in_any_batch(device: torch.device) -> None:
    x, weight = rows(37, 200).to(device), torch.randn(200).to(device)
    together = norms.rms_norm(x, weight, 1e-6, out_dtype=torch.float32)
    alone = torch.cat([norms.rms_norm(row[None], weight, 1e-6, out_dtype=torch.float32) for row in x])
    assert torch.equal(together, alone)
