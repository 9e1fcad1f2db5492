"""The reference implementations against torch and against their definitions."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.config import BLOCK_SIZE
from engine.kernels.reference import PIECE, QUERY_TILE, ScoreRule, gated, normalize, paged_attention, rope, store_kv
from engine.model_config import Gate, NormKind
from engine.operations import Norm


def pool_with(k: Tensor, v: Tensor, table: list[int]) -> Tensor:
    """Return a layer's pool with k and v, [context, kv_heads, head_dim], and NaN elsewhere."""
    context, kv_heads, head_dim = k.shape
    pool = torch.full((max(table) + 3, 2, kv_heads, BLOCK_SIZE, head_dim), torch.nan)
    slots = torch.tensor([table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(context)])
    store_kv(pool, slots, k, v)
    return pool


def naive_attention(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    """Softmax attention in float64; query i is at position first + i."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
    visible = torch.arange(len(k)) <= (first + torch.arange(len(q))).unsqueeze(-1)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 80), (2, 2, 2)])
@pytest.mark.parametrize(
    ("context", "queries"), [(1, 1), (BLOCK_SIZE, 3), (PIECE, 1), (PIECE + 1, QUERY_TILE + 1), (300, 300)]
)
def test_paged_attention_equals_naive_attention(
    heads: int, kv_heads: int, head_dim: int, context: int, queries: int
) -> None:
    k, v = torch.randn(2, context, kv_heads, head_dim)
    q = torch.randn(queries, heads, head_dim)
    table = torch.randperm(40)[: -(-context // BLOCK_SIZE)].add(1).tolist()
    positions = torch.arange(context - queries, context)
    padded = torch.tensor([*table, 0, 0])
    out = paged_attention(q, positions, pool_with(k, v, table), padded, context, ScoreRule(head_dim**-0.5))
    assert out.shape == q.shape
    torch.testing.assert_close(out.double(), naive_attention(q, k, v, context - queries), rtol=0, atol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    k, v = torch.randn(2, 200, 1, 16)
    q = torch.randn(4, 1, 16) * 1e4
    table = list(range(1, 14))
    out = paged_attention(q, torch.arange(196, 200), pool_with(k, v, table), torch.tensor(table), 200, ScoreRule(0.25))
    torch.testing.assert_close(out.double(), naive_attention(q, k, v, 196), rtol=0, atol=1e-2)


def test_store_kv_writes_only_the_given_slots() -> None:
    pool = torch.full((4, 2, 2, BLOCK_SIZE, 8), torch.nan)
    k, v = torch.randn(2, 3, 2, 8)
    store_kv(pool, torch.tensor([17, 63, 40]), k, v)
    for row, (block, offset) in enumerate([(1, 1), (3, 15), (2, 8)]):
        assert torch.equal(pool[block, 0, :, offset], k[row])
        assert torch.equal(pool[block, 1, :, offset], v[row])
    assert pool.isfinite().sum() == 2 * 3 * 2 * 8


@pytest.mark.parametrize("tokens", [1, 5])
def test_normalize_equals_torch(tokens: int) -> None:
    x, weight, bias = torch.randn(tokens, 67) * 30, torch.randn(67), torch.randn(67)
    torch.testing.assert_close(normalize(x, Norm(weight, 1e-5)), F.rms_norm(x, (67,), weight, 1e-5))
    for norm in (Norm(weight, 1e-5, NormKind.LAYER), Norm(weight, 1e-5, NormKind.LAYER, bias)):
        torch.testing.assert_close(normalize(x, norm), F.layer_norm(x, (67,), weight, norm.bias, 1e-5))


def test_normalized_row_does_not_depend_on_other_rows() -> None:
    x, weight = torch.randn(333, 577), torch.randn(577)
    for norm in (Norm(weight, 1e-5), Norm(weight, 1e-5, NormKind.LAYER, torch.randn(577))):
        whole = normalize(x, norm)
        for start, stop in [(0, 1), (5, 12), (100, 333)]:
            assert torch.equal(normalize(x[start:stop], norm), whole[start:stop])


def test_rope_rotates_pairs_like_complex_numbers() -> None:
    x, angles = torch.randn(5, 3, 8), torch.rand(5, 4) * 6
    cos, sin = angles.cos(), angles.sin()
    rotation = torch.polar(torch.ones(5, 1, 4), angles.unsqueeze(1))
    adjacent = torch.view_as_real(torch.view_as_complex(x.view(5, 3, 4, 2)) * rotation).flatten(-2)
    torch.testing.assert_close(rope(x, cos, sin, interleaved=True), adjacent)
    halves = torch.complex(x[..., :4], x[..., 4:]) * rotation
    torch.testing.assert_close(rope(x, cos, sin, interleaved=False), torch.cat((halves.real, halves.imag), -1))


def test_gated_activations_equal_torch() -> None:
    gate, up = torch.randn(2, 6, 35)
    torch.testing.assert_close(gated(torch.cat((gate, up), -1), Gate.SILU), F.silu(gate) * up)


def test_row_of_gated_activations_does_not_depend_on_other_rows() -> None:
    x = torch.randn(211, 2 * 45)
    whole = gated(x, Gate.SILU)
    for start, stop in [(0, 1), (5, 12), (100, 211)]:
        assert torch.equal(gated(x[start:stop], Gate.SILU), whole[start:stop])
