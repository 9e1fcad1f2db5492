"""8-bit floats, e4m3 (arXiv:2209.05433), by integer arithmetic, for GPUs that have no instruction for them.

In memory they are uint8. Pieces of kernels, to be called by kernels.
"""

import triton
import triton.language as tl


@triton.jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """float32 -> uint8: to the nearest, ties to even; what is too large becomes the largest, NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # The exponent's bias goes from 127 to 7 and 20 bits of the fraction go; half of the last kept one is added first.
    normal = (size + 0x7FFFF + ((size >> 20) & 1) - 0x3C000000) >> 20
    # Below 2^-6 codes are multiples of 2^-9, which is what the last bit of a float32 near 2^14 stands for.
    small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
