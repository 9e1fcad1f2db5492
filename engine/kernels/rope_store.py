"""Head norms, rotary embedding, and the KV store on a GPU, in one launch after the q, k, v projection.

Reference implementations: `normalize_heads`, `rope`, and `store_kv` in `reference`. 8-bit floats are e4m3
(arXiv:2209.05433) stored as uint8. They are converted with integer arithmetic, because some GPUs have no instruction
for it. Lower bound: memory traffic. Each element of qkv is read once and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.config import BLOCK_SIZE
from engine.model_config import NormKind
from engine.operations import Attention
from quant.kernels.early_start import launch_options, wait_for_inputs


@triton.jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """Convert float32 to e4m3, stored as uint8. Rounds to nearest, ties to even; saturates; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # The exponent bias changes from 127 to 7, and 20 bits of the fraction are dropped after rounding.
    normal = (size + 0x7FFFF + ((size >> 20) & 1) - 0x3C000000) >> 20
    # Below 2^-6, codes are multiples of 2^-9, which is the last bit of a float32 near 2^14.
    small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


ELEMENTS = 1024  # approximate elements per program, if a program handles several heads


@triton.jit
def _rope_store_kernel(
    qkv: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    v_weight: tl.tensor,
    q: tl.tensor,
    pool: tl.tensor,
    block_stride: tl.tensor,
    epsilon: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,  # rotated pairs per head; the remaining elements are processed as adjacent pairs
    INTERLEAVED: tl.constexpr,
    ROTARY: tl.constexpr,
    DISTANCE: tl.constexpr,  # number of elements between those of a pair that are not interleaved
    STORES: tl.constexpr,  # whether rows have k and v
    NORMED: tl.constexpr,
    VALUES_NORMED: tl.constexpr,
    CENTERED: tl.constexpr,
    TOGETHER: tl.constexpr,  # whether one norm covers all heads, which are then in one program
    PER_HEAD: tl.constexpr,  # whether each head has its own norm weights
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)  # first the heads of q, then those of k, then those of v
    q_parts: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    kv_parts: tl.constexpr = (KV_HEADS + ROWS - 1) // ROWS
    is_q = part < q_parts
    is_v = part >= q_parts + kv_parts
    num_heads = tl.where(is_q, HEADS, KV_HEADS)
    parts_before = tl.where(is_q, 0, tl.where(is_v, q_parts + kv_parts, q_parts))
    heads_before = tl.where(is_q, 0, tl.where(is_v, HEADS + KV_HEADS, HEADS))
    head = (part - parts_before) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, COLUMNS)[None, :]
    inside = (head < num_heads) & (pair < HEAD_DIM // 2)
    if INTERLEAVED:
        first_at = 2 * pair
        second_at = first_at + 1
    elif 2 * DISTANCE == HEAD_DIM:
        first_at = pair
        second_at = pair + DISTANCE
    else:
        first_at = tl.where(pair < PAIRS, pair, 2 * pair)
        second_at = tl.where(pair < PAIRS, pair + PAIRS, 2 * pair + 1)

    row_heads: tl.constexpr = HEADS + 2 * KV_HEADS if STORES else HEADS
    source = qkv + (token * row_heads + heads_before + head) * HEAD_DIM
    first = tl.load(source + first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + second_at, mask=inside, other=0.0).to(tl.float32)
    plain = part < 0 if VALUES_NORMED else is_v  # whether the heads of the program are not normalized
    if NORMED and not plain:
        normed = num_heads * HEAD_DIM if TOGETHER else HEAD_DIM  # number of elements that share a mean square
        if CENTERED:
            sums = tl.sum(first + second, 1)[:, None]
            mean = (tl.sum(sums, 0)[None, :] if TOGETHER else sums) / normed
            first = tl.where(inside, first - mean, 0.0)
            second = tl.where(inside, second - mean, 0.0)
        squares = tl.sum(first * first + second * second, 1)[:, None]
        scale = tl.rsqrt((tl.sum(squares, 0)[None, :] if TOGETHER else squares) / normed + epsilon)
        weight = head * (HEAD_DIM if PER_HEAD else 0)
        weights = q_weight if is_q else k_weight
        if VALUES_NORMED:
            weights = v_weight if is_v else weights
        first *= scale * tl.load(weights + weight + first_at, mask=inside, other=0.0)
        second *= scale * tl.load(weights + weight + second_at, mask=inside, other=0.0)
    if ROTARY and not is_v:
        angle = tl.load(positions + token) * PAIRS + pair
        is_rotary = pair < PAIRS
        cosine = tl.load(cos + angle, mask=is_rotary, other=1.0)
        sine = tl.load(sin + angle, mask=is_rotary, other=0.0)
        before = first
        first = before * cosine - second * sine
        second = before * sine + second * cosine

    if is_q:
        q_at = q + (token * HEADS + head) * HEAD_DIM
        tl.store(q_at + first_at, first.to(q.dtype.element_ty), mask=inside)
        tl.store(q_at + second_at, second.to(q.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + token)
        kv_head = head + tl.where(is_v, KV_HEADS, 0)
        kv_at = pool + slot // BLOCK_SIZE * block_stride + (kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
        if pool.dtype.element_ty == tl.uint8:
            tl.store(kv_at + first_at, to_e4m3(first), mask=inside)
            tl.store(kv_at + second_at, to_e4m3(second), mask=inside)
        else:
            tl.store(kv_at + first_at, first.to(pool.dtype.element_ty), mask=inside)
            tl.store(kv_at + second_at, second.to(pool.dtype.element_ty), mask=inside)


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
    early: bool = False,
) -> Tensor:
    """Normalize q, k, and v, rotate q and k, and write k and v to their slots.

    - qkv: bfloat16 or float32 [tokens, (heads + 2 * kv_heads) * head_dim], or q alone if `attention.shared`
    - positions, slots: int64 [tokens]
    - pool: one layer, [blocks, 2, kv_heads, BLOCK_SIZE, head_dim], bfloat16, float16, or uint8 for e4m3; there may be
      gaps between blocks
    - early: see `quant.kernels.early_start`

    Returns q, bfloat16 [tokens, heads, head_dim].
    """
    norms, rotary = attention.norms, attention.rotary
    together = norms is not None and norms.q.weight.shape[-1] != head_dim
    columns = triton.next_power_of_2(head_dim // 2)
    rows = triton.next_power_of_2(max(heads, kv_heads)) if together else max(1, ELEMENTS // (2 * columns))
    parts = triton.cdiv(heads, rows) + (0 if attention.shared else 2 * triton.cdiv(kv_heads, rows))
    q = torch.empty(qkv.shape[0], heads, head_dim, dtype=torch.bfloat16, device=qkv.device)
    _rope_store_kernel[qkv.shape[0], parts](
        qkv,
        positions,
        slots,
        rotary.cos if rotary else qkv,
        rotary.sin if rotary else qkv,
        norms.q.weight if norms else qkv,
        norms.k.weight if norms else qkv,
        norms.v.weight if norms and norms.v else qkv,
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
        ROTARY=rotary is not None,
        DISTANCE=rotary.distance if rotary else head_dim // 2,
        STORES=not attention.shared,
        NORMED=norms is not None,
        VALUES_NORMED=norms is not None and norms.v is not None,
        CENTERED=norms is not None and norms.q.kind is NormKind.LAYER,
        TOGETHER=together,
        PER_HEAD=together or (norms is not None and norms.q.weight.dim() == 2),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4 if rows * columns <= ELEMENTS else 8,
        **launch_options(early),
    )
    return q
