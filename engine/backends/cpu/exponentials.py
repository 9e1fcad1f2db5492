"""Loops over float32 arrays that compute exponentials: softmax, sigmoid, and the decay of a gated delta rule."""

from typing import Any

import numpy as np

from engine.backends.cpu.floats import each_vector, load_some, store_some
from quant.cpu.kernel import kernel
from quant.cpu.vector import Emit, F32x16, I32x16

LOG2_E = 1.4426950408889634
# Taylor coefficients of 2 ** r, the highest power first. For r from -0.5 to 0.5 the relative error is below 1e-7.
POWERS = (1.5252734e-5, 1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 0.24022651, 0.69314718, 1.0)


def exact_exp(e: Emit, x: Any) -> Any:
    """Return e ** x, with a relative error of 1e-6 for x from -87 to 0. `Emit.exp` is less exact and faster."""
    b = e.b
    t = b.fmul(e.larger(x, e.f(-87)), e.f(LOG2_E))
    n = e.nearest(t)
    r, p = b.fsub(t, n), e.f(POWERS[0])
    for coefficient in POWERS[1:]:
        p = e.fma(p, r, e.f(coefficient))
    return b.bitcast(b.add(b.bitcast(p, I32x16), b.shl(b.fptosi(n, I32x16), e.i(23))), F32x16)


@kernel
def softmax_floats(e: Emit, x: Any, count: Any, out: Any) -> None:
    """Write the softmax of `count` float32 at x to `out`."""
    b = e.b
    best, total = e.variable(e.f(-np.inf)), e.variable(e.f(0))

    def compare(number: Any, live: Any) -> None:
        v = load_some(e, e.at(x, number, 64), live)
        b.store(e.larger(b.load(best), v if live is None else b.select(live, v, e.f(-np.inf))), best)

    each_vector(e, count, compare)
    top = e.splat(e.reduce(b.load(best), e.larger))

    def weigh(number: Any, live: Any) -> None:
        v = exact_exp(e, b.fsub(load_some(e, e.at(x, number, 64), live), top))
        store_some(e, e.at(out, number, 64), v, live)
        b.store(b.fadd(b.load(total), v if live is None else b.select(live, v, e.f(0))), total)

    each_vector(e, count, weigh)
    inverse = b.fdiv(e.f(1), e.splat(e.reduce(b.load(total), b.fadd)))

    def divide(number: Any, live: Any) -> None:
        at = e.at(out, number, 64)
        store_some(e, at, b.fmul(load_some(e, at, live), inverse), live)

    each_vector(e, count, divide)


def _sigmoid(e: Emit, x: Any) -> Any:
    b = e.b
    power = exact_exp(e, b.fsub(e.f(0), e.larger(x, b.fsub(e.f(0), x))))  # exp(-|x|), which does not overflow
    positive = b.fcmp_ordered(">", x, e.f(0))
    return b.fdiv(b.select(positive, e.f(1), power), b.fadd(e.f(1), power))


@kernel
def sigmoid_floats(e: Emit, x: Any, count: Any, out: Any) -> None:
    """Write 1 / (1 + exp(-x)) of `count` float32 at x to `out`."""

    def weigh(number: Any, live: Any) -> None:
        store_some(e, e.at(out, number, 64), _sigmoid(e, load_some(e, e.at(x, number, 64), live)), live)

    each_vector(e, count, weigh)


@kernel
def scale_by_sigmoid(e: Emit, x: Any, y: Any, count: Any, out: Any) -> None:
    """Write x / (1 + exp(-y)) of `count` float32 at x and y to `out`."""

    def scale(number: Any, live: Any) -> None:
        first, second = (load_some(e, e.at(at, number, 64), live) for at in (x, y))
        store_some(e, e.at(out, number, 64), e.b.fmul(first, _sigmoid(e, second)), live)

    each_vector(e, count, scale)


def _log_of_one_plus(e: Emit, x: Any) -> Any:
    """Return log(1 + x) for x from 0 to 1, as 2 * atanh(x / (2 + x)). The relative error is below 1e-7."""
    b = e.b
    ratio = b.fdiv(x, b.fadd(x, e.f(2)))
    square, total = b.fmul(ratio, ratio), e.f(2 / 15)
    for power in (13, 11, 9, 7, 5, 3, 1):
        total = e.fma(total, square, e.f(2 / power))
    return b.fmul(total, ratio)


@kernel
def decay_floats(e: Emit, x: Any, bias: Any, rate: Any, count: Any, out: Any) -> None:
    """Write exp(rate * log(1 + exp(x + bias))) of `count` float32 each at x, `bias`, and `rate` to `out`.

    Rates are negative.
    """
    b = e.b

    def decay(number: Any, live: Any) -> None:
        v, added, factor = (load_some(e, e.at(at, number, 64), live) for at in (x, bias, rate))
        v = b.fadd(v, added)
        small = exact_exp(e, b.fsub(e.f(0), e.larger(v, b.fsub(e.f(0), v))))
        softplus = b.fadd(e.larger(v, e.f(0)), _log_of_one_plus(e, small))
        store_some(e, e.at(out, number, 64), exact_exp(e, b.fmul(factor, softplus)), live)

    each_vector(e, count, decay)
