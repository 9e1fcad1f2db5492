"""Unpack rows of 8-bit floats on a GPU: every bit equals the reference."""

import pytest
import torch

from quant.cuda.float8 import to_device
from quant.kernels import reference
from quant.kernels.float8_unpack import unpacked
from tests.quant.float8_weights import float8_weight

pytestmark = pytest.mark.usefixtures("fenced_memory")


@pytest.mark.parametrize("shape", [(1, 16), (37, 99), (50, 600)])
@pytest.mark.parametrize("block", [(None, None), (1, None), (128, 128), (16, 24)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_unpacked_rows_equal_the_reference(
    shape: tuple[int, int], block: tuple[int | None, int | None], dtype: torch.dtype, device: torch.device
) -> None:
    weight = float8_weight(shape, block, dtype)
    matrix, values = to_device(weight, device), reference.dequantize(weight)
    assert torch.equal(unpacked(matrix, torch.float32).cpu(), values)
    ids = torch.randint(0, shape[0], (5,))
    assert torch.equal(unpacked(matrix, torch.bfloat16, ids.to(device)).cpu(), values[ids].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_float8_value_is_decoded_exactly(dtype: torch.dtype, device: torch.device) -> None:
    weight = float8_weight((1, 256), (None, None), dtype)
    weight.values.view(torch.uint8)[0] = torch.arange(256, dtype=torch.uint8)
    got, want = unpacked(to_device(weight, device), torch.float32).cpu(), reference.dequantize(weight)
    finite = want.isfinite()
    assert finite.sum() >= 248
    assert torch.equal(got[finite], want[finite])
