"""Partial attention results: each covers part of the context. They are combined in order of position
(arXiv:2205.14135).

A partial result is the sum of exp(score - peak) * value, float32 [head_dim], then the peak (the largest score) and the
total (the sum of exp(score - peak)).
"""

from typing import Any

from numba.core import cgutils

from quant.cpu.kernel import jit, kernel
from quant.cpu.vector import F32, I32, I64, LANES, Emit

PARTIAL_TAIL = 64  # bytes after the weighted sum: peak, total, padding


@jit
def partial_bytes(head_dim: int) -> int:
    """Return the size of one partial result in bytes."""
    return 4 * head_dim + PARTIAL_TAIL


@kernel
def combine(e: Emit, partial: Any, later: Any, dim: Any, out: Any) -> None:
    """Combine a partial result with that of the positions after it, and write the result to `out`. `out` may be
    `partial`.
    """
    b = e.b
    tails = [e.at(base, dim, 4) for base in (partial, later)]
    peaks = [e.load(tail, F32, 4) for tail in tails]
    totals = [e.load(e.at(tail, 4), F32, 4) for tail in tails]
    peak = e.larger(peaks[0], peaks[1])
    kept, added = (e.exp(e.splat(b.fsub(old, peak))) for old in peaks)
    with cgutils.for_range(b, b.sdiv(dim, I64(LANES))) as loop:
        scaled = b.fmul(e.load(e.at(later, loop.index, 64)), added)
        e.store(e.at(out, loop.index, 64), e.fma(e.load(e.at(partial, loop.index, 64)), kept, scaled))
    first, tail = I32(0), e.at(out, dim, 4)
    total = b.fadd(
        b.fmul(totals[0], b.extract_element(kept, first)), b.fmul(totals[1], b.extract_element(added, first))
    )
    e.store(tail, peak, 4)
    e.store(e.at(tail, 4), total, 4)


@kernel
def finish(e: Emit, partial: Any, dim: Any, sink: Any, out: Any) -> None:
    """Divide the weighted sum of a partial result by its total, and write it to `out` [dim].

    `sink` is the address of a float32 score that is part of the total only; 0: none. It counts as at most 87 more than
    the peak: then the result is already less than 1e-37 times a value.
    """
    b, tail = e.b, e.at(partial, dim, 4)
    total = e.variable(e.splat(e.load(e.at(tail, 4), F32, 4)))
    with b.if_then(b.icmp_signed("!=", sink, I64(0))):
        excess = e.splat(b.fsub(e.load(sink, F32, 4), e.load(tail, F32, 4)))
        b.store(b.fadd(b.load(total), e.exp(e.smaller(excess, e.f(87)))), total)
    with cgutils.for_range(b, b.sdiv(dim, I64(LANES))) as loop:
        e.store(e.at(out, loop.index, 64), b.fdiv(e.load(e.at(partial, loop.index, 64)), b.load(total)))


@jit
def merge_partials(partials: int, stride: int, pieces: int, dim: int, sink: int, total: int, out: int) -> None:
    """Combine the partial results of one head, `stride` bytes apart, in order. Writes `out` [dim].

    `sink` is as in `finish`. `total` is scratch memory for one partial result.
    """
    before = partials
    for piece in range(1, pieces):
        combine(before, partials + piece * stride, dim, total)
        before = total
    finish(before, dim, sink, out)
