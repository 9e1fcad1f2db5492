"""The gated activation kernel against its reference implementation."""

import pytest
import torch

from engine.kernels import activations, reference
from engine.model_config import Gate

pytestmark = pytest.mark.usefixtures("fenced_memory")


@pytest.mark.parametrize("kind", Gate)
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (3, 1024), (2, 1500)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gated_activations_equal_the_reference(
    kind: Gate, tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = (3 * torch.randn(tokens, 2 * width)).to(dtype)
    got = activations.gated(x.to(device), kind).cpu()
    want = reference.gated(x.float(), kind)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", Gate)
def test_each_row_has_its_own_bias(kind: Gate, device: torch.device) -> None:
    x, biases, rows = 3 * torch.randn(5, 160), 4 * torch.randn(3, 160), torch.tensor([2, 0, 2, 1, 0], dtype=torch.int32)
    got = activations.gated(x.to(device), kind, biases.to(device), rows.to(device)).cpu()
    torch.testing.assert_close(got, reference.gated(x, kind, biases, rows), rtol=1e-5, atol=1e-5)
