"""Decode words of a packed matrix (`quant.cuda.matrix`) to 8-bit integers, with a scale for each span of 32 columns.

The value of a weight is scale * integer - constant. Integers are the codes, so that nothing is rounded, or integers of
the table. If groups have 16 columns, two of them share a span, and their weights are rounded: the largest value that
codes of the span can have becomes 127, and there are no constants.
"""

import triton
import triton.language as tl

from quant.kernels.integer_rows import rounded
from quant.kernels.packed_scales import group_scales, of_spans
from quant.kernels.packed_values import code_pairs, pair_indices, word_pairs, words_of_rows


@triton.jit
def _rounded(
    pairs: tl.tensor, s: tl.tensor, b: tl.tensor, BITS: tl.constexpr, ZERO: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return integers, int8 [n, 4, 32], and scales, float32 [n, 4], of codes in groups of 16 columns.

    `pairs`: see `word_pairs`. s and b: float32 [n, 8]. Both codes of a pair are multiplied at once, in units of
    1 / 256, and what the lower one carries to the other is less than an integer.
    """
    N: tl.constexpr = pairs.shape[0]
    MOST: tl.constexpr = (1 << BITS) - 1
    SMALLEST: tl.constexpr = 2.0**-100  # spans whose magnitudes are all smaller become zeros
    # a split, because a reduction would move the codes to other threads
    first, second = tl.split(tl.maximum(tl.abs(b), tl.abs(s * MOST - b)).reshape(N, 4, 2))
    peak = tl.maximum(tl.maximum(first, second), SMALLEST)
    factor = (256 * 127.0 / peak)[:, :, None]
    slope = _whole(s.reshape(N, 4, 2) * factor)
    start = 128 - (slope * ZERO + _whole((b - s * ZERO).reshape(N, 4, 2) * factor))
    whole = pairs.reshape(N, 4, 4, 2, 2) * slope[:, None, :, :, None] + (start * 0x10001)[:, None, :, :, None]
    integers = tl.join((whole >> 8).to(tl.int8), (whole >> 24).to(tl.int8))
    return integers.reshape(N, 4, 32), peak * (1.0 / 127.0)


@triton.jit
def _whole(values: tl.tensor) -> tl.tensor:
    """Round to integers of at most 22 bits."""
    return rounded(values).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _table_integers(words: tl.tensor, pairs: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return the integers of all codes of words, int8 [n, threads, 32], from `PackedMatrix.number_integers`."""
    # indices of 8 bits, because Triton moves them to the threads that load, or else pointers of 64 bits
    values = tl.load(pairs + pair_indices(words, BITS).to(tl.uint8).to(tl.int32))
    integers = tl.join((values & 0xFF).to(tl.int8), (values >> 8).to(tl.int8))
    return integers.reshape(words.shape[0], words.shape[1], 32)


@triton.jit
def _with_inverted_codes(words: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Invert the largest bit of each code of a plane of 1, 2, or 4 bits."""
    return words ^ (-0x77777778 if BITS == 4 else -0x55555556 if BITS == 2 else -1)


@triton.jit
def four_columns(values: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the columns of [n, 4]."""
    even, odd = tl.split(values.reshape(values.shape[0], 2, 2))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def four_parts(values: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return values[:, i] of [n, 4, m]."""
    N: tl.constexpr = values.shape[0]
    even, odd = tl.split(values.reshape(N, 2, 2, values.shape[2]).permute(0, 1, 3, 2))
    first, third = tl.split(even.permute(0, 2, 1))
    second, fourth = tl.split(odd.permute(0, 2, 1))
    return first, second, third, fourth


@triton.jit
def integer_spans(
    low: tl.tensor,
    high: tl.tensor,
    scales: tl.tensor,
    sub_scales: tl.tensor,
    zeros: tl.tensor,
    numbers: tl.tensor,
    scale_table: tl.tensor,
    scale_offset: tl.tensor,
    unit: tl.tensor,
    row: tl.tensor,
    tile: tl.tensor,
    rows: tl.tensor,
    tiles: tl.tensor,
    groups: tl.tensor,
    chunks: tl.tensor,
    blocks: tl.tensor,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    RATIO: tl.constexpr,
    ZERO: tl.constexpr,
    MINIMUMS: tl.constexpr,
    SUB_SCALE_ZERO: tl.constexpr,
    NIBBLES: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return integers, int8 [n, 4, 32], scales, and constants, float32 [n, 4], of the rows `row`, [n, 1], in a tile.

    `numbers`: `PackedMatrix.number_integers`, which are multiples of `unit`. Columns of a span are in the order of
    `columns_of_integers`. Constants are used only if `PackedForm.has_constants`.
    """
    N: tl.constexpr = row.shape[0]
    UNITS: tl.constexpr = 128 // UNIT
    BITS: tl.constexpr = LOW + HIGH
    lows = words_of_rows(low, row, tile, tiles, LOW)
    highs = lows
    if HIGH:
        highs = words_of_rows(high, row, tile, tiles, HIGH)
    s, b = group_scales(
        scales, sub_scales, zeros, scale_table, scale_offset, row // 8, row % 8, tile * 128, rows, groups, chunks,
        blocks, 1, UNITS, 0, GROUP, UNIT, RATIO, ZERO, MINIMUMS, SUB_SCALE_ZERO, NIBBLES, NESTED_BLOCK,
    )  # fmt: skip
    s, b = s.reshape(N, UNITS), b.reshape(N, UNITS)
    if UNIT == 16:
        integers, s = _rounded(word_pairs(lows, highs, 0, LOW, HIGH, 0), s, b, BITS, ZERO)
        b = s
    elif numbers is not None:
        integers = _table_integers(lows, numbers, LOW)
        s, b = of_spans(s * unit), of_spans(b)
    else:
        # the largest bit of a code becomes that of the integer, and is inverted: integer = (code - half) * 2 ** AT
        AT: tl.constexpr = 8 - BITS
        if HIGH:
            highs = _with_inverted_codes(highs, HIGH)
        else:
            lows = _with_inverted_codes(lows, LOW)
        integers = code_pairs(lows, highs, 0, LOW, HIGH, AT).to(tl.int8)
        s, b = of_spans(s * (1.0 / (1 << AT))), of_spans(b - s * (1 << (BITS - 1)))
    return integers.reshape(N, 4, 4, 8).permute(0, 2, 1, 3).reshape(N, 4, 32), s, b


@triton.jit
def columns_of_integers(inputs: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """Return columns of a span, [n, 32], in the order of `integer_spans`."""
    if UNIT == 16:
        inputs = inputs.reshape(inputs.shape[0], 2, 4, 4).permute(0, 2, 1, 3).reshape(inputs.shape[0], 32)
    return inputs
