"""The q, k, v projection of one token on a GPU, with rotary embedding and the KV store as its ending.

Does what `packed_product.row_product` and `rope_store.rope_and_store` do, and saves a launch and its traffic. Both rows
of a rotated pair are in one program. Heads that are normalized first need more rows, so they are not supported.

Often v has another type than q and k, as in Q4_K_M. Then programs of both matrices are in one launch, because one of
them alone does not fill a GPU. Parameters of the second matrix start with v_.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.config import BLOCK_SIZE
from engine.kernels.rope_store import to_e4m3
from engine.operations import Attention
from quant.cuda.linear import CudaLinear
from quant.kernels.early_start import launch_options
from quant.kernels.packed_product import VECTOR_ROWS, UnscaledRow, vector_operands
from quant.kernels.packed_vector import vector_sums

# arguments that both matrices have: tensors, and compile-time constants
TENSORS = ("low", "high", "scales", "sub_scales", "zeros", "numbers", "scale_table", "x")
CONSTANTS = (
    "GROUP", "UNIT", "LOW", "HIGH", "RATIO", "ZERO", "MINIMUMS", "SUB_SCALE_ZERO", "NIBBLES", "NESTED_BLOCK", "STAGES",
)  # fmt: skip


@triton.jit
def _store_kv(at: tl.tensor, values: tl.tensor) -> None:
    if at.dtype.element_ty == tl.uint8:
        tl.store(at, to_e4m3(values))
    else:
        tl.store(at, values.to(at.dtype.element_ty))


@triton.jit(
    do_not_specialize=[
        "rows", "columns", "tiles", "groups", "chunks", "blocks", "base", "splits", "square_count", "v_rows",
        "v_groups", "v_chunks", "v_blocks",
    ]
)  # fmt: skip
def _rotated_kernel(
    low: tl.tensor,
    high: tl.tensor,
    scales: tl.tensor,
    sub_scales: tl.tensor,
    zeros: tl.tensor,
    numbers: tl.tensor,
    scale_table: tl.tensor,
    scale_offset: tl.tensor,
    v_low: tl.tensor,  # None: there is one matrix
    v_high: tl.tensor,
    v_scales: tl.tensor,
    v_sub_scales: tl.tensor,
    v_zeros: tl.tensor,
    v_numbers: tl.tensor,
    v_scale_table: tl.tensor,
    v_scale_offset: tl.tensor,
    x: tl.tensor,
    v_x: tl.tensor,  # x in the order of the second matrix's columns
    squares: tl.tensor,
    square_count: tl.tensor,
    epsilon: tl.tensor,
    bias: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q: tl.tensor,
    pool: tl.tensor,
    block_stride: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    tiles: tl.tensor,
    groups: tl.tensor,
    chunks: tl.tensor,
    blocks: tl.tensor,
    v_rows: tl.tensor,
    v_groups: tl.tensor,
    v_chunks: tl.tensor,
    v_blocks: tl.tensor,
    base: tl.tensor,
    splits: tl.tensor,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    RATIO: tl.constexpr,
    ZERO: tl.constexpr,
    MINIMUMS: tl.constexpr,
    SUB_SCALE_ZERO: tl.constexpr,
    NIBBLES: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
    V_GROUP: tl.constexpr,
    V_UNIT: tl.constexpr,
    V_LOW: tl.constexpr,
    V_HIGH: tl.constexpr,
    V_RATIO: tl.constexpr,
    V_ZERO: tl.constexpr,
    V_MINIMUMS: tl.constexpr,
    V_SUB_SCALE_ZERO: tl.constexpr,
    V_NIBBLES: tl.constexpr,
    V_NESTED_BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    V_STAGES: tl.constexpr,
    SQUARES: tl.constexpr,
    EARLY: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,  # rotated pairs per head; 0: none
    INTERLEAVED: tl.constexpr,
) -> None:
    parts: tl.constexpr = HEAD_DIM // 16  # programs of a head
    distance: tl.constexpr = 1 if INTERLEAVED else parts  # from the first of the two tiles of eight rows to the second
    head, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    first = tl.program_id(0) * 2 if INTERLEAVED else head * (2 * parts) + part
    result = tl.zeros((2, 8), tl.float32)
    if v_low is None or first * 8 < rows:
        result = vector_sums(
            low, high, scales, sub_scales, zeros, numbers, scale_table, scale_offset, x, squares, square_count,
            epsilon, first, distance, 0, rows, columns, tiles, groups, chunks, blocks, base, splits, GROUP, UNIT, LOW,
            HIGH, RATIO, ZERO, MINIMUMS, SUB_SCALE_ZERO, NIBBLES, NESTED_BLOCK, WARPS, STAGES, SQUARES, EARLY,
        )  # fmt: skip
    else:
        result = vector_sums(
            v_low, v_high, v_scales, v_sub_scales, v_zeros, v_numbers, v_scale_table, v_scale_offset, v_x, squares,
            square_count, epsilon, first - rows // 8, distance, 0, v_rows, columns, tiles, v_groups, v_chunks, v_blocks,
            base, splits, V_GROUP, V_UNIT, V_LOW, V_HIGH, V_RATIO, V_ZERO, V_MINIMUMS, V_SUB_SCALE_ZERO, V_NIBBLES,
            V_NESTED_BLOCK, WARPS, V_STAGES, SQUARES, EARLY,
        )  # fmt: skip
    pair = part * 8 + tl.arange(0, 8)
    if INTERLEAVED:
        one, other = tl.split(result.reshape(2, 4, 2))
        one, other = one.reshape(8), other.reshape(8)
        one_at, other_at = 2 * pair, 2 * pair + 1
    else:
        one, other = tl.split(tl.trans(result))
        one_at, other_at = pair, pair + HEAD_DIM // 2
    if bias is not None:
        one += tl.load(bias + head * HEAD_DIM + one_at)
        other += tl.load(bias + head * HEAD_DIM + other_at)
    if PAIRS and head < HEADS + KV_HEADS:
        angle = tl.load(positions) * PAIRS + pair
        cosine = tl.load(cos + angle, mask=pair < PAIRS, other=1.0)
        sine = tl.load(sin + angle, mask=pair < PAIRS, other=0.0)
        before = one
        one = before * cosine - other * sine
        other = before * sine + other * cosine
    if head < HEADS:
        at = q + head * HEAD_DIM
        tl.store(at + one_at, one.to(q.dtype.element_ty))
        tl.store(at + other_at, other.to(q.dtype.element_ty))
    else:
        slot = tl.load(slots)
        kv_row = (head - HEADS) * BLOCK_SIZE + slot % BLOCK_SIZE
        kv_at = pool + slot // BLOCK_SIZE * block_stride + kv_row * HEAD_DIM
        _store_kv(kv_at + one_at, one)
        _store_kv(kv_at + other_at, other)


def is_supported(layer: CudaLinear, head_dim: int, attention: Attention) -> bool:
    """Whether `rotated_product` supports a projection."""
    rotary = attention.rotary
    is_paired = rotary is None or rotary.interleaved or 2 * rotary.distance == head_dim
    has_whole_heads = all(matrix.shape[0] % head_dim == 0 for matrix in layer.matrices)
    is_plain = attention.norms is None and head_dim % VECTOR_ROWS == 0
    if not (is_plain and is_paired and has_whole_heads and layer.takes_rows):
        return False
    return len(layer.matrices) <= 2 and len({tile.warps for _, tile in layer.row_matrices()}) == 1


def rotated_product(
    layer: CudaLinear,
    x: Tensor | UnscaledRow,
    bias: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    pool: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    attention: Attention,
) -> Tensor:
    """Compute q, k, and v of one token, rotate q and k, and write k and v to their slot.

    x is bfloat16 [1, inputs], or unscaled. The rest is as in `rope_and_store`. Returns q, bfloat16 [1, heads,
    head_dim].
    """
    rotary = attention.rotary
    q = torch.empty(1, heads, head_dim, dtype=torch.bfloat16, device=pool.device)
    (matrix, tile), *others = layer.row_matrices()
    operands = vector_operands(matrix, x, tile)
    second = vector_operands(others[0][0], x, others[0][1]) if others else operands
    _rotated_kernel[(layer.outputs // VECTOR_ROWS,)](
        **operands,
        **_of_second(second, is_absent=not others),
        **launch_options(layer.starts_early),
        bias=bias,
        positions=positions,
        slots=slots,
        cos=rotary.cos if rotary else q,
        sin=rotary.sin if rotary else q,
        q=q,
        pool=pool,
        block_stride=pool.stride(0),
        rows=matrix.shape[0],
        v_rows=layer.outputs - matrix.shape[0],
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=BLOCK_SIZE,
        PAIRS=rotary.cos.shape[-1] if rotary else 0,
        INTERLEAVED=rotary is not None and rotary.interleaved,
        num_stages=1,
        num_warps=tile.warps,
    )
    return q


def _of_second(operands: dict[str, Any], *, is_absent: bool) -> dict[str, Any]:
    """Return the arguments of the second matrix that differ from those of the first one. If it is absent, tensors are
    None.
    """
    tensors = {f"v_{name}": None if is_absent else operands[name] for name in TENSORS}
    sizes = {f"v_{name}": operands[name] for name in ("scale_offset", "groups", "chunks", "blocks")}
    return tensors | sizes | {f"V_{name}": operands[name] for name in CONSTANTS}
