"""Apply rotary embedding, and write keys and values into KV cache blocks.

One KV head of one block holds K as [head_dim][16 tokens], then V as [16 tokens][head_dim], so that the scores of 16
positions need no sum across lanes. Other modules treat a block as opaque bytes. For int8, the float32 scales of the 16
keys follow, then those of the 16 values: x = scale * code, one scale per token and head. Reference implementations:
`rope` and `store_kv` in `engine.kernels.reference`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from engine.backends.cpu.floats import each_vector, load_some, multiply_floats, store_some
from engine.config import BLOCK_SIZE
from quant.cpu.float16 import narrow, widen
from quant.cpu.kernel import inlined, jit, kernel
from quant.cpu.vector import F32, I32, I64, LANES, Emit, F16x16, F32x8, F32x16, I8x16, I32x16

CODES = 127  # the largest int8 code
MIN_MAGNITUDE = 1e-30  # for a smaller x, 127 / x may overflow to infinity


class KVType(IntEnum):
    """Storage type of keys and values. Recorded programs contain the enum's number."""

    FLOAT16 = 0
    INT8 = 1


@dataclass(frozen=True, slots=True)
class Elements:
    """How to load and store 16 elements of a cache type."""

    vector: ir.Type
    size: int  # bytes per element
    scaled: bool
    widen: Callable[[Emit, Any], Any]  # converts stored elements to float32
    # converts float32 to stored elements; for int8, its input is already divided by the scale
    narrow: Callable[[Emit, Any], Any]

    def load(self, e: Emit, address: Any) -> Any:
        """Load elements as float32, without their scale."""
        return self.widen(e, e.load(address, self.vector))


def _widen_integers(e: Emit, v: Any) -> Any:
    return e.b.sitofp(v, F32x16)


def _narrow_to_integers(e: Emit, v: Any) -> Any:
    return e.b.trunc(e.b.fptosi(e.nearest(v), I32x16), I8x16)


ELEMENTS = {
    KVType.FLOAT16: Elements(F16x16, 2, False, widen, narrow),
    KVType.INT8: Elements(I8x16, 1, True, _widen_integers, _narrow_to_integers),
}


def head_bytes(kv_type: KVType, head_dim: int) -> int:
    """Return the size of one KV head of one block in bytes."""
    elements = ELEMENTS[kv_type]
    return 2 * BLOCK_SIZE * (elements.size * head_dim + (4 if elements.scaled else 0))


def scales_at(e: Emit, elements: Elements, block: Any, dim: Any) -> tuple[Any, Any]:
    """Return the addresses of the key scales and of the value scales of one KV head of a block."""
    keys = e.at(block, dim, 2 * BLOCK_SIZE * elements.size)
    return keys, e.at(keys, 4 * BLOCK_SIZE)


@kernel
def _rotate_interleaved(e: Emit, x: Any, cosine: Any, sine: Any, count: Any, scale: Any) -> None:
    """Rotate the pairs (2i, 2i + 1) of `count` elements in place, and multiply them by a scale (bits of a float32)."""
    b, factor = e.b, e.splat(e.float_from_bits(scale))
    twice = ir.Constant(I32x16, [lane // 2 for lane in range(LANES)])
    swap = ir.Constant(I32x16, [lane ^ 1 for lane in range(LANES)])
    signs = ir.Constant(F32x16, [-1.0, 1.0] * (LANES // 2))

    def angles(table: Any, number: Any, live: Any) -> Any:
        """Load one float per pair, and repeat it for both elements."""
        at = e.at(table, number, 32)
        pairs = b.sdiv(b.srem(count, I64(LANES)), I64(2))
        few = e.load(at, F32x8) if live is None else e.load_some(at, e.first_lanes(pairs))
        return b.shuffle_vector(few, few, twice)

    def rotate_vector(number: Any, live: Any) -> None:
        at, (cos, sin) = e.at(x, number, 64), (angles(table, number, live) for table in (cosine, sine))
        v = b.fmul(load_some(e, at, live), factor)
        rotated = b.fmul(b.shuffle_vector(v, v, swap), b.fmul(sin, signs))
        store_some(e, at, e.fma(v, cos, rotated), live)

    each_vector(e, count, rotate_vector)


@kernel
def _rotate_halves(e: Emit, x: Any, cosine: Any, sine: Any, pairs: Any, distance: Any, scale: Any) -> None:
    """Rotate the first `pairs` pairs (i, i + distance) in place, and multiply them by a scale (bits of a float32)."""
    b, factor = e.b, e.splat(e.float_from_bits(scale))

    def rotate_vector(number: Any, live: Any) -> None:
        near = e.at(x, number, 64)
        far = b.add(near, b.mul(distance, I64(4)))
        cos, sin = (load_some(e, e.at(table, number, 64), live) for table in (cosine, sine))
        first, second = (b.fmul(load_some(e, at, live), factor) for at in (near, far))
        store_some(e, near, e.fma(first, cos, b.fmul(second, b.fsub(e.f(0), sin))), live)
        store_some(e, far, e.fma(second, cos, b.fmul(first, sin)), live)

    each_vector(e, pairs, rotate_vector)


@jit
def rotate(
    x: int, cosine: int, sine: int, dim: int, rotary_dim: int, distance: int, scale: int, interleaved: int
) -> None:
    """Rotate `rotary_dim` elements of the head at x in place, and multiply all `dim` elements by the scale.

    `cosine` and `sine` are the table rows of the token's position, float32 [rotary_dim / 2]. The rotated elements are
    the first ones, or, unless pairs are interleaved, those in two parts that start `distance` elements apart.
    """
    pairs = rotary_dim // 2
    if interleaved:
        _rotate_interleaved(x, cosine, sine, rotary_dim, scale)
        distance = pairs
    else:
        _rotate_halves(x, cosine, sine, pairs, distance, scale)
    if pairs < distance:
        multiply_floats(x + 4 * pairs, distance - pairs, scale)
    if distance + pairs < dim:
        multiply_floats(x + 4 * (distance + pairs), dim - distance - pairs, scale)


def _scale(e: Emit, x: Any, dim: Any) -> tuple[Any, Any]:
    """Return the int8 scale of float32 [dim], and 1 / scale in all lanes, or 0 if the scale is 0.

    If an element is NaN, the scale is NaN.
    """
    b, top = e.b, e.variable(e.i(0))
    with cgutils.for_range(b, b.sdiv(dim, I64(LANES))) as loop:
        v = e.load(e.at(x, loop.index, 64))
        b.store(e.larger_bits(b.load(top), e.magnitude_bits(v, v)), top)
    largest = b.bitcast(e.reduce(b.load(top), e.larger_bits), F32)
    some = b.fcmp_ordered(">", largest, F32(MIN_MAGNITUDE))
    inverse = b.select(some, b.fdiv(F32(CODES), largest), F32(0))
    return b.fmul(largest, F32(1 / CODES)), e.splat(inverse)


def _make_store(kv_type: KVType) -> Callable[..., None]:
    elements = ELEMENTS[kv_type]
    size, to_stored = elements.size, elements.narrow

    def store(e: Emit, key: Any, value: Any, block: Any, offset: Any, dim: Any) -> None:
        """Write k and v, float32 [dim] each, into one KV head of a block.

        `offset` is the token's index in the block, 0..15.
        """
        b, inverses = e.b, [e.f(1), e.f(1)]
        if elements.scaled:
            for n, (x, at) in enumerate(zip((key, value), scales_at(e, elements, block, dim), strict=True)):
                scale, inverses[n] = _scale(e, x, dim)
                e.store(e.at(at, offset, 4), scale, 4)
        row = b.add(e.at(block, dim, size * BLOCK_SIZE), b.mul(offset, b.mul(dim, I64(size))))
        with cgutils.for_range(b, b.sdiv(dim, I64(LANES))) as loop:
            k, v = (e.load(e.at(x, loop.index, 64)) for x in (key, value))
            k, v = (to_stored(e, b.fmul(x, inverse)) for x, inverse in zip((k, v), inverses, strict=True))
            column = e.at(e.at(block, loop.index, size * BLOCK_SIZE * LANES), offset, size)
            for lane in range(LANES):
                e.store(e.at(column, size * BLOCK_SIZE * lane), b.extract_element(k, I32(lane)), size)
            e.store(e.at(row, loop.index, size * LANES), v, size)

    store.__name__ = f"store_key_value_{kv_type.name.lower()}"
    return kernel(store)


STORE_KERNELS = {kv_type: _make_store(kv_type) for kv_type in KVType}


@inlined
def store_key_value(e: Emit, kernel: Any, key: Any, value: Any, block: Any, offset: Any, dim: Any) -> None:
    """Call one of STORE_KERNELS by its address."""
    e.call_address(kernel, key, value, block, offset, dim)
