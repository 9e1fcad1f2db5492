"""Linear layers on a GPU, compared with plain torch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quant.cuda.linear import CudaBackend, CudaLinear
from quant.ggml_blocks import BLOCKS
from quant.kernels.card import Card
from quant.kernels.reference import dequantize
from quant.tensor import CodedTensor, QTensor
from tests.quant.cpu.random_group_weights import ORDERED
from tests.quant.cpu.random_weights import EVERY, KINDS, random_weight, width

pytestmark = pytest.mark.usefixtures("fenced_memory")

CARD = Card("interpreted", (9, 0), 132, 232448, 50 << 20, 80 << 30, interpreted=True)
# the file has two bits for each zero point, the GPU layout a byte
ZERO_POINTS = {"int2 g32 zeros": 1.08, "int2 g64 zeros": 1.06}


def layer(segments: list[QTensor], device: torch.device, *, deterministic: bool = False) -> CudaLinear:
    made = CudaBackend(device, CARD, deterministic).linear(segments)
    assert isinstance(made, CudaLinear)
    return made


def file_bytes(name: str, weight: QTensor) -> int:
    return weight.shape[0] * KINDS[name].nbytes(weight.shape[1]) if name in KINDS else weight.nbytes


@pytest.mark.parametrize("name", [*EVERY, *ORDERED])
def test_layer_dequantizes_to_the_weight(name: str, device: torch.device) -> None:
    rng = np.random.default_rng()
    weight = random_weight(name, 32, width(name, 256), rng)
    linear = layer([weight], device)
    values = dequantize(weight)
    torch.testing.assert_close(linear.dequantize().cpu(), values, rtol=1e-5, atol=1e-6)
    most = BLOCKS[name].size_ratio + 0.01 if name in BLOCKS else ZERO_POINTS.get(name, 1.04)
    assert linear.nbytes <= most * file_bytes(name, weight)
    ids = torch.tensor([31, 0, 7])
    torch.testing.assert_close(linear.rows(ids.to(device)).cpu(), values[ids], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["Q4_K", "F16", "BF16", "F32", "e4m3 channel", "int4 g32 zeros 1", "nf4 g64 nested"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_layer_multiplies_like_the_reference(name: str, deterministic: bool, device: torch.device) -> None:
    weight = random_weight(name, 24, width(name, 160), np.random.default_rng())
    linear, values = layer([weight], device, deterministic=deterministic), dequantize(weight)
    x = torch.randn(3, weight.shape[1]).bfloat16()
    want = x.float() @ values.T
    torch.testing.assert_close(
        linear.forward(x.float().to(device)).cpu(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max())
    )


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_scale_unit_multiplies_the_scales(name: str, device: torch.device) -> None:
    weight = random_weight(name, 8, 256, np.random.default_rng())
    assert isinstance(weight, CodedTensor)
    halved = replace(weight, scale=replace(weight.scale, unit=0.5))
    assert torch.equal(layer([halved], device).dequantize(), layer([weight], device).dequantize() / 2)


def test_adjacent_segments_of_equal_form_are_joined(device: torch.device) -> None:
    rng = np.random.default_rng()
    segments = [
        random_weight(name, rows, 256, rng) for name, rows in [("Q4_K", 16), ("Q4_K", 8), ("Q6_K", 24), ("F32", 5)]
    ]
    linear, values = layer(segments, device), torch.cat([dequantize(segment) for segment in segments])
    assert [matrix.shape[0] for matrix in linear.matrices] == [24, 24, 5]
    x, bias, stream = torch.randn(2, 256).bfloat16(), torch.randn(53), torch.randn(2, 53)
    got = linear.multiply(x.to(device), bias=bias.to(device), add_to=stream.clone().to(device)).cpu()
    want = x.float() @ values.T + bias + stream
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
