"""The projection of one token with rotary embedding and the KV store, against both kernels one after the other."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import BLOCK_SIZE
from engine.kernels.reference import as_floats
from engine.kernels.rope_store import rope_and_store
from engine.kernels.rotated_product import is_supported, rotated_product
from engine.operations import Attention, HeadNorms, Norm
from engine.rope import RotaryTable
from quant.cuda.backend import CudaBackend
from quant.cuda.linear import CudaLinear
from quant.kernels.card import Card
from quant.kernels.packed_product import UnscaledRow
from tests.quant.cpu.random_weights import random_weight

pytestmark = pytest.mark.usefixtures("fenced_memory")

CARD = Card("interpreted", (8, 9), 132, 232448, 50 << 20, 80 << 30, interpreted=True)
COLUMNS, POSITION, SLOT = 256, 37, 2 * BLOCK_SIZE + 5


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int  # rotated elements per head
    interleaved: bool
    kinds: tuple[str, ...]  # weights of q, k, and v together, or of q and k, and of v
    pool: torch.dtype = torch.bfloat16
    has_bias: bool = False
    shared: bool = False  # whether rows have only q


CASES = [
    Case(4, 2, 64, 64, False, ("Q4_K",)),
    Case(4, 1, 128, 128, True, ("Q4_K", "Q6_K"), torch.uint8),
    Case(3, 1, 80, 80, False, ("Q6_K", "Q8_0"), torch.float16, has_bias=True),
    Case(5, 5, 16, 0, False, ("Q4_K",)),
    Case(2, 1, 96, 48, True, ("Q8_0",), has_bias=True),
    Case(4, 2, 64, 64, False, ("Q4_K",), shared=True),
]


def projection(case: Case, device: torch.device) -> CudaLinear:
    value_rows = 0 if case.shared else case.kv_heads * case.head_dim
    rows = [case.heads * case.head_dim + value_rows, value_rows]
    if len(case.kinds) == 1:
        rows = [sum(rows)]
    weights = [
        random_weight(kind, count, COLUMNS, np.random.default_rng())
        for kind, count in zip(case.kinds, rows, strict=True)
    ]
    made = CudaBackend(device, CARD, deterministic=False).linear(weights)
    assert isinstance(made, CudaLinear)
    return made


def rotary_of(case: Case, device: torch.device) -> RotaryTable | None:
    angles = torch.rand(50, case.rotary_dim // 2) * 6
    if not case.rotary_dim:
        return None
    return RotaryTable(angles.cos().to(device), angles.sin().to(device), case.interleaved)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_is_that_of_separate_kernels(case: Case, device: torch.device) -> None:
    layer, attention = projection(case, device), Attention(1.0, rotary_of(case, device), shared=case.shared)
    assert is_supported(layer, case.head_dim, attention)
    x = torch.randn(1, COLUMNS).bfloat16().to(device)
    bias = torch.randn(layer.outputs).to(device) if case.has_bias else None
    position, slot = (torch.tensor([it], device=device) for it in (POSITION, SLOT))
    sizes: dict[str, Any] = {
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "attention": attention,
    }
    shape = (4, 3, 2, case.kv_heads, BLOCK_SIZE, case.head_dim * case.pool.itemsize)
    poisoned = torch.full(shape, 0xFF, dtype=torch.uint8, device=device)  # NaN in every dtype
    pools = poisoned.view(case.pool), poisoned.clone().view(case.pool)
    qkv = layer.multiply_row(x, bias=bias, out_dtype=torch.float32)
    want = rope_and_store(qkv, position, slot, pools[0][:, 1], **sizes)
    got = rotated_product(layer, x, bias, position, slot, pools[1][:, 1], **sizes)
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=2e-2, atol=1e-3)
    # two steps of the dtype: the sums are the same, but a compiler may round them at different points
    rounding = 0.13 if case.pool == torch.uint8 else 1e-2
    stored, wanted = (as_floats(it).float().cpu() for it in (pools[1], pools[0]))
    torch.testing.assert_close(stored, wanted, rtol=rounding, atol=2e-3, equal_nan=True)


def test_unscaled_row_is_scaled_before_its_rotation(device: torch.device) -> None:
    case = CASES[0]
    layer, attention = projection(case, device), Attention(1.0, rotary_of(case, device))
    row = torch.randn(1, COLUMNS)
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "attention": attention}
    position, slot = (torch.tensor([it], device=device) for it in (POSITION, SLOT))
    results = []
    for factor in (1.0, 0.125):
        squares = (factor * row).square().reshape(4, -1).sum(1).to(device)
        x = UnscaledRow((factor * row).bfloat16().to(device), squares, 0.0)
        pool = torch.zeros(4, 2, 2, BLOCK_SIZE, 64, dtype=torch.bfloat16, device=device)
        results.append(rotated_product(layer, x, None, position, slot, pool, **sizes))
        results.append(pool)
    torch.testing.assert_close(results[2], results[0])
    torch.testing.assert_close(results[3], results[1])


def test_heads_with_norms_are_not_supported(device: torch.device) -> None:
    layer, norm = projection(CASES[0], device), Norm(torch.ones(64), 1e-5)
    assert not is_supported(layer, 64, Attention(1.0, None, HeadNorms(norm, norm)))
    assert not is_supported(layer, 48, Attention(1.0, None))
