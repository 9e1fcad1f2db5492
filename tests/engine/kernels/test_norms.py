"""The norm kernel against its reference implementation."""

from dataclasses import replace

import pytest
import torch

from engine.kernels import norms, reference
from engine.model_config import NormKind
from engine.operations import Norm

pytestmark = pytest.mark.usefixtures("fenced_memory")

SHAPES = [(1, 16), (131, 48), (3, 1500), (2, 8200)]
BOTH = [torch.bfloat16, torch.float32]
KINDS = [(NormKind.RMS, False), (NormKind.LAYER, False), (NormKind.LAYER, True)]  # (kind, whether it has a bias)
# Rounding of bfloat16; for layer norms also the cancellation of means of 10 with deviations from 0.01.
ERRORS = {NormKind.RMS: {torch.bfloat16: 2**-8, torch.float32: 1e-5}, NormKind.LAYER: dict.fromkeys(BOTH, 5e-3)}


def rows(tokens: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return rows of very different magnitudes."""
    return (torch.randn(tokens, width) * torch.logspace(-2, 2, tokens)[:, None]).to(dtype)


def norm_of(width: int, kind: NormKind, biased: bool) -> Norm:
    return Norm(1 + torch.randn(width), 1e-3, kind, torch.randn(width) if biased else None)


def moved(norm: Norm, device: torch.device) -> Norm:
    bias = None if norm.bias is None else norm.bias.to(device)
    return replace(norm, weight=norm.weight.to(device), bias=bias)


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("out_dtype", BOTH)
@pytest.mark.parametrize(("kind", "biased"), KINDS)
def test_normalize_equals_the_reference(
    tokens: int,
    width: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    kind: NormKind,
    biased: bool,
    device: torch.device,
) -> None:
    x, norm = rows(tokens, width, dtype), norm_of(width, kind, biased)
    if kind is NormKind.LAYER:
        x += 10
    got = norms.normalize(x.to(device), moved(norm, device), out_dtype=out_dtype).cpu()
    assert got.dtype == out_dtype
    error = ERRORS[kind][out_dtype]
    expected = reference.normalize(x.double(), norm).float()
    torch.testing.assert_close(got.float(), expected, rtol=error, atol=max(1e-5, error * (kind is NormKind.LAYER)))


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("kind", "biased"), KINDS)
def test_normalize_add_updates_its_argument(
    tokens: int, width: int, dtype: torch.dtype, kind: NormKind, biased: bool, device: torch.device
) -> None:
    x, norm, residual = rows(tokens, width, dtype), norm_of(width, kind, biased), torch.randn(tokens, width)
    residual_on_device = residual.to(device, copy=True)
    got = norms.normalize_add(x.to(device), moved(norm, device), residual_on_device)
    assert got is residual_on_device
    expected = residual + reference.normalize(x.float(), norm)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_of_rows_are_normalized_and_the_sum_is_scaled(parts: int, device: torch.device) -> None:
    norm = replace(norm_of(96, NormKind.RMS, biased=False), sum_scale=0.6)
    x, residual = torch.randn(5, 96 * parts), torch.randn(5, 96 * parts)
    got = norms.normalize_add(x.to(device), moved(norm, device), residual.to(device, copy=True))
    expected = (residual + reference.normalize(x.view(5, parts, 96), norm).view(x.shape)) * 0.6
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", NormKind)
def test_bits_of_a_row_do_not_depend_on_the_batch(kind: NormKind, device: torch.device) -> None:
    x, norm = rows(37, 200).to(device), moved(norm_of(200, kind, biased=False), device)
    together = norms.normalize(x, norm, out_dtype=torch.float32)
    alone = torch.cat([norms.normalize(row[None], norm, out_dtype=torch.float32) for row in x])
    assert torch.equal(together, alone)
