"""Compiled sampling of tokens from rows of logits, without filters.

Reference implementation: `engine.sampling.drawing.draw` for rows without filters. The same uniform number gives the
same token, unless it is within rounding of the boundary between two tokens. Weights are summed by blocks, so that only
the tokens of one block are searched one by one. Every sum has a fixed order, and the token of a row depends on that row
alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from engine.backends.cpu.floats import each_vector, load_some, store_some
from engine.grammar import Words
from engine.sampling.drawing import NO_TOKEN, SMALLEST_TEMPERATURE
from quant.cpu.kernel import jit, kernel
from quant.cpu.native import Entry
from quant.cpu.vector import F32, I16, LANES, Emit

BLOCK = 256  # number of tokens whose weights are summed together
LARGEST_SHARE = 1 - 2**-53


def _allowed(e: Emit, words: Any, number: Any, live: Any) -> Any:
    """Return a mask of the lanes of vector `number` whose tokens have their bit set in `words`."""
    bits = e.b.bitcast(e.load(e.at(words, number, LANES // 8), I16), ir.VectorType(ir.IntType(1), LANES))
    return bits if live is None else e.b.and_(bits, live)


@kernel
def largest_allowed(e: Emit, x: Any, words: Any, count: Any, out: Any) -> None:
    """Write the largest allowed x to out[0], or -inf if there is none. x is allowed if its bit in `words` is set."""
    b = e.b
    best = e.variable(e.f(-np.inf))

    def compare(number: Any, live: Any) -> None:
        allowed = _allowed(e, words, number, live)
        value = b.select(allowed, load_some(e, e.at(x, number, 64), live), e.f(-np.inf))
        b.store(e.larger(value, b.load(best)), best)

    each_vector(e, count, compare)
    e.store(out, e.reduce(b.load(best), e.larger))


@kernel
def weigh_allowed(e: Emit, x: Any, words: Any, count: Any, settings: Any, out: Any, total: Any) -> None:
    """Write weights to `out`, and their sum to total[0].

    The weight is exp((x - settings[0]) * settings[1]) if the bit in `words` is set, otherwise 0.
    """
    b = e.b
    best, factor = (e.splat(e.load(e.at(settings, number, 4), F32)) for number in (0, 1))
    totals = e.variable(e.f(0))

    def weigh(number: Any, live: Any) -> None:
        distance = b.fmul(b.fsub(load_some(e, e.at(x, number, 64), live), best), factor)
        # exp underflows for a distance below -87
        weighs = b.and_(_allowed(e, words, number, live), b.fcmp_ordered(">", distance, e.f(-87)))
        weights = b.select(weighs, e.exp(distance), e.f(0))
        store_some(e, e.at(out, number, 64), weights, live)
        b.store(b.fadd(b.load(totals), weights), totals)

    each_vector(e, count, weigh)
    e.store(total, e.reduce(b.load(totals), b.fadd))


@jit
def _draw_row(x: int, words: int, count: int, temperature: float, uniform: float, scratch: Any) -> int:
    weights, sums, settings = scratch[:count], scratch[count:-2], scratch[-2:]
    weights_at = np.int64(scratch.ctypes.data)
    sums_at, settings_at = weights_at + 4 * count, weights_at + 4 * (count + len(sums))
    largest_allowed(x, words, count, settings_at)
    if settings[0] == -np.inf:
        return NO_TOKEN
    settings[1] = 1 / temperature
    total = 0.0
    for block in range(len(sums)):
        first = block * BLOCK
        size = min(BLOCK, count - first)
        weigh_allowed(x + 4 * first, words + first // 8, size, settings_at, weights_at + 4 * first, sums_at + 4 * block)
        total += sums[block]
    if not total > 0:  # the largest logit was NaN or infinite
        return NO_TOKEN
    # uniform < 1, so the product rounds to less than the total
    block, before = _find_bucket(sums, uniform * total)
    inside = weights[block * BLOCK : (block + 1) * BLOCK]
    share, total = (uniform * total - before) / sums[block], 0.0
    for weight in inside:
        total += weight
    return block * BLOCK + _find_bucket(inside, min(share, LARGEST_SHARE) * total)[0]


@jit
def _find_bucket(weights: Any, number: float) -> tuple[int, float]:
    """Return the index of the weight whose range contains `number`, and the sum of the weights before it."""
    index, before = 0, 0.0
    while index < len(weights) - 1 and before + weights[index] <= number:
        before += weights[index]
        index += 1
    return index, before


def draw_rows(
    logits: int,
    stride: int,
    count: int,
    rows: Any,
    words: Any,
    temperatures: Any,
    uniforms: Any,
    scratch: Any,
    drawn: Any,
) -> None:
    """Set drawn[i] to a token drawn from row rows[i] of the logits, among the tokens whose bits are set at words[i].

    drawn[i] is NO_TOKEN if no allowed logit is above -inf, or if the largest is infinite or NaN. `scratch` has space
    for `count` weights, the sum of each block, and two settings.
    """
    for i in range(len(rows)):
        drawn[i] = _draw_row(logits + stride * rows[i], words[i], count, temperatures[i], uniforms[i], scratch)


_IDS, _NUMBERS = types.int64[::1], types.float64[::1]
SIGNATURE = types.void(
    types.int64, types.int64, types.int64, _IDS, _IDS, _NUMBERS, _NUMBERS, types.float32[::1], _IDS
)  # fmt: skip


class CompiledDraw:
    """A compiled `engine.sampling.drawing.Draw`. Only one thread may use it at a time."""

    def __init__(self, draw_rows: Entry, vocabulary: int) -> None:
        self._draw_rows = draw_rows
        self._vocabulary = vocabulary
        self._scratch = np.empty(vocabulary + -(-vocabulary // BLOCK) + 2, np.float32)
        self._all_allowed = np.full(-(-vocabulary // 32), -1, np.int32)

    def __call__(
        self,
        logits: Tensor,
        rows: Sequence[int],
        words: Words,
        mask_rows: Sequence[int],
        temperatures: Sequence[float],
        uniforms: Sequence[float],
    ) -> list[int]:
        self._check_bounds(logits, rows, words, mask_rows)
        start, stride, all_allowed = words.ctypes.data, words.strides[0], self._all_allowed.ctypes.data
        drawn = np.empty(len(rows), np.int64)
        self._draw_rows(
            logits.data_ptr(),
            4 * logits.stride(0),
            self._vocabulary,
            np.array(rows),
            np.array([all_allowed if row < 0 else start + stride * row for row in mask_rows]),
            np.maximum(temperatures, SMALLEST_TEMPERATURE),
            np.array(uniforms),
            self._scratch,
            drawn,
        )
        return drawn.tolist()

    def _check_bounds(self, logits: Tensor, rows: Sequence[int], words: Words, mask_rows: Sequence[int]) -> None:
        """Check that all accesses of compiled code are in range. Raises ValueError or IndexError."""
        if logits.dtype != torch.float32 or logits.stride(1) != 1 or logits.shape[1] != self._vocabulary:
            raise ValueError(f"logits are {logits.dtype} {tuple(logits.shape)}, not float32 rows of {self._vocabulary}")
        if len(words) and words.shape[1] != len(self._all_allowed):
            raise ValueError(f"masks have {words.shape[1]} words, not {len(self._all_allowed)}")
        if not 0 <= min(rows) <= max(rows) < len(logits) or max(mask_rows) >= len(words):
            raise IndexError(
                f"rows {rows} of {len(logits)}, or mask rows {mask_rows} of {len(words)}, are out of range"
            )
