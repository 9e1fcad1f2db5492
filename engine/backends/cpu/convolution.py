"""Units of the CONVOLVE instruction: the short convolution of one request's tokens, for a strip of channels.

A unit computes token by token, so that the bits do not depend on how tokens are divided into steps. It keeps the last
inputs in a ring in its scratch memory, float32 [taps, STRIP]. Reference implementation: `short_convolution` in
`engine.kernels.reference`.
"""

from typing import Any

from engine.backends.cpu.exponentials import scale_by_sigmoid
from engine.backends.cpu.floats import copy_floats, each_vector, load_some, multiply_arrays, store_some
from engine.backends.cpu.instructions import Record
from quant.cpu.activations import GROUP
from quant.cpu.kernel import jit, kernel, word
from quant.cpu.vector import Emit

STRIP = 128  # channels of a unit
STRIP_BYTES = 4 * STRIP


@kernel
def _add_products(e: Emit, x: Any, y: Any, count: Any, out: Any) -> None:
    """Add the products of `count` floats at x and y to those at `out`."""

    def add(number: Any, live: Any) -> None:
        first, second = (load_some(e, e.at(at, number, 64), live) for at in (x, y))
        at = e.at(out, number, 64)
        store_some(e, at, e.fma(first, second, load_some(e, at, live)), live)

    each_vector(e, count, add)


@jit
def _row(ring: int, position: int, taps: int) -> int:
    """Return the address of an input in the ring. Positions before the request's first token are negative."""
    return ring + (position + taps) % taps * STRIP_BYTES


@jit
def _convolve_strip(a: Record, start: int, stop: int, source: int, target: int, first: int, ring: int) -> None:
    """Compute the channels from `first` for the tokens `start` to `stop` of one request.

    `source` and `target` are the addresses of the states to read and to write.
    """
    width, taps = GROUP * a.groups, a.taps
    offset, count, row_bytes = 4 * first, min(STRIP, width - first), 4 * width
    for past in range(1, taps):
        copy_floats(source + (taps - 1 - past) * row_bytes + offset, count, _row(ring, -past, taps))
    for token in range(stop - start):
        x, out = a.x + (start + token) * a.x_stride + offset, a.out + (start + token) * a.out_stride + offset
        if a.plain:
            copy_floats(x, count, _row(ring, token, taps))
        else:
            multiply_arrays(x, x + 2 * row_bytes, count, _row(ring, token, taps))
        multiply_arrays(a.vector + offset, _row(ring, token - taps + 1, taps), count, out)
        for tap in range(1, taps):
            weights = a.vector + tap * row_bytes + offset
            _add_products(weights, _row(ring, token - taps + 1 + tap, taps), count, out)
        if a.plain:
            scale_by_sigmoid(out, out, count, out)
        else:
            multiply_arrays(x + row_bytes, out, count, out)
    for past in range(1, taps):
        copy_floats(_row(ring, stop - start - past, taps), count, target + (taps - 1 - past) * row_bytes + offset)


@jit
def request_states(a: Record, h: Record, request: int) -> tuple[int, int, int, int]:
    """Return the start and the end of a request's tokens, and the addresses of its states to read and to write."""
    states = h.tables + a.group * h.table_group + request * h.table_stride
    source, target = a.cache + word(states, 0) * a.block_bytes, a.cache + word(states, 1) * a.block_bytes
    return word(h.query_starts, request), word(h.query_starts, request + 1), source, target


@jit
def count_strips(a: Record) -> int:
    return (GROUP * a.groups + STRIP - 1) // STRIP


@jit
def convolve(a: Record, h: Record, first: int, last: int, scratch: int) -> None:
    """Compute units of CONVOLVE: a strip of channels of one request."""
    strips = count_strips(a)
    for unit in range(first, last):
        start, stop, source, target = request_states(a, h, unit // strips)
        _convolve_strip(a, start, stop, source, target, unit % strips * STRIP, scratch)
