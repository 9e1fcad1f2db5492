"""Loops over float32 arrays of any length. Their last vector may be partial.

Counts are numbers of elements. Addresses need no alignment.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import cgutils

from quant.cpu.kernel import jit, kernel
from quant.cpu.vector import I32, I64, LANE_NUMBERS, LANES, Emit


def each_vector(e: Emit, count: Any, emit: Callable[[Any, Any], None]) -> None:
    """Call emit(index, live) for each vector of `count` floats.

    `live` is None for whole vectors, and the mask of used lanes for a partial last vector.
    """
    b, whole = e.b, e.b.sdiv(count, I64(LANES))
    with cgutils.for_range(b, whole) as loop:
        emit(loop.index, None)
    rest = b.sub(count, b.mul(whole, I64(LANES)))
    with b.if_then(b.icmp_signed(">", rest, I64(0))):
        emit(whole, e.first_lanes(rest))


def load_some(e: Emit, at: Any, live: Any) -> Any:
    return e.load(at) if live is None else e.load_some(at, live)


def store_some(e: Emit, at: Any, value: Any, live: Any) -> None:
    e.store(at, value) if live is None else e.store_some(at, value, live)


@kernel
def multiply_floats(e: Emit, x: Any, count: Any, factor: Any) -> None:
    """Multiply `count` floats at x by a factor in place. `factor` is given as the bits of a float32."""
    factors = e.splat(e.float_from_bits(factor))

    def multiply(number: Any, live: Any) -> None:
        at = e.at(x, number, 64)
        store_some(e, at, e.b.fmul(load_some(e, at, live), factors), live)

    each_vector(e, count, multiply)


@kernel
def copy_floats(e: Emit, x: Any, count: Any, out: Any) -> None:
    """Copy `count` floats from x to `out`."""

    def copy(number: Any, live: Any) -> None:
        store_some(e, e.at(out, number, 64), load_some(e, e.at(x, number, 64), live), live)

    each_vector(e, count, copy)


@kernel
def add_floats(e: Emit, x: Any, count: Any, out: Any) -> None:
    """Add `count` floats at x to those at `out`."""

    def add(number: Any, live: Any) -> None:
        at = e.at(out, number, 64)
        store_some(e, at, e.b.fadd(load_some(e, at, live), load_some(e, e.at(x, number, 64), live)), live)

    each_vector(e, count, add)


@kernel
def multiply_arrays(e: Emit, x: Any, y: Any, count: Any, out: Any) -> None:
    """Write the products of `count` floats at x and y to `out`."""

    def multiply(number: Any, live: Any) -> None:
        first, second = (load_some(e, e.at(at, number, 64), live) for at in (x, y))
        store_some(e, e.at(out, number, 64), e.b.fmul(first, second), live)

    each_vector(e, count, multiply)


@kernel
def largest(e: Emit, x: Any, count: Any, first: Any, out: Any) -> None:
    """Write to `out` the largest of `count` float32 at x, then first + its index as int32. Ties: the first wins."""
    b = e.b
    best, where = e.variable(e.f(-np.inf)), e.variable(e.splat(I32(0)))
    vectors = b.sdiv(b.add(count, I64(LANES - 1)), I64(LANES))
    with cgutils.for_range(b, vectors) as loop:
        start = b.mul(loop.index, I64(LANES))
        live = e.first_lanes(b.sub(count, start))
        v = b.select(live, e.load_some(e.at(x, start, 4), live), e.f(-np.inf))
        more = b.fcmp_ordered(">", v, b.load(best))
        b.store(b.select(more, v, b.load(best)), best)
        b.store(b.select(more, b.add(e.splat(b.trunc(start, I32)), LANE_NUMBERS), b.load(where)), where)
    top = e.reduce(b.load(best), e.larger)
    tied = b.select(b.fcmp_ordered("==", b.load(best), e.splat(top)), b.load(where), e.i(2**31 - 1))
    index = e.reduce(tied, lambda p, q: b.select(b.icmp_signed("<", p, q), p, q))
    e.store(out, top)
    e.store(e.at(out, 4), b.add(index, b.trunc(first, I32)))


@jit
def init_with_bias(bias: int, count: int, add: int, rows: int, out: int, stride: int) -> None:
    """Prepare `rows` rows of `count` floats for products that are added to them.

    Writes the bias, or adds the bias to the existing values.
    """
    for row in range(rows):
        if add:
            add_floats(bias, count, out + row * stride)
        else:
            copy_floats(bias, count, out + row * stride)
