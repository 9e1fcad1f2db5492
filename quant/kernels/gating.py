"""The gate of an MLP's activation, for kernels."""

import triton
import triton.language as tl


@triton.jit
def gated_values(first: tl.tensor, second: tl.tensor, GATE: tl.constexpr) -> tl.tensor:
    """Return gate(first) * second, float32. GATE is the value of a `Gate`.

    All gates have the form x * sigmoid(y). This holds for GELU with tanh because tanh(z) = 2 * sigmoid(2 * z) - 1.
    """
    slope = first
    if GATE == "gelu":
        slope = 1.5957691216057308 * (first + 0.044715 * first * first * first)
    if GATE == "clamped":
        first = tl.minimum(first, 7.0, propagate_nan=tl.PropagateNan.ALL)
        second = tl.clamp(second, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
        slope = 1.702 * first
    return first * tl.sigmoid(slope) * second
