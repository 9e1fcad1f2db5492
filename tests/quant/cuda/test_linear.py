"""Linear layers on a GPU, compared with plain torch."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quant.cuda import loading
from quant.cuda.backend import CudaBackend
from quant.cuda.linear import CudaLinear
from quant.cuda.matrix import PackedMatrix
from quant.ggml_blocks import BLOCKS
from quant.kernels.card import Card
from quant.kernels.integer_rows import integer_inputs
from quant.kernels.reference import dequantize
from quant.kernels.tiles import MOST_TOKENS
from quant.linear import Use
from quant.tensor import CodedTensor, QTensor
from tests.quant.cpu.random_group_weights import ORDERED
from tests.quant.cpu.random_weights import EVERY, KINDS, PLAIN, random_weight, width

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
    relative = 2**-8 if name in PLAIN else 1e-5  # floats are rounded to bfloat16
    torch.testing.assert_close(linear.dequantize().cpu(), values, rtol=relative, atol=1e-6)
    most = BLOCKS[name].size_ratio + 0.01 if name in BLOCKS else ZERO_POINTS.get(name, 1.04)
    packed = [it for it in linear.matrices if isinstance(it, PackedMatrix)]
    tables = [table for it in packed for table in (it.number_pairs, it.number_integers)]
    pairs = sum(it.nbytes for it in tables if it is not None)
    assert linear.nbytes - pairs <= most * file_bytes(name, weight)
    assert pairs <= 1024 + 512
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


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of torch, and the number of elements of their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.sizes: list[int] = []
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.names.append(str(func))
            self.sizes.append(result.numel())
            self.nbytes.append(result.nbytes)
        return result


@pytest.mark.parametrize("name", ["F16", "F32", "BF16"])
def test_products_do_not_convert_the_weight(name: str, device: torch.device) -> None:
    linear = layer([random_weight(name, 64, 160, np.random.default_rng())], device)
    x = torch.randn(2, 160, device=device)
    with Operations() as mode:
        linear.forward(x)
    assert mode.names
    assert max(mode.sizes) < 64 * 160


@pytest.mark.share(1)
@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_loading_takes_the_planned_memory_at_most(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random_weight(name, 1024, 1024, np.random.default_rng())
    want = layer([weight], device).dequantize()
    monkeypatch.setattr(loading, "SLAB", 1 << 18)
    with Operations() as mode:
        linear = layer([weight], device)
    assert torch.equal(linear.dequantize(), want)
    assert max(mode.nbytes) <= 4 * (1 << 18)
    assert loading.SLAB_BYTES * 4 <= 200 << 20  # four threads


@pytest.mark.parametrize("name", ["F16", "F32"])
def test_embedding_lookup_returns_the_exact_dequantized_rows(name: str, device: torch.device) -> None:
    weight = random_weight(name, 64, 160, np.random.default_rng())
    values, ids = dequantize(weight), torch.tensor([63, 0, 7])
    backend = CudaBackend(device, CARD, deterministic=False)
    for use, copies in ((Use.ROWS, 1), (Use.ROWS | Use.HOST, 1), (Use.ROWS | Use.PRODUCTS, 2)):
        linear = backend.linear([weight], use)
        assert isinstance(linear, CudaLinear)
        assert torch.equal(linear.rows(ids.to(device)).cpu(), values[ids])
        assert torch.equal(linear.dequantize().cpu(), values)
        rounded = 64 * 160 * 2 if copies == 2 else 0
        assert linear.nbytes == weight.nbytes + rounded
        if Use.HOST in use:
            continue
        x = torch.randn(2, 160).bfloat16()
        product = linear.forward(x.float().to(device)).cpu()
        torch.testing.assert_close(product, x.float() @ values.bfloat16().float().mT, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "F16", "MXFP4"])
def test_table_in_host_memory_gives_the_same_rows(name: str, device: torch.device) -> None:
    weight, ids = random_weight(name, 64, 256, np.random.default_rng()), torch.tensor([63, 0, 7], device=device)
    backend = CudaBackend(device, CARD, deterministic=False)
    there, here = (backend.linear([weight], use).rows(ids) for use in (Use.ROWS, Use.ROWS | Use.HOST))
    assert torch.equal(here, there)


def test_products_of_prompts_are_written_where_they_are_read(device: torch.device) -> None:
    """The product of each matrix is one operation, without a copy of its result."""
    rng = np.random.default_rng()
    linear = layer([random_weight(name, 32, 256, rng) for name in ("Q4_K", "BF16")], device)
    x = torch.randn(300, 256, device=device).bfloat16()
    bias, stream = torch.randn(64, device=device), torch.randn(300, 64, device=device)
    results = []
    adding = ["aten.addmm.dtype_out"] if device.type == "cuda" else ["aten.mm.default", "aten.add_.Tensor"]
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({}, ["aten.mm.out"]),
        ({"bias": bias}, ["aten.mm.out", "aten.add_.Tensor"]),
        ({"add_to": stream.clone()}, adding),
    ]
    for options, writes in cases:
        with Operations() as mode:
            results.append(linear.multiply(x, **options).float().cpu())
        found = zip(mode.names, mode.sizes, strict=True)
        assert [name for name, size in found if size == 300 * 32] == 2 * writes
    want = x.float().cpu() @ linear.dequantize().cpu().T
    for got, added in zip(results, (torch.zeros(64), bias.cpu(), stream.cpu()), strict=True):
        torch.testing.assert_close(got, want + added, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


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


@pytest.mark.parametrize("kinds", [("Q4_K",), ("Q4_K", "Q6_K"), ("nf4 g64 nested",)])
def test_prompts_in_integers_are_close_to_the_reference(kinds: tuple[str, ...], device: torch.device) -> None:
    rng = np.random.default_rng()
    weights = [random_weight(kind, 40, 512, rng) for kind in kinds]
    made = CudaBackend(device, CARD, deterministic=False, integer_prompts=True).linear(weights)
    assert isinstance(made, CudaLinear)
    assert [made.takes_integers(it) for it in (1, MOST_TOKENS, MOST_TOKENS + 1)] == [False, False, True]
    x, stream = torch.randn(MOST_TOKENS + 5, 512).bfloat16(), torch.randn(MOST_TOKENS + 5, 40 * len(kinds))
    bias = torch.randn(made.outputs).to(device)
    given = stream.clone().to(device)
    assert made.multiply(x.to(device), bias=bias, add_to=given) is given
    rounded = made.multiply(integer_inputs(x.to(device)), bias=bias, out_dtype=torch.float32)
    want = x.float() @ torch.cat([dequantize(it) for it in weights]).T
    for got in (given.cpu() - stream, rounded.cpu()):
        assert (got - bias.cpu() - want).square().mean().sqrt() <= 0.015 * want.square().mean().sqrt()


def test_weights_with_an_order_of_columns_and_plain_ones_are_not_rounded(device: torch.device) -> None:
    backend = CudaBackend(device, CARD, deterministic=False, integer_prompts=True)
    rng = np.random.default_rng()
    for kind in ("BF16", "e4m3 channel", next(iter(ORDERED))):
        layer = backend.linear([random_weight(kind, 32, width(kind, 256), rng)])
        assert isinstance(layer, CudaLinear)
        assert not layer.takes_integers(MOST_TOKENS + 1)
    exact = CudaBackend(device, CARD, deterministic=True, integer_prompts=True)
    layer = exact.linear([random_weight("Q4_K", 32, 256, rng)])
    assert isinstance(layer, CudaLinear)
    assert not layer.takes_integers(MOST_TOKENS + 1)
