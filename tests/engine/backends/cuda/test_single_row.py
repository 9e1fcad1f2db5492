"""Operations on one token, in which one launch does the work of several, compared with a batch of two tokens."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.backends.cuda.operations import CudaOperations
from engine.backends.cuda.single_row import NormedRow, ProductRow, StreamRow, rows_of
from engine.model_config import Gate, NormKind
from engine.operations import GatedMLP, Norm
from quant.cuda.backend import CudaBackend
from quant.linear import QLinear
from tests.engine.backends.cuda.two_devices import INTERPRETED, gpu
from tests.quant.cpu.random_weights import random_weight

pytestmark = pytest.mark.usefixtures("fenced_memory")

HIDDEN, INNER = 256, 512
CLOSE = 0.02  # error relative to the largest result: inputs of products are rounded to bfloat16


class Parts:
    """Quantized layers and norms of one model layer, the same in each run: a few draws are close to the bound."""

    def __init__(self, device: torch.device) -> None:
        self._rng = np.random.default_rng(0)
        torch.manual_seed(0)
        card = gpu(device).card
        self.backend = CudaBackend(device, card, deterministic=False)
        self.ops = CudaOperations(self.backend, card, deterministic=False)
        self.square = self._layer("Q4_K", HIDDEN, HIDDEN)
        self.other = self._layer("Q6_K", HIDDEN, HIDDEN)
        self.mlp = GatedMLP(self._layer("Q4_K", 2 * INNER, HIDDEN), self._layer("Q4_K", HIDDEN, INNER))
        self.bias = torch.randn(HIDDEN).to(device)
        weights = [(torch.rand(HIDDEN) + 0.5).to(device) for _ in range(2)]
        self.norm, self.other_norm = (Norm(it, 1e-5) for it in weights)
        self.layer_norm = Norm(weights[0], 1e-5, NormKind.LAYER, self.bias)

    def _layer(self, kind: str, rows: int, columns: int) -> QLinear:
        return self.backend.linear([random_weight(kind, rows, columns, self._rng)])


def sublayers(parts: Parts, x: Tensor, stream: Tensor) -> Any:
    """A layer with a norm before each part, and the product after the last norm."""
    ops = parts.ops
    summed = ops.linear(x, parts.square, add_to=stream, bias=parts.bias)
    summed = ops.gated_mlp(ops.norm(summed, parts.norm), parts.mlp, summed)
    return ops.linear(ops.norm(summed, parts.other_norm), parts.other, bias=parts.bias, in_float32=True)


def norms_after(parts: Parts, x: Tensor, stream: Tensor) -> Any:
    """A layer with norms after each part as well."""
    ops = parts.ops
    summed = ops.linear(x, parts.square, add_to=stream)
    output = ops.gated_mlp(ops.norm(summed, parts.norm), parts.mlp, gate=Gate.GELU)
    return ops.norm(output, parts.other_norm, add_to=summed)


def two_readers(parts: Parts, x: Tensor, stream: Tensor) -> Any:
    """Two norms that read the same sum, one of them with a bias."""
    ops = parts.ops
    summed = ops.linear(x, parts.square, add_to=stream)
    first = ops.linear(ops.norm(summed, parts.norm), parts.other)
    second = ops.linear(ops.norm(summed, parts.layer_norm), parts.other)
    return torch.cat([rows_of(first), rows_of(second)], dim=1)


def without_norms(parts: Parts, x: Tensor, stream: Tensor) -> Any:
    """Products that read the sum itself, and a norm of a product."""
    ops = parts.ops
    summed = ops.linear(x, parts.square, add_to=stream)
    summed = ops.norm(ops.linear(summed, parts.other), parts.norm, add_to=summed)
    return ops.linear(summed, parts.square, add_to=summed)


def normed_rows(parts: Parts, x: Tensor, stream: Tensor) -> Any:
    """A normalized sum that is read as rows."""
    return parts.ops.norm(parts.ops.linear(x, parts.square, add_to=stream), parts.norm)


@pytest.mark.parametrize("work", [sublayers, norms_after, two_readers, without_norms, normed_rows])
def test_result_of_one_token_is_that_of_a_batch(
    work: Callable[[Parts, Tensor, Tensor], Any], device: torch.device
) -> None:
    parts = Parts(device)
    x, stream = torch.randn(2, HIDDEN).bfloat16().to(device), (10 * torch.randn(2, HIDDEN)).to(device)
    alone = rows_of(work(parts, x[:1].clone(), stream[:1].clone()))
    beside = rows_of(work(parts, x.clone(), stream.clone()))
    assert alone.shape == (1, beside.shape[1])
    assert (alone.float() - beside[:1].float()).abs().max() <= CLOSE * beside[:1].float().abs().max()


def test_sums_and_products_are_launched_when_they_are_read(device: torch.device) -> None:
    parts, stream = Parts(device), torch.zeros(1, HIDDEN, device=device)
    x = torch.randn(1, HIDDEN).bfloat16().to(device)
    summed = parts.ops.linear(x, parts.square, add_to=stream)
    assert isinstance(summed, StreamRow)
    assert not stream.any()
    normed = parts.ops.norm(summed, parts.norm)
    assert isinstance(normed, NormedRow)
    assert stream.any()
    assert isinstance(parts.ops.linear(normed, parts.other), ProductRow)


def test_deterministic_operations_wait_for_nothing(device: torch.device) -> None:
    backend = CudaBackend(device, INTERPRETED, deterministic=True)
    layer = backend.linear([random_weight("Q4_K", HIDDEN, HIDDEN, np.random.default_rng())])
    ops, x = CudaOperations(backend, INTERPRETED, deterministic=True), torch.randn(1, HIDDEN).bfloat16().to(device)
    assert isinstance(ops.linear(x, layer), Tensor)
    assert isinstance(ops.linear(x, layer, add_to=torch.zeros(1, HIDDEN, device=device)), Tensor)
