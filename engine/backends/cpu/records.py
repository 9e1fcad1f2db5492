"""Records: what some pieces of a context give, in a form that can be combined with what the next one gives.

A record is float32 values [head_dim], then a peak and a total: the values and the total are sums of exp(score - peak).
Records are combined one after another in order of position (arXiv:2205.14135). Refuses to know how one is computed.
"""

from typing import Any

from numba.core import cgutils

from quant.cpu.kernel import jit, kernel
from quant.cpu.vector import F32, I32, I64, LANES, Emit

RECORD_TAIL = 64  # bytes behind the values: peak, total, padding


def record_bytes(head_dim: int) -> int:
    """Bytes of one record."""
    return 4 * head_dim + RECORD_TAIL


@kernel
def combine(e: Emit, record: Any, later: Any, dim: Any, out: Any) -> None:
    """out = the record of some pieces and that of the piece behind them, as one; out may be `record`."""
    b = e.b
    tails = [e.at(base, dim, 4) for base in (record, later)]
    peaks = [e.load(tail, F32, 4) for tail in tails]
    totals = [e.load(e.at(tail, 4), F32, 4) for tail in tails]
    peak = e.larger(peaks[0], peaks[1])
    kept, added = (e.exp(e.splat(b.fsub(old, peak))) for old in peaks)
    with cgutils.for_range(b, b.sdiv(dim, I64(LANES))) as loop:
        scaled = b.fmul(e.load(e.at(later, loop.index, 64)), added)
        e.store(e.at(out, loop.index, 64), e.fma(e.load(e.at(record, loop.index, 64)), kept, scaled))
    first, tail = I32(0), e.at(out, dim, 4)
    total = b.fadd(
        b.fmul(totals[0], b.extract_element(kept, first)), b.fmul(totals[1], b.extract_element(added, first))
    )
    e.store(tail, peak, 4)
    e.store(e.at(tail, 4), total, 4)


@kernel
def finish(e: Emit, record: Any, dim: Any, out: Any) -> None:
    """out [dim] = the values of a record divided by its total."""
    b = e.b
    total = e.splat(e.load(e.at(e.at(record, dim, 4), 4), F32, 4))
    with cgutils.for_range(b, b.sdiv(dim, I64(LANES))) as loop:
        e.store(e.at(out, loop.index, 64), b.fdiv(e.load(e.at(record, loop.index, 64)), total))


@jit
def merge_pieces(records: int, stride: int, pieces: int, dim: int, total: int, out: int) -> None:
    """The records of one head's pieces, `stride` bytes apart, in order -> out [dim]; `total` has room for a record."""
    before = records
    for piece in range(1, pieces):
        combine(before, records + piece * stride, dim, total)
        before = total
    finish(before, dim, out)
