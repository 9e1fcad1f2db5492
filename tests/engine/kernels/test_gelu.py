"""GELU on a GPU against its twin."""

import pytest
import torch
from torch.nn import functional as F

from engine.kernels.gelu import gelu

pytestmark = pytest.mark.usefixtures("fenced_memory")


@pytest.mark.parametrize("shape", [(1, 1), (3, 1536), (5, 2049)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_torchs(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = (3 * torch.randn(shape)).to(dtype)
    got = gelu(x.to(device)).cpu()
    assert got.dtype == dtype
    error = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.float(), F.gelu(x.double()).float(), rtol=error, atol=1e-6)
