"""Units of the instructions of a gated delta rule (arXiv:2412.06464).

A unit computes one value head of one request, token by token, so that the bits do not depend on how tokens are divided
into steps. It computes some columns of the head's state for all tokens before the next columns, so that they stay in
the L1 cache. A state is read once and written once per step: 128 KiB for a matrix of 128 x 128. Reference
implementation: `gated_delta_rule` in `engine.kernels.reference`.
"""

from collections.abc import Callable
from typing import Any

from numba.core import cgutils

from engine.backends.cpu.convolution import request_states
from engine.backends.cpu.exponentials import decay_floats, scale_by_sigmoid, sigmoid_floats
from engine.backends.cpu.floats import multiply_arrays
from engine.backends.cpu.instructions import Record
from quant.cpu.activations import FORM_KERNELS, GROUP, Form
from quant.cpu.kernel import jit, kernel
from quant.cpu.norms import norm_factor
from quant.cpu.vector import F32, LANES, Emit

WIDE = 64  # columns that are computed together, so that their sums do not wait for each other
_scale_floats = FORM_KERNELS[Form.FLOAT].scale_row


def _make_columns(columns: int, *, fetches: bool = False) -> Callable[..., None]:
    def compute_columns(
        e: Emit,
        source: Any,
        target: Any,
        stride: Any,
        rows: Any,
        q: Any,
        k: Any,
        v: Any,
        rates: Any,
        heads: Any,
        out: Any,
        ahead: Any,
    ) -> None:
        """Compute some columns of one value head for one token.

        The state S at `source` becomes decay * S + k (step * (v - decay * S k)), which is written to `target`; `out` is
        its product with q. `stride` is the distance of the rows of S in bytes. `rates` is the address of the head's
        step size; its decay is `heads` floats later. With `fetches`, the columns `ahead` bytes after these at both
        addresses are prefetched meanwhile.
        """
        b, vectors = e.b, range(columns // LANES)
        step, decay = (e.splat(e.load(at, F32)) for at in (rates, e.at(rates, heads, 4)))
        sums = [e.variable(e.f(0)) for _ in vectors]
        with cgutils.for_range(b, rows) as loop:
            at, key = e.at(source, b.mul(loop.index, stride)), e.splat(e.load(e.at(k, loop.index, 4), F32))
            for number, total in enumerate(sums):
                if fetches:
                    e.prefetch(e.at(e.at(at, ahead), 64 * number))
                b.store(e.fma(key, e.load(e.at(at, 64 * number)), b.load(total)), total)
        values = (e.load(e.at(v, 64 * number)) for number in vectors)
        changes = [
            b.fmul(step, b.fsub(value, b.fmul(decay, b.load(total)))) for value, total in zip(values, sums, strict=True)
        ]
        for total in sums:
            b.store(e.f(0), total)
        with cgutils.for_range(b, rows) as loop:
            offset = b.mul(loop.index, stride)
            query, key = (e.splat(e.load(e.at(base, loop.index, 4), F32)) for base in (q, k))
            for number, (total, change) in enumerate(zip(sums, changes, strict=True)):
                before = e.load(e.at(e.at(source, offset), 64 * number))
                after = e.fma(key, change, b.fmul(decay, before))
                at = e.at(e.at(target, offset), 64 * number)
                if fetches:
                    e.prefetch(e.at(at, ahead))
                e.store(at, after)
                b.store(e.fma(query, after, b.load(total)), total)
        for number, total in enumerate(sums):
            e.store(e.at(out, 64 * number), b.load(total))

    compute_columns.__name__ = f"delta_columns_{columns}_{fetches}"
    return kernel(compute_columns)


_first_wide_columns, _wide_columns, _columns = (
    _make_columns(WIDE, fetches=True),
    _make_columns(WIDE),
    _make_columns(LANES),
)


@jit
def scale_rows(a: Record, first: int, last: int) -> None:
    """Compute units of SCALE: one row."""
    for m in range(first, last):
        x, gate = a.x + m * a.x_stride, a.gate + m * a.gate_stride
        scale_by_sigmoid(x, gate, GROUP * a.groups, a.out + m * a.out_stride)


@jit
def delta_rates(a: Record, first: int, last: int) -> None:
    """Compute units of DELTA_RATES: all value heads of one token."""
    size = 4 * a.value_heads
    for m in range(first, last):
        x, out = a.x + m * a.x_stride, a.out + m * a.out_stride
        sigmoid_floats(x, a.value_heads, out)
        decay_floats(x + size, a.bias, a.rate, a.value_heads, out + size)


@jit
def _normalized_heads(a: Record, row: int, key_head: int, scratch: int) -> None:
    """Write the query and the key of a token, divided by their lengths, to the scratch memory."""
    size, groups = 4 * a.key_dim, a.key_dim // GROUP
    q, k = row + key_head * size, row + (a.key_heads + key_head) * size
    _scale_floats(q, norm_factor(q, groups, a.length_epsilon), a.q_norm, groups, scratch)
    _scale_floats(k, norm_factor(k, groups, a.length_epsilon), a.k_norm, groups, scratch + size)


@jit
def _delta_head(a: Record, start: int, stop: int, head: int, source: int, target: int, scratch: int) -> None:
    """Compute one value head of the tokens `start` to `stop`. The state is [key_dim, value_dim] at both addresses."""
    key_head = head % a.key_heads if a.tiled else head // (a.value_heads // a.key_heads)
    stride, keys = 4 * a.value_dim, 4 * a.key_dim
    values = 2 * a.key_heads * keys + head * stride
    column = 0
    while column < a.value_dim:
        width = WIDE if a.value_dim - column >= WIDE else LANES
        offset, here = 4 * column, source
        for token in range(start, stop):
            row = a.x + token * a.x_stride
            _normalized_heads(a, row, key_head, scratch)
            v, out = row + values + offset, a.out + token * a.out_stride + head * stride + offset
            rates = a.rates + token * a.rates_stride + 4 * head
            if width == WIDE and token == start:
                ahead = 4 * WIDE if column + WIDE < a.value_dim else a.key_dim * stride - offset
                _first_wide_columns(
                    here + offset, target + offset, stride, a.key_dim, scratch, scratch + keys, v, rates,
                    a.value_heads, out, ahead,
                )  # fmt: skip
            elif width == WIDE:
                _wide_columns(
                    here + offset, target + offset, stride, a.key_dim, scratch, scratch + keys, v, rates,
                    a.value_heads, out, 0,
                )  # fmt: skip
            else:
                _columns(
                    here + offset, target + offset, stride, a.key_dim, scratch, scratch + keys, v, rates,
                    a.value_heads, out, 0,
                )  # fmt: skip
            here = target
        column += width


@jit
def _normalize_and_gate(a: Record, start: int, stop: int, head: int) -> None:
    groups, offset = a.value_dim // GROUP, 4 * head * a.value_dim
    for token in range(start, stop):
        out, gate = a.out + token * a.out_stride + offset, a.gate + token * a.gate_stride + offset
        _scale_floats(out, norm_factor(out, groups, a.epsilon), a.vector, groups, out)
        multiply_arrays(out, gate, a.value_dim, out)
        scale_by_sigmoid(out, gate, a.value_dim, out)


@jit
def delta(a: Record, h: Record, first: int, last: int, scratch: int) -> None:
    """Compute units of DELTA: one value head of one request."""
    matrix = 4 * a.key_dim * a.value_dim
    for unit in range(first, last):
        head = unit % a.value_heads
        start, stop, source, target = request_states(a, h, unit // a.value_heads)
        _delta_head(a, start, stop, head, source + head * matrix, target + head * matrix, scratch)
        _normalize_and_gate(a, start, stop, head)
