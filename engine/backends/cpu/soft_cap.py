"""Soft caps: limit scores and logits by cap * tanh(x / cap) (arXiv:2408.00118)."""

from typing import Any

from engine.backends.cpu.floats import each_vector, load_some, store_some
from quant.cpu.kernel import kernel
from quant.cpu.vector import Emit

FLAT = 9.02  # for a larger x, tanh(x) rounds to 1 in float32
# Coefficients of tanh(x) = x * P(x * x) / Q(x * x), fitted for the smallest relative error up to FLAT. Highest powers
# first.
ABOVE = (1.33191129e-08, 2.05835586e-05, 0.00349404151, 0.133797243, 1.0)
BELOW = (7.76204956e-07, 0.000328310241, 0.0258711018, 0.467130393, 1.0)


def tanh(e: Emit, x: Any) -> Any:
    """Return the hyperbolic tangent of a vector, with a relative error of 4e-7. NaN stays NaN."""
    x = e.larger(e.f(-FLAT), e.smaller(e.f(FLAT), x))
    square = e.b.fmul(x, x)
    above, below = (e.f(coefficients[0]) for coefficients in (ABOVE, BELOW))
    for p, q in zip(ABOVE[1:], BELOW[1:], strict=True):
        above, below = e.fma(above, square, e.f(p)), e.fma(below, square, e.f(q))
    return e.b.fdiv(e.b.fmul(x, above), below)


def soft_cap(e: Emit, x: Any, cap: Any) -> Any:
    """Return cap * tanh(x / cap) of a vector; `cap` is a vector of equal lanes."""
    return e.b.fmul(cap, tanh(e, e.b.fdiv(x, cap)))


@kernel
def cap_floats(e: Emit, x: Any, count: Any, cap: Any) -> None:
    """Apply a soft cap to `count` float32 at x in place. `cap` is given as the bits of a float32."""
    caps = e.splat(e.float_from_bits(cap))

    def bound(number: Any, live: Any) -> None:
        at = e.at(x, number, 64)
        store_some(e, at, soft_cap(e, load_some(e, at, live), caps), live)

    each_vector(e, count, bound)
