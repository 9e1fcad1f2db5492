"""The gate of an MLP's activation, for kernels."""

import triton
import triton.language as tl


@triton.jit
def gated_values(first: tl.tensor, second: tl.tensor, GELU: tl.constexpr) -> tl.tensor:
    """Return gate(first) * second, float32. The gate is SiLU, or GELU with tanh."""
    # Both gates have the form x * sigmoid(y). This holds for GELU with tanh because tanh(z) = 2 * sigmoid(2 * z) - 1.
    slope = 1.5957691216057308 * (first + 0.044715 * first * first * first) if GELU else first
    return first * tl.sigmoid(slope) * second
