"""Triton's patched interpreter treats bfloat16 and 8-bit floats as a GPU does. The tests also run on a GPU."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.support.triton_interpreter import install

SIZE = 64


@triton.jit
def _product_kernel(a: tl.tensor, b: tl.tensor, out: tl.tensor, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def _cast_kernel(x: tl.tensor, out: tl.tensor, SIZE: tl.constexpr) -> None:
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def _sum_kernel(x: tl.tensor, y: tl.tensor, out: tl.tensor, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    left, right = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, tl.where(left > right, left + right, left * right))


@triton.jit
def _decode_kernel(codes: tl.tensor, out: tl.tensor, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    code = tl.load(codes + at).to(tl.uint16)
    tl.store(out + at, ((code & 0x80) << 8 | (code & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0)


@triton.jit
def _reduce_kernel(x: tl.tensor, out: tl.tensor, SIZE: tl.constexpr) -> None:
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, SIZE))))


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _cast_kernel[len(x) // SIZE,](x, out, SIZE=SIZE)
    return out.cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dot_multiplies_values_not_bits(dtype: torch.dtype, device: torch.device) -> None:
    a, b = torch.randn(2, SIZE, SIZE).to(dtype)
    out = torch.full((SIZE, SIZE), torch.nan, device=device)
    _product_kernel[1,](a.to(device), b.to(device), out, SIZE=SIZE)
    torch.testing.assert_close(out.cpu(), a.float() @ b.float(), rtol=1e-5, atol=1e-4)


HARD = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1 + 2**-8, 1 + 3 * 2**-8, 1e-40, 3.4e38, 2**-9, 2**-10, 3 * 2**-10]
HARD += [448.0, 463.9, 464.1, 1e9, -1e9, 0.99 * 2**-10, 17.0, 19.0]  # the limits and halfway values of e4m3


def _hard() -> torch.Tensor:
    return torch.cat((torch.tensor(HARD), 100 * torch.randn(4 * SIZE - len(HARD))))


def test_conversion_to_bfloat16_rounds_to_even(device: torch.device) -> None:
    x = _hard()
    torch.testing.assert_close(_cast(x.to(device), torch.bfloat16), x.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_conversion_to_e4m3_saturates_and_keeps_nan(device: torch.device) -> None:
    x = _hard()
    got = _cast(x.to(device), torch.float8_e4m3fn)
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("target", [torch.float32, torch.float16])
def test_conversion_from_short_floats_is_exact(source: torch.dtype, target: torch.dtype, device: torch.device) -> None:
    x = (10 * torch.randn(SIZE)).to(source)
    assert torch.equal(_cast(x.to(device), target), x.to(target))


def test_integers_and_bfloat16_are_converted_as_in_torch(device: torch.device) -> None:
    x = torch.randint(-1000, 1000, (SIZE,), dtype=torch.int32)
    assert torch.equal(_cast(x.to(device), torch.bfloat16), x.bfloat16())
    assert torch.equal(_cast(x.bfloat16().to(device), torch.int32), x.bfloat16().int())


def test_bfloat16_arithmetic_and_comparison_equal_torch(device: torch.device) -> None:
    x, y = torch.randn(2, SIZE).bfloat16()
    out = torch.full((SIZE,), torch.nan, dtype=torch.bfloat16, device=device)
    _sum_kernel[1,](x.to(device), y.to(device), out, SIZE=SIZE)
    assert torch.equal(out.cpu(), torch.where(x > y, x + y, x * y))


def test_integer_arithmetic_decodes_every_e4m3_code(device: torch.device) -> None:
    """GPUs without e4m3 decode it this way in kernels. Both NaN codes become 480 with their sign."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    out = torch.full((256,), torch.nan, dtype=torch.float16, device=device)
    _decode_kernel[1,](codes.to(device), out, SIZE=256)
    values = codes.view(torch.float8_e4m3fn).float()
    want = torch.where(values.isnan(), torch.where(codes >= 128, -480.0, 480.0), values)
    assert torch.equal(out.cpu().float(), want)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sum_over_bfloat16_raises() -> None:
    install()
    x: Any = torch.ones(SIZE, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="float32"):
        _reduce_kernel[1,](x, torch.empty(1, dtype=torch.bfloat16), SIZE=SIZE)
