"""Normalization of float rows on the CPU: RMS norm and layer norm."""

from typing import Any

from numba.core import cgutils

from quant.cpu.activations import GROUP
from quant.cpu.kernel import kernel
from quant.cpu.vector import F32, I32, I64, LANES, Emit


def _total(e: Emit, x: Any, groups: Any, add: Any) -> Any:
    """Fold a float row of 32 * groups columns into one value: each vector v is added by sum = add(v, sum)."""
    b, sums = e.b, [e.variable(e.f(0)) for _ in range(2)]
    with cgutils.for_range(b, groups) as loop:
        for half, total in enumerate(sums):
            v = e.load(e.at(e.at(x, loop.index, 4 * GROUP), 64 * half))
            b.store(add(v, b.load(total)), total)
    return e.reduce(b.fadd(b.load(sums[0]), b.load(sums[1])), b.fadd)


def _inverse_root(e: Emit, squares: Any, count: Any, epsilon: Any) -> Any:
    """Return 1 / sqrt(squares / count + epsilon)."""
    mean = e.b.fdiv(squares, count)
    root = e.call("llvm.sqrt.f32", F32, e.b.fadd(mean, e.float_from_bits(epsilon)))
    return e.b.fdiv(F32(1), root)


def _count(e: Emit, groups: Any) -> Any:
    return e.b.sitofp(e.b.mul(groups, I64(GROUP)), F32)


@kernel
def norm_factor(e: Emit, x: Any, groups: Any, epsilon: Any) -> Any:
    """Return 1 / root mean square of a row of 32 * groups floats (arXiv:1910.07467).

    The result and `epsilon` are the bits of a float32.
    """
    squares = _total(e, x, groups, lambda v, total: e.fma(v, v, total))
    factor = _inverse_root(e, squares, _count(e, groups), epsilon)
    return e.b.zext(e.b.bitcast(factor, I32), I64)


@kernel
def layer_norm_row(e: Emit, x: Any, weight: Any, groups: Any, epsilon: Any, out: Any) -> None:
    """Write (x - mean) / standard deviation of a float row, times the float vector at `weight` (arXiv:1607.06450).

    `epsilon` is the bits of a float32. `out` may be x.
    """
    b, count = e.b, _count(e, groups)
    mean = e.splat(b.fdiv(_total(e, x, groups, b.fadd), count))

    def square(v: Any, total: Any) -> Any:
        centered = b.fsub(v, mean)
        return e.fma(centered, centered, total)

    factor = e.splat(_inverse_root(e, _total(e, x, groups, square), count, epsilon))
    with cgutils.for_range(b, b.mul(groups, I64(GROUP // LANES))) as loop:
        v, w = (e.load(e.at(base, loop.index, 4 * LANES)) for base in (x, weight))
        e.store(e.at(out, loop.index, 4 * LANES), b.fmul(b.fmul(b.fsub(v, mean), factor), w))
