"""The kernel for head norms, rotary embedding, and the KV store, against its reference implementations."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.config import BLOCK_SIZE
from engine.kernels import reference
from engine.kernels.rope_store import rope_and_store
from engine.model_config import NormKind
from engine.operations import Attention, HeadNorms, Norm
from engine.rope import RotaryTable

pytestmark = pytest.mark.usefixtures("fenced_memory")

LAYERS = 3


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int  # rotated elements per head
    interleaved: bool
    norms: str  # normalization of q and k: "" (none), "each" (shared weights), "own" (weights per head), or "together"
    qkv: torch.dtype
    pool: torch.dtype
    kind: NormKind = NormKind.RMS
    span: int = 0  # elements over which the pairs of the rotated elements are spread; 0: `rotary_dim`
    values: bool = False  # whether v is normalized
    shared: bool = False  # whether rows have only q


SHAPES: dict[str, Callable[[int, int], tuple[int, ...]]] = {  # shapes of norm weights, by kind of norm
    "each": lambda _, head_dim: (head_dim,),
    "own": lambda heads, head_dim: (heads, head_dim),
    "together": lambda heads, head_dim: (heads * head_dim,),
}
CASES = [
    Case(9, 3, 64, 64, False, "", torch.bfloat16, torch.bfloat16),
    Case(4, 4, 32, 32, True, "together", torch.bfloat16, torch.float16),
    Case(3, 1, 80, 32, False, "each", torch.float32, torch.uint8),
    Case(6, 2, 96, 48, True, "each", torch.bfloat16, torch.uint8),
    Case(2, 1, 256, 256, False, "each", torch.float32, torch.bfloat16),
    Case(5, 5, 16, 0, False, "together", torch.bfloat16, torch.uint8),
    Case(8, 2, 128, 0, False, "", torch.float32, torch.float16),
    Case(12, 2, 48, 16, False, "together", torch.float32, torch.bfloat16),
    Case(6, 2, 64, 64, True, "own", torch.bfloat16, torch.bfloat16, NormKind.LAYER),
    Case(5, 1, 80, 20, False, "own", torch.float32, torch.float16, NormKind.LAYER),
    Case(3, 3, 96, 48, False, "own", torch.float32, torch.bfloat16),
    Case(12, 2, 48, 16, False, "together", torch.float32, torch.bfloat16, NormKind.LAYER),
    Case(4, 1, 512, 128, False, "each", torch.float32, torch.bfloat16, span=512, values=True),
    Case(6, 2, 96, 32, False, "each", torch.bfloat16, torch.uint8, span=96, values=True),
    Case(6, 3, 64, 64, False, "each", torch.bfloat16, torch.bfloat16, values=True, shared=True),
    Case(8, 2, 128, 32, False, "each", torch.float32, torch.float16, span=128, shared=True),
]


def attention_of(case: Case) -> Attention:
    angles = torch.rand(50, case.rotary_dim // 2) * 6
    rotary = RotaryTable(angles.cos(), angles.sin(), case.interleaved, case.span) if case.rotary_dim else None
    if not case.norms:
        return Attention(1.0, rotary)
    v = Norm(torch.randn(case.head_dim), 1e-5) if case.values else None
    q, k = (
        Norm(torch.randn(SHAPES[case.norms](it, case.head_dim)), 1e-5, case.kind) for it in (case.heads, case.kv_heads)
    )
    return Attention(1.0, rotary, HeadNorms(q, k, v), shared=case.shared)


def moved(attention: Attention, device: torch.device) -> Attention:
    rotary, norms = attention.rotary, attention.norms

    def norm(it: Norm) -> Norm:
        return replace(it, weight=it.weight.to(device))

    return replace(
        attention,
        rotary=rotary and replace(rotary, cos=rotary.cos.to(device), sin=rotary.sin.to(device)),
        norms=norms and HeadNorms(norm(norms.q), norm(norms.k), norms.v and norm(norms.v)),
    )


def run_reference(
    qkv: Tensor, positions: Tensor, slots: Tensor, pool: Tensor, case: Case, attention: Attention
) -> Tensor:
    """Run the reference implementations. Writes to `pool`, and returns q."""
    q, k, v = qkv.float().tensor_split([case.heads * case.head_dim, (case.heads + case.kv_heads) * case.head_dim], -1)
    if norms := attention.norms:
        q, k = (
            reference.normalize_heads(x.contiguous(), norm, case.head_dim) for x, norm in ((q, norms.q), (k, norms.k))
        )
        v = v if norms.v is None else reference.normalize_heads(v.contiguous(), norms.v, case.head_dim)
    q, k, v = (x.reshape(len(x), -1, case.head_dim) for x in (q, k, v))
    if rotary := attention.rotary:
        cos, sin = rotary.cos[positions], rotary.sin[positions]
        distance = rotary.distance
        q, k = (reference.rope(x, cos, sin, interleaved=rotary.interleaved, distance=distance) for x in (q, k))
    if not case.shared:
        reference.store_kv(pool, slots, k, v)
    rotated: Tensor = q
    return rotated


def poisoned(case: Case) -> Tensor:
    """Return a pool of several layers whose bytes are all ones, which is NaN in every dtype."""
    shape = (5, LAYERS, 2, case.kv_heads, BLOCK_SIZE, case.head_dim)
    return torch.full((*shape[:-1], shape[-1] * case.pool.itemsize), 0xFF, dtype=torch.uint8).view(case.pool)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rope_and_store_equals_the_reference(case: Case, device: torch.device) -> None:
    qkv = (2 * torch.randn(3, (case.heads + 2 * case.kv_heads) * case.head_dim)).to(case.qkv)
    positions, slots = torch.tensor([49, 0, 17]), torch.tensor([16, 79, 36])
    attention, pools = attention_of(case), poisoned(case)
    moved_pools = pools.to(device, copy=True)
    rows = qkv[:, : case.heads * case.head_dim].contiguous() if case.shared else qkv
    got = rope_and_store(
        rows.to(device),
        positions.to(device),
        slots.to(device),
        moved_pools[:, 1],
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        attention=moved(attention, device),
    )
    want = run_reference(qkv, positions, slots, pools[:, 1], case, attention)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.cpu().float(), want, rtol=1e-2, atol=1e-5)
    # two steps of the dtype: a tie may round either way, and the order of additions may differ
    rounding = 0.13 if case.pool == torch.uint8 else 1e-2
    stored, wanted = (reference.as_floats(it).float() for it in (moved_pools.cpu(), pools))
    torch.testing.assert_close(stored, wanted, rtol=rounding, atol=2e-3, equal_nan=True)


def test_e4m3_conversion_equals_torch(device: torch.device) -> None:
    """Covers all values, midpoints, their neighbors, and values that are too large, too small, infinite, or NaN."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = torch.cat((codes, (codes[1:] + codes[:-1]) / 2))
    odd = torch.tensor([2**-11, 464.0, 465.0, 1e9, torch.inf, torch.nan, 2**-130])
    values = torch.cat((exact, exact.nextafter(torch.tensor(1e9)), exact.nextafter(torch.tensor(-1e9)), odd))
    values = F.pad(torch.cat((values, -values)), (0, -2 * len(values) % 256)).view(-1, 256)
    tokens = len(values)
    qkv = torch.cat((torch.zeros(tokens, 512), values), -1)
    pool = torch.full((2, 2, 1, BLOCK_SIZE, 256), 0xFF, dtype=torch.uint8, device=device)
    slots = torch.arange(BLOCK_SIZE, BLOCK_SIZE + tokens)
    rope_and_store(
        qkv.to(device),
        slots.to(device),
        slots.to(device),
        pool,
        heads=1,
        kv_heads=1,
        head_dim=256,
        attention=Attention(1.0, None),
    )
    got = reference.as_floats(pool.cpu())[1, 1, 0, :tokens].float()
    assert torch.equal(got.nan_to_num(777), values.clamp(-448, 448).to(torch.float8_e4m3fn).float().nan_to_num(777))
