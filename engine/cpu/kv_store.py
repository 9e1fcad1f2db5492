"""Rotary embedding, and keys and values on their way into the blocks of the cache.

One KV head of one block is K as [head_dim][16 tokens] float16, then V as [16 tokens][head_dim] float16: scores of 16
positions need no sum across lanes, and to everyone else a block is opaque bytes. The twins are `rope` and `store_kv` in
`engine.kernels.reference`.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from engine.config import BLOCK_SIZE
from quant.cpu.vector import I32, I64, LANES, Emit, F16x16, F32x8, F32x16, I32x16, jit, kernel


def head_bytes(head_dim: int) -> int:
    """Bytes of one KV head of one block."""
    return 2 * 2 * BLOCK_SIZE * head_dim


@kernel
def _rotate_neighbours(e: Emit, x: Any, cosine: Any, sine: Any, dim: Any, scale: Any) -> None:
    """Turn the pairs (2i, 2i + 1) of a head in place, times a scale (bits)."""
    b, factor = e.b, e.splat(e.float_from_bits(scale))
    twice = ir.Constant(I32x16, [lane // 2 for lane in range(LANES)])
    swap = ir.Constant(I32x16, [lane ^ 1 for lane in range(LANES)])
    signs = ir.Constant(F32x16, [-1.0, 1.0] * (LANES // 2))
    with cgutils.for_range(b, b.sdiv(dim, I64(LANES))) as loop:
        at = e.at(x, loop.index, 64)
        cos, sin = (e.load(e.at(table, loop.index, 32), F32x8) for table in (cosine, sine))
        cos, sin = (b.shuffle_vector(v, v, twice) for v in (cos, sin))
        v = b.fmul(e.load(at), factor)
        turned = b.fmul(b.shuffle_vector(v, v, swap), b.fmul(sin, signs))
        e.store(at, e.fma(v, cos, turned))


@kernel
def _rotate_halves(e: Emit, x: Any, cosine: Any, sine: Any, dim: Any, scale: Any) -> None:
    """Turn the pairs (i, i + dim / 2) of a head in place, times a scale (bits); dim is a multiple of 32."""
    b, factor = e.b, e.splat(e.float_from_bits(scale))
    with cgutils.for_range(b, b.sdiv(dim, I64(2 * LANES))) as loop:
        near = e.at(x, loop.index, 64)
        far = b.add(near, b.mul(dim, I64(2)))
        cos, sin = (e.load(e.at(table, loop.index, 64)) for table in (cosine, sine))
        first, second = (b.fmul(e.load(at), factor) for at in (near, far))
        e.store(near, e.fma(first, cos, b.fmul(second, b.fsub(e.f(0), sin))))
        e.store(far, e.fma(second, cos, b.fmul(first, sin)))


@jit
def rotate(x: int, cosine: int, sine: int, dim: int, scale: int, neighbours: int) -> None:
    """One head at x, in place; cosine and sine are the rows [dim / 2] of its position."""
    if neighbours:
        _rotate_neighbours(x, cosine, sine, dim, scale)
    else:
        _rotate_halves(x, cosine, sine, dim, scale)


@kernel
def store_key_value(e: Emit, key: Any, value: Any, block: Any, place: Any, dim: Any) -> None:
    """Write k and v, float32 [dim] each, at place 0..15 of one KV head of a block."""
    b = e.b
    values = e.at(block, dim, 2 * BLOCK_SIZE)
    with cgutils.for_range(b, b.sdiv(dim, I64(LANES))) as loop:
        k, v = (b.fptrunc(e.load(e.at(base, loop.index, 64)), F16x16) for base in (key, value))
        column = e.at(e.at(block, loop.index, 2 * BLOCK_SIZE * LANES), place, 2)
        for lane in range(LANES):
            e.store(e.at(column, 2 * BLOCK_SIZE * lane), b.extract_element(k, I32(lane)), 2)
        row = b.add(values, b.mul(place, b.mul(dim, I64(2))))
        e.store(e.at(row, loop.index, 2 * LANES), v, 2)
