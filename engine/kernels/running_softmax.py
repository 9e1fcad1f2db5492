"""Softmax over scores that come piece by piece, by a running maximum (arXiv:2205.14135).

Pieces of kernels, to be called by kernels. Exponents are those of 2: scores are multiplied by log2(e) before.
"""

import triton
import triton.language as tl


@triton.jit
def base_of(peak: tl.tensor) -> tl.tensor:
    """What exponents are taken relative to. A row that has seen nothing yet has no peak."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def weighed(scores: tl.tensor, factor: tl.tensor, peak: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Of scores [rows, piece], each times `factor`, and of peak and total so far [rows]: weights [rows, piece], by what
    to multiply that which was weighed before [rows], and peak and total now.

    Of a row whose scores are all -inf nothing changes.
    """
    top = tl.maximum(peak, tl.max(scores, 1) * factor)
    base = base_of(top)
    weights = tl.exp2(scores * factor - base[:, None])
    kept = tl.exp2(peak - base)
    return weights, kept, top, tl.fma(total, kept, tl.sum(weights, 1))
