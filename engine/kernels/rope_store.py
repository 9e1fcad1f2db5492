"""From projected q, k, and v to attention on a GPU in one launch: norms of heads, rotary embedding, k and v into the
cache. The twins are `normalize_heads`, `rope`, and `store_kv` of `reference`.

8-bit floats are e4m3 (arXiv:2209.05433), converted by integer arithmetic for GPUs without an instruction for them; in
memory they are uint8. The floor is the traffic: each element of qkv is read once and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.config import BLOCK_SIZE, NormKind
from engine.operations import Attention


@triton.jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """float32 -> uint8: to the nearest, ties to even; what is too large becomes the largest, NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # The exponent's bias goes from 127 to 7 and 20 bits of the fraction go; half of the last kept one is added first.
    normal = (size + 0x7FFFF + ((size >> 20) & 1) - 0x3C000000) >> 20
    # Below 2^-6 codes are multiples of 2^-9, which is what the last bit of a float32 near 2^14 stands for.
    small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


ELEMENTS = 1024  # of one program, where it has more than one head


@triton.jit
def _rope_store_kernel(
    qkv: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    q: tl.tensor,
    pool: tl.tensor,
    block_stride: tl.tensor,
    epsilon: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,  # of a head's elements, that turn; the others are taken as pairs of neighbours
    INTERLEAVED: tl.constexpr,
    TURNED: tl.constexpr,
    NORMED: tl.constexpr,
    CENTERED: tl.constexpr,
    TOGETHER: tl.constexpr,  # one norm for all heads, which then are all in one program
    OWN: tl.constexpr,  # each head has weights of its own
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)  # some heads of q, then of k, then of v
    q_parts: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    kv_parts: tl.constexpr = (KV_HEADS + ROWS - 1) // ROWS
    is_q = part < q_parts
    is_v = part >= q_parts + kv_parts
    own_heads = tl.where(is_q, HEADS, KV_HEADS)
    own_parts = tl.where(is_q, 0, tl.where(is_v, q_parts + kv_parts, q_parts))
    heads_before = tl.where(is_q, 0, tl.where(is_v, HEADS + KV_HEADS, HEADS))
    head = (part - own_parts) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, COLUMNS)[None, :]
    there = (head < own_heads) & (pair < HEAD_DIM // 2)
    if INTERLEAVED:
        at = 2 * pair
        beside = at + 1
    elif 2 * PAIRS == HEAD_DIM:
        at = pair
        beside = pair + PAIRS
    else:
        at = tl.where(pair < PAIRS, pair, 2 * pair)
        beside = tl.where(pair < PAIRS, pair + PAIRS, 2 * pair + 1)

    source = qkv + (token * (HEADS + 2 * KV_HEADS) + heads_before + head) * HEAD_DIM
    first = tl.load(source + at, mask=there, other=0.0).to(tl.float32)
    second = tl.load(source + beside, mask=there, other=0.0).to(tl.float32)
    if NORMED and not is_v:
        normed = own_heads * HEAD_DIM if TOGETHER else HEAD_DIM  # elements that are normalized together
        if CENTERED:
            sums = tl.sum(first + second, 1)[:, None]
            mean = (tl.sum(sums, 0)[None, :] if TOGETHER else sums) / normed
            first = tl.where(there, first - mean, 0.0)
            second = tl.where(there, second - mean, 0.0)
        squares = tl.sum(first * first + second * second, 1)[:, None]
        scale = tl.rsqrt((tl.sum(squares, 0)[None, :] if TOGETHER else squares) / normed + epsilon)
        weight = head * (HEAD_DIM if OWN else 0)
        weights = q_weight if is_q else k_weight
        first *= scale * tl.load(weights + weight + at, mask=there, other=0.0)
        second *= scale * tl.load(weights + weight + beside, mask=there, other=0.0)
    if TURNED and not is_v:
        angle = tl.load(positions + token) * PAIRS + pair
        turns = pair < PAIRS
        cosine = tl.load(cos + angle, mask=turns, other=1.0)
        sine = tl.load(sin + angle, mask=turns, other=0.0)
        before = first
        first = before * cosine - second * sine
        second = before * sine + second * cosine

    if is_q:
        turned = q + (token * HEADS + head) * HEAD_DIM
        tl.store(turned + at, first.to(q.dtype.element_ty), mask=there)
        tl.store(turned + beside, second.to(q.dtype.element_ty), mask=there)
    else:
        slot = tl.load(slots + token)
        kv_head = head + tl.where(is_v, KV_HEADS, 0)
        place = pool + slot // BLOCK_SIZE * block_stride + (kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
        if pool.dtype.element_ty == tl.uint8:
            tl.store(place + at, to_e4m3(first), mask=there)
            tl.store(place + beside, to_e4m3(second), mask=there)
        else:
            tl.store(place + at, first.to(pool.dtype.element_ty), mask=there)
            tl.store(place + beside, second.to(pool.dtype.element_ty), mask=there)


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    pool: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    attention: Attention,
) -> Tensor:
    """Normalize and turn q and k, write k and v to their slots.

    qkv bfloat16 or float32 [tokens, (heads + 2 * kv_heads) * head_dim]; positions, slots int64 [tokens]; pool: one
    layer's, [blocks, 2, kv_heads, BLOCK_SIZE, head_dim], bfloat16, float16, or uint8 for e4m3, where the blocks may lie
    apart. -> q bfloat16 [tokens, heads, head_dim].
    """
    norms, rotary = attention.norms, attention.rotary
    together = norms is not None and norms.q.weight.shape[-1] != head_dim
    columns = triton.next_power_of_2(head_dim // 2)
    rows = triton.next_power_of_2(max(heads, kv_heads)) if together else max(1, ELEMENTS // (2 * columns))
    parts = triton.cdiv(heads, rows) + 2 * triton.cdiv(kv_heads, rows)
    q = torch.empty(qkv.shape[0], heads, head_dim, dtype=torch.bfloat16, device=qkv.device)
    _rope_store_kernel[qkv.shape[0], parts](
        qkv,
        positions,
        slots,
        rotary.cos if rotary else qkv,
        rotary.sin if rotary else qkv,
        norms.q.weight if norms else qkv,
        norms.k.weight if norms else qkv,
        q,
        pool,
        pool.stride(0),
        norms.q.epsilon if norms else 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=BLOCK_SIZE,
        PAIRS=rotary.cos.shape[-1] if rotary else head_dim // 2,
        INTERLEAVED=rotary is not None and rotary.interleaved,
        TURNED=rotary is not None,
        NORMED=norms is not None,
        CENTERED=norms is not None and norms.q.kind is NormKind.LAYER,
        TOGETHER=together,
        OWN=together or (norms is not None and norms.q.weight.dim() == 2),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4 if rows * columns <= ELEMENTS else 8,
    )
    return q
