"""Decode words of a packed matrix (`quant.cuda.matrix`): functions that the kernels for packed weights share.

The value of a weight is s * v - b, where s and b belong to the group, and v is the code or its value in the table. Two
codes become two bfloat16 numbers in one shift and one logical operation: the codes are the low bits of a mantissa, and
the number is 128 + code. Codes of 8 bits become two numbers, 128 + the low half and 2048 + 16 times the high half.
"""

import triton
import triton.language as tl

from quant.kernels.packed_scales import group_scales

BASE = 0x43004300  # bits of two bfloat16 numbers, 128 and 128


@triton.jit
def high_base(base: tl.tensor) -> tl.tensor:
    """Return the bits of 2048 and 2048, given BASE."""
    return base + 0x02000200


@triton.jit
def _at(words: tl.tensor, SHIFT: tl.constexpr, AT: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Move BITS bits of each half of int32 words from bit SHIFT to bit AT, and clear all others."""
    moved = words >> (SHIFT - AT) if SHIFT >= AT else words << (AT - SHIFT)
    return moved & (((1 << BITS) - 1) * 0x10001 << AT)


@triton.jit
def _pairs_at(
    lows: tl.tensor,
    highs: tl.tensor,
    base: tl.tensor,
    NUMBER: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    AT: tl.constexpr,
) -> tl.tensor:
    bits = _at(lows, 4 * NUMBER, AT, LOW) | base
    if HIGH:
        bits |= _at(highs, 4 * NUMBER, AT + LOW, HIGH)
    return bits


@triton.jit
def code_pairs(
    lows: tl.tensor, highs: tl.tensor, base: tl.tensor, LOW: tl.constexpr, HIGH: tl.constexpr, AT: tl.constexpr = 0
) -> tl.tensor:
    """Return base | code << AT for all codes of words, uint16 [n, threads, 32]. `base` holds it for two codes.

    `lows` and `highs` are words of both planes, int32 [n, threads, 4]. The codes of a thread are in the order of its
    matrix instructions: instruction, pair, element of the pair.
    """
    pairs = word_pairs(lows, highs, base, LOW, HIGH, AT)
    codes = tl.join((pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16))
    return codes.reshape(codes.shape[0], codes.shape[1], 32)


@triton.jit
def word_pairs(
    lows: tl.tensor, highs: tl.tensor, base: tl.tensor, LOW: tl.constexpr, HIGH: tl.constexpr, AT: tl.constexpr
) -> tl.tensor:
    """Return what `code_pairs` does as pairs, int32 [n, threads, 4, 2, 2]."""
    first = tl.join(_pairs_at(lows, highs, base, 0, LOW, HIGH, AT), _pairs_at(lows, highs, base, 1, LOW, HIGH, AT))
    second = tl.join(_pairs_at(lows, highs, base, 2, LOW, HIGH, AT), _pairs_at(lows, highs, base, 3, LOW, HIGH, AT))
    return tl.join(first, second).permute(0, 1, 2, 4, 3)


@triton.jit
def pair_indices(words: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return a + 16 * b for the pairs of codes of words, int32 [n, threads, 4, 2, 2], in the order of `code_pairs`."""
    first = tl.join(_at(words, 0, 0, BITS), _at(words, 4, 0, BITS))
    second = tl.join(_at(words, 8, 0, BITS), _at(words, 12, 0, BITS))
    codes = tl.join(first, second).permute(0, 1, 2, 4, 3)
    return (codes | codes >> 12) & 0xFF


@triton.jit
def table_values(words: tl.tensor, number_pairs: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return the values of all codes of words, bfloat16 [n, threads, 32], in the order of `code_pairs`.

    Two values are loaded at a time, from int32 [256] (`PackedMatrix.number_pairs`).
    """
    pairs = tl.load(number_pairs + pair_indices(words, BITS))
    values = tl.join((pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16))
    return values.reshape(words.shape[0], words.shape[1], 32).to(tl.bfloat16, bitcast=True)


@triton.jit
def words_of(fragments: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return four words of a plane of 1, 2, or 4 bits, [n, threads, 4], from its fragments [n, threads, BITS]."""
    if BITS == 1:
        words = tl.join(tl.join(fragments, fragments >> 2), tl.join(fragments >> 1, fragments >> 3))
    elif BITS == 2:
        words = tl.join(fragments, fragments >> 2)
    else:
        words = fragments
    return words.reshape(fragments.shape[0], fragments.shape[1], 4)


@triton.jit
def words_of_rows(plane: tl.tensor, row: tl.tensor, tile: tl.tensor, tiles: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return the words of a plane of the rows `row` in the tiles `tile`, which broadcast to [n, 1], int32 [n, 4, 4]."""
    start = ((row // 8 * tiles + tile) * 8 + row % 8) * (4 * BITS)
    return words_of(tl.load(plane + (start + tl.arange(0, 4 * BITS)[None, :])).reshape(row.shape[0], 4, BITS), BITS)


@triton.jit
def packed_columns(UNIT: tl.constexpr) -> tl.tensor:
    """Return the column in its tile of each weight of `scaled`, [1, 4, 32]."""
    RUN: tl.constexpr = 4 if UNIT == 16 else 8
    thread, index = tl.arange(0, 4)[None, :, None], tl.arange(0, 32)[None, None, :]
    return (4 * (index // RUN) + thread) * RUN + index % RUN


@triton.jit
def in_column_order(values: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """Return weights as `scaled` orders them as [n, 128]."""
    RUN: tl.constexpr = 4 if UNIT == 16 else 8
    N: tl.constexpr = values.shape[0]
    return values.reshape(N, 4, 32 // RUN, RUN).permute(0, 2, 1, 3).reshape(N, 128)


@triton.jit
def unpacked_tiles(
    low: tl.tensor,
    high: tl.tensor,
    scales: tl.tensor,
    sub_scales: tl.tensor,
    zeros: tl.tensor,
    numbers: tl.tensor,
    scale_table: tl.tensor,
    scale_offset: tl.tensor,
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
    """Return v, s, and b of weights of the rows `row` in the tiles `tile`, which broadcast to [n, 1], float32.

    v is [n, 4, UNITS, 32 / UNITS], where a tile has UNITS units of columns with one scale; s and b are [n, 4, UNITS].
    See `scaled` for the order of columns.
    """
    N: tl.constexpr = row.shape[0]
    UNITS: tl.constexpr = 128 // UNIT
    lows = words_of_rows(low, row, tile, tiles, LOW)
    highs = lows
    if HIGH:
        highs = words_of_rows(high, row, tile, tiles, HIGH)
    codes = code_pairs(lows, highs, 0, LOW, HIGH).to(tl.int32)
    s, b = group_scales(
        scales, sub_scales, zeros, scale_table, scale_offset, row // 8, row % 8, tile * 128, rows, groups, chunks,
        blocks, 4, UNITS, 0, GROUP, UNIT, RATIO, ZERO, MINIMUMS, SUB_SCALE_ZERO, NIBBLES, NESTED_BLOCK,
    )  # fmt: skip
    numbers_of_codes = codes.to(tl.float32) if numbers is None else tl.load(numbers + codes)
    return numbers_of_codes.reshape(N, 4, UNITS, 32 // UNITS), s, b


@triton.jit
def scaled(v: tl.tensor, s: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return the weights of the result of `unpacked_tiles`, float32 [n, 4, 32].

    The weight [i, thread, 4 or 8 * run + k] is in column (4 * run + thread) * (4 or 8) + k of row i's tile.
    """
    return (s[:, :, :, None] * v - b[:, :, :, None]).reshape(v.shape[0], 4, 32)
